"""A device computes what the CPU does: kernels against the formula in float64, whole prefills against fp32 on the CPU.

In fp32 both devices agree to rounding. In bf16 each is off from fp32 on the CPU, and the GPU may not be off by much more
than the CPU is. Policies that choose by what was computed may choose other tokens there; so KV and logits are compared
where the choice is a rule, and of the others the share of tokens that both chose. Without a GPU the CPU stands for it.
"""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blendserve.blend.blender import Blender
from blendserve.core import Chunk, Prompt, TokenIds
from blendserve.evaluate.methods import MethodSpec, parse_methods
from blendserve.kernels.dispatch import KernelOp
from blendserve.kernels.ops import ATTEND
from blendserve.kernels.reference import attend_reference, formula
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.selfcheck import BOUNDS
from blendserve.kernels.types import AttentionSpec
from blendserve.models.model import DecoderModel
from blendserve.registry import CORRECTIONS, POLICIES
from blendserve.store import MemoryStore
from tests.support.toy import toy_llama

POLICY = {name: POLICIES.load(name) for name in POLICIES.names}
CHOOSING = tuple(f"{name}@0.15" for name, p in POLICY.items() if p.needs_scoring_pass or p.has_check_layers)
RULED = [name for name, p in POLICY.items() if p.has_ratio and f"{name}@0.15" not in CHOOSING]
FIXED = (
    "full",
    "reuse",
    *(f"{n}{c}@{r}" for n in RULED for c, r in (("", 0.05), (f"+{CORRECTIONS.default}", 0.15))),
)
FP32_BOUND = 2e-3  # of logits and KV that reach tens, after tens of layers
BF16_TIMES = 3.0  # the GPU may be so many times as far from fp32 as the CPU is: other orders of summing
LEAST_COMMON = 0.8  # share of the chosen tokens, in fp32
GPU = torch.device("cuda") if torch.cuda.is_available() else None
DEVICES = [
    torch.device("cpu"),
    pytest.param(GPU, marks=[pytest.mark.gpu, pytest.mark.skipif(GPU is None, reason="no GPU")]),
]


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention of one kind."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    window: int | None = None
    softcap: float | None = None


SMALL = (Heads(4, 2, 16, torch.float32), Heads(4, 2, 16, torch.bfloat16, 30, 0.7))
LARGE = (
    Heads(32, 8, 128, torch.bfloat16),
    Heads(9, 3, 64, torch.bfloat16),
    Heads(16, 8, 256, torch.bfloat16, 300, 30.0),
    Heads(8, 8, 80, torch.float16),
    Heads(8, 2, 64, torch.float32),
)


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_compute_the_formula(device: torch.device) -> None:
    for heads in SMALL if device.type == "cpu" else LARGE:
        found = largest_differences(heads, device, 150 if device.type == "cpu" else 2000)
        assert found
        assert all(difference < 2 * BOUNDS[heads.dtype] for difference in found.values()), (heads, found)


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def far(q: Any, keys: Any, values: Any, spec: Any, plan: Any) -> Any:
        moved = (plan.positions + 1).clamp(max=keys.shape[1] - 1)
        return attend_reference(q, keys, values, spec, plan_rows(moved, plan.group, plan.window))

    backends: list[Any] = [replace(backend, run=far) for backend in ATTEND.backends]
    monkeypatch.setitem(globals(), "ATTEND", KernelOp(*backends))
    found = largest_differences(SMALL[0], torch.device("cpu"), 100)
    assert max(found.values()) > 2 * BOUNDS[torch.float32]


def largest_differences(heads: Heads, device: torch.device, longest: int, tries: int = 4) -> dict[str, float]:
    """Every backend that takes such rows, over random ones -> its largest difference to the formula."""
    draw, found = random.Random(str(heads)), dict[str, float]()
    for n in range(tries):
        share = (1.0, 0.15, 0.02)[n % 3]
        rows = torch.tensor(sorted(draw.sample(range(longest), max(1, round(share * longest)))))
        rows = rows if n else torch.arange(longest // 2, longest)  # at least once side by side
        for name, difference in differences(heads, rows, device, longest).items():
            found[name] = max(found.get(name, 0.0), difference)
    return found


def differences(heads: Heads, at: Tensor, device: torch.device, longest: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(len(at))
    q, keys, values = (
        torch.randn(size, n, heads.dim, generator=generator).to(heads.dtype)
        for size, n in ((heads.heads, len(at)), (heads.kv_heads, longest), (heads.kv_heads, longest))
    )
    spec = AttentionSpec(2 / heads.dim**0.5, heads.window, heads.softcap)
    wanted = formula(q, keys, values, at, spec)
    q, keys, values = q.to(device), keys.to(device), values.to(device)
    plan = plan_rows(at.to(device), heads.heads // heads.kv_heads, heads.window, at)
    return {
        backend.name: float((backend.run(q, keys, values, spec, plan).cpu().double() - wanted).abs().max())
        for backend in ATTEND.backends
        if backend.is_usable(q, keys, values, spec, plan)
    }


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a prefill leaves, on the CPU in float64."""

    logits: Tensor
    keys: Tensor
    values: Tensor
    chosen: frozenset[int]

    def difference(self, other: Prefill) -> float:
        """The largest of logits and KV; infinite where one is no number."""
        pairs = ((self.logits, other.logits), (self.keys, other.keys), (self.values, other.values))
        return max(float((a - b).abs().nan_to_num(float("inf")).max()) for a, b in pairs)

    def common(self, other: Prefill) -> float:
        """The share of the chosen tokens that both chose."""
        return len(self.chosen & other.chosen) / max(1, len(self.chosen | other.chosen))


@pytest.mark.parametrize("device", DEVICES)
def test_whole_prefills_agree(device: torch.device) -> None:
    model, cpu = toy_llama(97, 1024), torch.device("cpu")
    prompt = some_prompt(model.config.vocab_size, 4, 30 if device.type == "cpu" else 128)
    wanted, coarse = prefills(model, torch.float32, cpu, prompt), prefills(model, torch.bfloat16, cpu, prompt)
    found, rough = (
        prefills(model, torch.float32, device, prompt),
        prefills(model, torch.bfloat16, device, prompt),
    )
    for name in wanted:
        if name in CHOOSING:
            assert found[name].common(wanted[name]) >= LEAST_COMMON, name
        else:
            assert found[name].difference(wanted[name]) < FP32_BOUND, name
            allowed = BF16_TIMES * coarse[name].difference(wanted[name])
            assert rough[name].difference(wanted[name]) <= allowed, name


def prefills(model: Any, dtype: torch.dtype, device: torch.device, prompt: Prompt) -> dict[str, Prefill]:
    """A copy of the model on that device, by every method."""
    adapter = DecoderModel.of(deepcopy(model).to(device, dtype).eval())
    blender = Blender(adapter, f"{dtype}", MemoryStore(1 << 32), prompt.prefix, prompt.prefix)
    blender.writer.precompute([chunk.ids for chunk in prompt.chunks])
    return {
        method.name: prefill(blender, prompt, method) for method in parse_methods((*FIXED, *CHOOSING), ())
    }


def prefill(blender: Blender, prompt: Prompt, method: MethodSpec) -> Prefill:
    done = blender.run(prompt, method.blend).result
    logits, keys, values = (x.cpu().double() for x in (done.logits, done.cache.keys, done.cache.values))
    return Prefill(logits, keys, values, frozenset(done.recomputed.tolist()))


def some_prompt(vocabulary: int, chunks: int, chunk: int) -> Prompt:
    """Random tokens."""
    draw = random.Random(1)

    def ids(n: int) -> TokenIds:
        return tuple(draw.randrange(3, vocabulary) for _ in range(n))

    return Prompt(ids(32), tuple(Chunk(ids(chunk)) for _ in range(chunks)), ids(40))
