"""The Triton kernels compile for real GPUs, fit into their processors, and keep to their registers.

Triton brings the compiler and the assembler with it, so that no GPU is needed; the process that compiles is one of its
own, as Triton interprets in this one: `python -m tests.kernels.cuda.test_compiled`. A JSON line for each kernel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.kernels.cuda.scattered import tile_for

SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes a program may have
FLOATS = {"scale", "softcap"}
PLAIN = {"rows", "n_keys", "splits", "window", *FLOATS}  # not known to be multiples of 16


@pytest.mark.nightly
def test_they_compile_and_fit() -> None:
    pytest.importorskip("triton.backends.nvidia")
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, capture_output=True, text=True, env=plain, check=False)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == 3
    for one in made:
        assert one["shared"] <= SHARED[one["sm"]], one
        assert one["spilled"] == 0, one
        assert one["wide_loads"] > 0, f"{one} reads no whole vectors"


def attention(sm: int, few: bool) -> dict[str, Any]:
    """The tiles that a request meets first, in bf16, heads of 128."""
    from blendserve.kernels.cuda.triton_kernels.attention import rows_over_keys

    tile = tile_for(torch.bfloat16, 128, 1 if few else 2000, True)
    types = dict.fromkeys(("queries", "keys", "values"), "*bf16")
    types |= {"positions": "*i64", "sinks": "*fp32", "out": "*fp32" if few else "*bf16", "logs": "*fp32"}
    constants = {
        "GROUP": 4, "DIM": 128, "BLOCK_M": tile.queries, "BLOCK_N": tile.keys, "BLOCK_D": 128, "WINDOW": few,
        "SOFTCAP": False, "SINKS": few, "SPLIT": few, "PRECISION": "ieee",
    }  # fmt: skip
    return build(rows_over_keys, sm, types, constants, tile.warps, tile.stages)


def placement(sm: int) -> dict[str, Any]:
    from blendserve.kernels.cuda.triton_kernels.place import chunks_into_cache

    types = {"table": "*i64", **dict.fromkeys(("keys", "values", "cos", "sin"), "*bf16")}
    constants = {
        "DIM": 128, "TURNED": 128, "NEIGHBOURS": False, "STEP": 1, "WIDE": False, "ALIGNED": True, "BLOCK": 32,
        "BLOCK_D": 128,
    }  # fmt: skip
    return build(chunks_into_cache, sm, types, constants, 4, 3)


def build(
    kernel: Any, sm: int, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int
) -> dict[str, Any]:
    """Compile as for tensors of a cache: addresses and strides that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget

    names = kernel.arg_names
    types = dict.fromkeys(names, "i32") | dict.fromkeys(FLOATS & {*names}, "fp32") | types
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [i for i, n in enumerate(names) if n not in constants and n not in PLAIN]
    values = {(names.index(n),): value for n, value in constants.items()}
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = triton.compiler.ASTSource(kernel, types, values, attributes)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    ptx = made.asm["ptx"]
    wide = len(re.findall(r"ld\.global[\w.:]*\.v4|cp\.async\.cg", ptx))
    return {"sm": sm, "shared": made.metadata.shared, "wide_loads": wide, "spilled": spilled(ptx)}


def spilled(ptx: str) -> int:
    """Bytes for which the assembler found no register."""
    import triton

    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    (arch,) = re.findall(r"\.target ([^\s,]+)", ptx)
    command = [str(assembler), "-v", f"--gpu-name={arch}", "/dev/stdin", "-o", "/dev/null"]
    said = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    (found,) = re.findall(r"(\d+) bytes spill stores", said)
    return int(found)


if __name__ == "__main__":
    for made in (attention(80, few=False), attention(90, few=True), placement(80)):
        print(json.dumps(made), flush=True)
