"""Compiles the kernels for real GPUs, without one: triton brings the compiler and the assembler with it.

Run as a process of its own, where triton does not interpret. A JSON line a kernel: what it needs of a GPU's processor.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled

from blendserve.kernels.cuda.scattered import tile_for
from blendserve.kernels.cuda.triton_kernels.attention import join, rows_over_keys
from blendserve.kernels.cuda.triton_kernels.place import chunks_into_cache

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
FLOATS = {"scale", "softcap"}
PLAIN = {"rows", "n_keys", "splits", "window", *FLOATS}  # not known to be multiples of 16


def attention(
    sm: int,
    dtype: torch.dtype,
    dim: int,
    few: bool,
    window: bool = False,
    softcap: bool = False,
    split: bool = False,
) -> dict[str, Any]:
    tile = tile_for(dtype, dim, 1 if few else 2000, sm in (80, 90, 100))
    pointer = POINTERS[dtype]
    types = dict.fromkeys(("queries", "keys", "values"), pointer)
    types |= {"positions": "*i64", "out": "*fp32" if split else pointer, "logs": "*fp32"}
    constants = {
        "GROUP": 4, "DIM": dim, "BLOCK_M": tile.queries, "BLOCK_N": tile.keys,
        "BLOCK_D": triton.next_power_of_2(dim), "WINDOW": window, "SOFTCAP": softcap, "SPLIT": split,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",
    }  # fmt: skip
    return build(rows_over_keys, sm, types, constants, tile.warps, tile.stages)


def joining(sm: int) -> dict[str, Any]:
    constants = {"DIM": 128, "BLOCK_D": 128, "MOST": 32}
    types = {"parts": "*fp32", "logs": "*fp32", "out": "*bf16"}
    return build(join, sm, types, constants, 4, 1)


def placing(sm: int, aligned: bool, neighbours: bool) -> dict[str, Any]:
    types = {"table": "*i64", **dict.fromkeys(("keys", "values", "cos", "sin"), "*bf16")}
    constants = {
        "DIM": 128, "TURNED": 64 if neighbours else 128, "NEIGHBOURS": neighbours, "STEP": 1, "WIDE": neighbours,
        "ALIGNED": aligned, "BLOCK": 32, "BLOCK_D": 128,
    }  # fmt: skip
    return build(chunks_into_cache, sm, types, constants, 4, 3)


def build(
    kernel: Any, sm: int, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int
) -> dict[str, Any]:
    """Compile as for tensors of a cache: addresses and strides that are multiples of 16."""
    names = kernel.arg_names
    signature = {
        n: "constexpr" if n in constants else types.get(n, "fp32" if n in FLOATS else "i32") for n in names
    }
    aligned = [i for i, n in enumerate(names) if n not in constants and n not in PLAIN]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(n),): value for n, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    made = compiled(
        source, target=GPUTarget("cuda", sm, 32), options={"num_warps": warps, "num_stages": stages}
    )
    ptx = made.asm["ptx"]
    wide = len(re.findall(r"ld\.global[\w.:]*\.v4|cp\.async\.cg", ptx))
    return {"sm": sm, "shared": made.metadata.shared, "wide_loads": wide, **assembled(ptx)}


def assembled(ptx: str) -> dict[str, int]:
    """What the assembler says of registers that did not suffice."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    arch = re.search(r"\.target (\S+?),?\s", ptx)
    assert arch
    assembler = tools / ("ptxas-blackwell" if arch[1].startswith("sm_1") else "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(assembler), "-v", f"--gpu-name={arch[1]}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert spilled, said
    return {"spilled": int(spilled[1])}


def main() -> None:
    for call in json.loads(sys.argv[1]):
        options = {**call["options"]}
        if "dtype" in options:
            options["dtype"] = getattr(torch, options["dtype"])
        print(json.dumps({**call, **globals()[call["make"]](**options)}), flush=True)


if __name__ == "__main__":
    main()
