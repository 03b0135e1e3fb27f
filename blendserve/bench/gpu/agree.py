"""Is what a GPU computes right? Kernels against the formula in float64, whole prefills against this machine's CPU.

In fp32 both devices must agree to rounding. In bf16 each of them is off from fp32 on the CPU, and the GPU may not be off
by much more than the CPU is. There, policies that choose by what was computed may choose other tokens on either
device; so KV and logits are compared where the choice is a rule (`full`, `reuse`, and policies that look at nothing), and
of the others the share of tokens that both chose is told.
"""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blendserve.bench.figures import Figures
from blendserve.bench.gpu.plan import Heads
from blendserve.blend.blender import Blender
from blendserve.blend.policies.base import Policy
from blendserve.core import Chunk, Prompt, TokenIds
from blendserve.evaluate.methods import MethodSpec, parse_methods
from blendserve.kernels.ops import ATTEND
from blendserve.kernels.reference import formula
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.types import AttentionSpec
from blendserve.kernels.verify import BOUNDS
from blendserve.models.adapter import Adapter
from blendserve.registry import CORRECTIONS, POLICIES
from blendserve.store import MemoryStore


def _words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Methods whose choice is a rule, and those that choose by what was computed."""
    kinds: dict[str, type[Policy]] = {name: POLICIES.load(name) for name in POLICIES.names}
    looking = [name for name, kind in kinds.items() if kind.needs_scoring_pass or kind.has_check_layers]
    ruled = [name for name, kind in kinds.items() if kind.has_ratio and name not in looking]
    words = [(f"{name}@0.05", f"{name}@0.15", f"{name}+{CORRECTIONS.default}@0.15") for name in ruled]
    return ("full", "reuse", *(word for three in words for word in three)), tuple(
        f"{n}@0.15" for n in looking
    )


FIXED, CHOOSING = _words()
FP32_BOUND = 2e-3  # of logits and KV that reach tens, after tens of layers
BF16_TIMES = 3.0  # the GPU may be so many times as far from fp32 as the CPU is: other orders of summing
FEWEST_COMMON = 0.8  # share of the chosen tokens, in fp32


def kernels(heads: Heads, device: torch.device, longest: int, tries: int = 4) -> Figures:
    """Every way that takes such rows, over random ones -> the largest difference to the formula, and the bound."""
    draw, off = random.Random(str(heads)), dict[str, float]()
    for n in range(tries):
        share = (1.0, 0.15, 0.02)[n % 3]
        at = torch.tensor(sorted(draw.sample(range(longest), max(1, round(share * longest)))))
        rows = at if n else torch.arange(longest // 2, longest)  # at least once side by side
        for name, difference in _differences(heads, rows, device, longest).items():
            off[name] = max(off.get(name, 0.0), difference)
    bound = 2 * BOUNDS[heads.dtype]
    return {"heads": str(heads), "off": off, "bound": bound, "ok": all(x < bound for x in off.values())}


def _differences(heads: Heads, at: Tensor, device: torch.device, longest: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(len(at))
    q, keys, values = (
        torch.randn(shape, generator=generator).to(heads.dtype)
        for shape in (
            (heads.heads, len(at), heads.dim),
            *((heads.kv_heads, longest, heads.dim) for _ in range(2)),
        )
    )
    spec = AttentionSpec(2 / heads.dim**0.5, heads.window, heads.softcap)
    wanted = formula(q, keys, values, at, spec)
    q, keys, values = q.to(device), keys.to(device), values.to(device)
    plan = plan_rows(at.to(device), heads.heads // heads.kv_heads, heads.window, at)
    return {
        backend.name: float((backend.run(q, keys, values, spec, plan).cpu().double() - wanted).abs().max())
        for backend in ATTEND.backends
        if backend.name != "FlexAttention" and backend.serves(q, keys, values, spec, plan)
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a prefill leaves, on the CPU in float64."""

    logits: Tensor
    keys: Tensor
    values: Tensor
    chosen: frozenset[int]

    def off(self, other: Outcome) -> Figures:
        parts = ((self.logits, other.logits), (self.keys, other.keys), (self.values, other.values))
        logits, keys, values = (float((a - b).abs().nan_to_num(float("inf")).max()) for a, b in parts)
        same = bool(self.logits.argmax() == other.logits.argmax())
        common = len(self.chosen & other.chosen) / max(1, len(self.chosen | other.chosen))
        return {"logits": logits, "keys": keys, "values": values, "same_token": same, "common": common}

    def furthest(self, other: Outcome) -> float:
        found = self.off(other)
        return max(float(found[part]) for part in ("logits", "keys", "values"))


def whole(name: str, model: Any, device: torch.device, chunk: int) -> Figures:
    """One reader by several methods: fp32 and bf16 on the device, each against fp32 on the CPU."""
    prompt = some_prompt(model.config.vocab_size, 4, chunk, seed=1)
    words, cpu = (*FIXED, *CHOOSING), torch.device("cpu")
    here = outcomes(model, torch.float32, cpu, prompt, words)
    coarse = outcomes(model, torch.bfloat16, cpu, prompt, words)
    there = outcomes(model, torch.float32, device, prompt, words)
    rough = outcomes(model, torch.bfloat16, device, prompt, words)
    methods = {word: _judged(word, here, coarse, there, rough) for word in here}
    return {"model": name, "methods": methods, "ok": all(m["ok"] for m in methods.values())}


def _judged(
    word: str,
    here: dict[str, Outcome],
    coarse: dict[str, Outcome],
    there: dict[str, Outcome],
    rough: dict[str, Outcome],
) -> Figures:
    wanted = here[word]
    figures = {
        "fp32": there[word].off(wanted),
        "bf16": rough[word].off(wanted),
        "bf16 on the CPU": coarse[word].off(wanted),
    }
    if word.partition("@")[0] in {w.partition("@")[0] for w in CHOOSING}:
        ok = figures["fp32"]["common"] >= FEWEST_COMMON
    else:
        allowed = BF16_TIMES * coarse[word].furthest(wanted)
        ok = there[word].furthest(wanted) < FP32_BOUND and rough[word].furthest(wanted) <= allowed
    return {**figures, "ok": ok}


def outcomes(
    model: Any, dtype: torch.dtype, device: torch.device, prompt: Prompt, words: tuple[str, ...]
) -> dict[str, Outcome]:
    """A copy of the model on that device, by every method."""
    adapter = Adapter(deepcopy(model).to(device, dtype).eval())
    store = MemoryStore(1 << 32)
    blender = Blender(adapter, f"{dtype}", store, prompt.prefix, prompt.prefix)
    blender.precompute([c.ids for c in prompt.chunks])
    return {v.name: _outcome(blender, prompt, v) for v in parse_methods(words, ())}


def _outcome(blender: Blender, prompt: Prompt, variant: MethodSpec) -> Outcome:
    done = blender.run(prompt, variant.blend).result
    logits, keys, values = (x.cpu().double() for x in (done.logits, done.cache.keys, done.cache.values))
    return Outcome(logits, keys, values, frozenset(done.recomputed.tolist()))


def some_prompt(
    vocabulary: int, chunks: int, chunk: int, seed: int = 0, prefix: int = 32, suffix: int = 40
) -> Prompt:
    """Random tokens; more chunks begin with the same ones."""
    draw = random.Random(seed)

    def ids(n: int) -> TokenIds:
        return tuple(draw.randrange(3, vocabulary) for _ in range(n))

    front, back = ids(prefix), ids(suffix)
    return Prompt(front, tuple(Chunk(ids(chunk)) for _ in range(chunks)), back)
