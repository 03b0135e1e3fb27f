"""A device computes what the CPU does: whole prefills against fp32 on the CPU.

In fp32 both devices agree to rounding. In bf16 each is off from fp32 on the CPU, and the GPU may not be off by much more
than the CPU is. Policies that choose by what was computed may choose other tokens there; so KV and logits are compared
where the choice is a rule, and of the others the share of tokens that both chose. Without a GPU the CPU stands for it.
"""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from blendserve.blend.blender import Blender
from blendserve.core import Chunk, Prompt, TokenIds
from blendserve.evaluate.methods import MethodSpec, parse_methods
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
