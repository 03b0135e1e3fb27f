"""Blending of today, which a rewrite must not change: selections, reports, reasons, logits and fingerprints.

    python -m tests.golden.blend record      writes tests/golden/blend.json anew

A case is a request to a tiny model, on plain PyTorch in fp32. Weights are made of integers: equal bits on any machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.priors import Priors
from blendserve.config import BlendConfig
from blendserve.core import Chunk, Prompt, TokenIds
from blendserve.models.loader import fingerprint
from blendserve.models.model import DecoderModel
from blendserve.registry import CORRECTIONS, POLICIES
from blendserve.store import MemoryStore
from tests.support.kernel_switches import plain_torch
from tests.support.models import EQUAL_KINDS, tiny_model
from tests.support.stores import ROOMY, FaultyStore

Case = dict[str, Any]
FILE = Path(__file__).with_name("blend.json")


def ids(n: int, seed: int) -> TokenIds:
    return tuple(np.random.default_rng(seed).integers(3, 97, n).tolist())


PREFIX, PRIMER, QUESTION = (1, 5, 9, 13, 17), ids(30, 7), ids(6, 50)
A, B, C, NONE, DONOR = (ids(n, seed) for seed, n in enumerate((14, 9, 20, 12, 45)))
EDIT = (*DONOR[:20], 3 + (DONOR[20] - 2) % 94, *DONOR[21:])  # like NONE it is not stored, and DONOR is
PROMPTS = {"stored": (A, B, C), "hole": (A, NONE, B, (), C, A), "near": (B, EDIT, C), "damaged": (C, B, A)}


def options() -> Iterator[tuple[str, Case]]:
    policies: list[tuple[str, Case]] = [(name, {"policy": name}) for name in sorted(POLICIES.names)]
    policies += [("gradual", {"policy": "deviation", "check_layers": (1, 2)})]
    for (name, policy), correction in product(policies, sorted(CORRECTIONS.names)):
        yield f"{name} {correction}", {**policy, "correction": correction}
    yield from ((method, {"method": method}) for method in ("full", "prefix", "reuse"))
    yield from ((f"ratio {ratio}", {"ratio": ratio}) for ratio in (0.0, 1.0))


@torch.no_grad()
def model(kind: str) -> Any:
    made, draw = tiny_model.__wrapped__(kind), np.random.default_rng(0)
    for name, weights in sorted(made.named_parameters()):
        drawn = torch.from_numpy(draw.integers(-(2**15), 2**15, tuple(weights.shape)).astype(np.float32))
        is_norm = weights.dim() == 1 and not name.endswith("bias")
        weights.copy_(is_norm + drawn * 2.0**-17)
    return made


def priors(made: DecoderModel) -> Priors:
    (heads, dim, _), draw = made.kv_shapes[0], np.random.default_rng(1)
    shape = made.n_layers - 1, heads, 2 * dim
    weights, constant = (draw.integers(-256, 256, s) / 4096 for s in ((*shape, shape[-1]), shape))
    return Priors(torch.from_numpy(weights).float(), torch.from_numpy(constant).float())


@cache
def blender(kind: str, name: str) -> Blender:
    """With a store for this prompt. Chunks of the damaged one are computed after a primer, too."""
    store, made = FaultyStore(MemoryStore(ROOMY)), DecoderModel.of(model(kind))
    context = (*PREFIX, *PRIMER) if name == "damaged" else PREFIX
    maker = Blender(made, "golden", store, PREFIX, context)
    maker.writer.precompute([chunk for chunk in (*PROMPTS[name], DONOR) if chunk not in (NONE, EDIT)])
    maker.priors.use(priors(made))
    maker.near.refresh()
    store.damaged, store.damaged_layer = {maker.key(B)} if name == "damaged" else set(), 2
    return maker


def run(kind: str, name: str, changes: Case) -> Prefilled:
    prompt = Prompt(PREFIX, tuple(map(Chunk, PROMPTS[name])), QUESTION)
    blend = BlendConfig(**{"method": "blend", "ratio": 0.3, "near": name == "near", **changes})
    return blender(kind, name).run(prompt, blend)


def sample(kind: str) -> Iterator[tuple[str, list[Any]]]:
    """A fifth of the cases, as far as they hold on any machine; logits are last."""
    for at, (name, (said, changes)) in enumerate(product(PROMPTS, options())):
        if at % 5 == 0:
            done = run(kind, name, changes)
            report = sorted(done.report.to_dict().items())
            added = ("exact", "tokens_kept", "tokens_refined")  # since these were recorded
            numbers = [v for name, v in report if type(v) in (int, bool) and name not in added]
            codes = " ".join(part.code.value for part in done.explanation.parts)
            logits = [round(x, 5) for x in done.result.logits[:94:31].tolist()]
            exact = done.result.recomputed.tolist(), numbers, round(done.report.cost, 6), codes
            yield f"{name}: {said}", [*exact, logits]


def fingerprints() -> dict[str, str]:
    return {kind: fingerprint(model(kind)) for kind in EQUAL_KINDS}


def record() -> None:
    cases = {f"{kind}, {case}": values for kind in EQUAL_KINDS for case, values in sample(kind)}
    found = {"transformers": transformers.__version__, "fingerprints": fingerprints(), "cases": cases}
    FILE.write_text(json.dumps(found).replace('], "', '],\n"') + "\n", "utf-8")


if __name__ == "__main__":
    assert sys.argv[1:] == ["record"], __doc__
    with plain_torch():
        record()
