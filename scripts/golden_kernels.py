"""Record SHA-256 of every native kernel's outputs on fixed inputs, and compare another checkout with the record.

    PYTHONPATH=CHECKOUT python scripts/golden_kernels.py record FILE
    PYTHONPATH=CHECKOUT python scripts/golden_kernels.py compare FILE

The inputs are made here, so that both checkouts compute the same. Digests hold for one CPU: `compare` exits with 1 where
one differs or is missing, and with 2 for a record of another machine.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from blendserve.kernels import selfcheck
from blendserve.kernels.cpu import isa
from blendserve.kernels.cpu.library import loaded
from blendserve.kernels.norm import FORMS, Norm
from blendserve.kernels.ops import OPERATIONS
from blendserve.kernels.rotary import HALVES
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.types import AttentionSpec, CorrectionParams, Prior, RecomputedTokens, Rope
from blendserve.provenance import cpu_name
from blendserve.store.codecs.predict import rans


def calls(dtype: torch.dtype) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Operation, name of the case, arguments."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    angles = 6.0 * torch.rand((600, 32), generator=generator).repeat(1, 2)
    rope = Rope(angles.cos().to(dtype), angles.sin().to(dtype))
    cache, few, many = draw(2, 2, 600, 64), torch.tensor([5, 300, 599]), torch.arange(0, 600, 2)
    for at in (few[-1:], few, many, torch.arange(130)):
        for window, softcap in ((None, None), (70, None), (None, 2.0), (70, 2.0)):
            spec = AttentionSpec(0.125, window, softcap)
            given = draw(6, len(at), 64), *cache, spec
            yield "attend", f"{len(at)} rows, {window}, {softcap}", (*given, plan_rows(at, 3, window))
            if len(at) < 4:
                absent = (torch.arange(600) % 3 == 1).index_fill(0, at, False)
                plan = plan_rows(at, 3, window, masked_keys=absent)
                yield "attend_with_scores", f"{len(at)} rows, {window}, {softcap}", (*given, plan)
    for rows in (1, 8, 9, 130):
        yield "linear", f"{rows}", (draw(rows, 192), draw(142, 192), draw(142))
        yield "gated_activation", f"{rows}", (4 * draw(rows, 90), draw(rows, 90), F.silu)
        for i, form in enumerate(FORMS):
            norm = Norm(lambda x: x, draw(576), 1e-5, form)
            yield "add_norm", f"{rows}, form {i}", (draw(rows, 576), draw(rows, 576), norm)
    yield "rotate", "600 rows", (draw(3, 600, 80), rope, HALVES)
    chunks = [(3, draw(2, 130, 64), draw(2, 130, 64)), (140, draw(2, 60, 64), draw(2, 60, 64))]
    yield "place", "two chunks", (chunks, *torch.zeros(2, 2, 600, 64, dtype=dtype), rope, HALVES)
    at, others = (torch.tensor([i for i in range(600) if (i % 7 == 0) == fresh]) for fresh in (True, False))
    sizes, other_sizes = ([int((x < 250).sum()), int((x >= 250).sum())] for x in (at, others))
    which = torch.arange(len(at)), at, sizes, others, other_sizes, (0.4, 0.7)
    fresh = RecomputedTokens(draw(2, len(at), 64), draw(2, len(at), 64), *which)
    prior = Prior(draw(2, 128, 128).float() / 40, draw(2, 128).float())
    shift = CorrectionParams(16.0, 0.0, 0.5, 0.6, None)
    ridge = CorrectionParams(16.0, 40.0, 0.8, 0.9, 800.0, 20.0, 0.6, 0.7)
    for name, how in (("shift", (shift, None)), ("ridge", (ridge, None)), ("prior", (ridge, prior))):
        yield "correct", name, (*draw(2, 2, 600, 64), fresh, rope, HALVES, *how)


def codec_calls(
    level: isa.Level, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Name, call and arguments for one instruction set's kernels of codec `predict`."""
    library, numbers = loaded(level), np.random.default_rng(0)
    model, layer = rans.random_model(), rans.random_map(64, 20)

    def decode(
        segment: memoryview, below: Any, means: Any, model: Any, layer: Any, dim: int, dtype: Any
    ) -> Any:
        symbols = rans.decode(library, segment, below[0], len(below[1]), means, model)
        heads, codes = rans.dequantize(library, below[1], torch.from_numpy(symbols), layer, dim, dtype)
        return heads, symbols, codes

    for spread in (0.3, 9.0):
        values = numbers.laplace(scale=spread, size=(40, 20)).clip(-128, 127).astype(np.int8)
        seen, codes = numbers.integers(-128, 128, (40, 37)).astype(np.int8), rans.random_codes(40, 64)
        means, contexts = np.full(20, int(spread * rans.ONE), np.int32), rans.contexts_of(seen, 40)
        yield f"pack: {spread}", partial(rans.encode, library), (values, contexts, means, model)
        segment = memoryview(rans.encode_reference(values, contexts, means, model))
        yield f"decode: {spread}", decode, (segment, (seen, codes), means, model, layer, 16, dtype)
        args = codes, torch.from_numpy(values), layer, 16, dtype
        yield f"reconstruct: {spread}", partial(rans.dequantize, library), args


def digest(run: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Of the result, and of the arguments, as some operations write to them."""
    out, sha = run(*args), hashlib.sha256()
    for x in (*(out if isinstance(out, tuple) else (out,)), *args):
        if isinstance(x, (torch.Tensor, np.ndarray, bytes)):
            sha.update(bytes(x.contiguous().view(torch.uint8).numpy() if isinstance(x, torch.Tensor) else x))
    return sha.hexdigest()


@torch.inference_mode()
def record() -> dict[str, Any]:
    found = {}
    for level in isa.LEVELS.values():
        if selfcheck.cpu_status(level).active:
            dtype = getattr(torch, level.dtype)
            for operation, case, args in calls(dtype):
                for backend in OPERATIONS[operation].backends:
                    if backend.name == f"{level.title} kernel" and backend.supports(*args):
                        found[f"{level.name} {operation}: {case}"] = digest(backend.run, args)
            for name, run, args in codec_calls(level, dtype) if "rans_decode" in level.sources else ():
                found[f"{level.name} {name}"] = digest(run, args)
    return {"cpu": cpu_name(), "instruction_sets": isa.allowed(), "outputs": found}


def main(mode: str, file: Path) -> int:
    new = json.loads(json.dumps(record()))
    if mode == "record":
        file.write_text(json.dumps(new, indent=1))
        print(f"{len(new['outputs'])} outputs on {new['cpu']}, {', '.join(new['instruction_sets'])}")
        return 0
    old = json.loads(file.read_text())
    if (old["cpu"], old["instruction_sets"]) != (new["cpu"], new["instruction_sets"]):
        print(f"recorded on {old['cpu']} with {old['instruction_sets']}, not on {new['cpu']}")
        return 2
    names = sorted(old["outputs"].keys() | new["outputs"].keys())
    differ = [name for name in names if old["outputs"].get(name) != new["outputs"].get(name)]
    print("\n".join([*differ, f"{len(differ)} of {len(names)} outputs differ"]))
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
