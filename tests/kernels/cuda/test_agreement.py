"""A device computes what the CPU does: whole prefills against fp32 on the CPU.

In fp32 both devices agree to rounding. In bf16 each is off from fp32 on the CPU, and the GPU may not be off by much more
than the CPU is. Policies that choose by what was computed may choose other tokens there; so KV and logits are compared
where the choice is a rule, and of the others the share of tokens that both chose.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from blendserve.blend.blender import Blender
from blendserve.blend.policies import make_policy, takes
from blendserve.config import BlendConfig
from blendserve.core import Prompt
from blendserve.evaluate.methods import parse_methods
from blendserve.kv import stacked
from blendserve.models.model import DecoderModel
from blendserve.registry import CORRECTIONS, POLICIES
from blendserve.store import MemoryStore
from tests.support.blending import VOCAB, distance, some_prompt
from tests.support.toy import toy_llama

POLICY = {name: make_policy(BlendConfig(policy=name)) for name in POLICIES.names if takes(name, "ratio")}
CHOOSING = tuple(f"{name}@0.15" for name, p in POLICY.items() if p.needs_scoring_pass or p.check_layers)
RULED = [name for name in POLICY if f"{name}@0.15" not in CHOOSING]
CORRECTED = [f"{name}{end}" for name in RULED for end in ("@0.05", f"+{CORRECTIONS.default}@0.15")]
FP32_BOUND = 2e-3  # of logits and KV that reach tens, after tens of layers
BF16_TIMES = 3.0  # the GPU may be so many times as far from fp32 as the CPU is: other orders of summing
LEAST_COMMON = 0.8  # share of the chosen tokens, in fp32
Prefills = dict[str, tuple[Tensor, set[int]]]  # by method: logits, keys and values, and the chosen tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_whole_prefills_agree() -> None:
    model, prompt = toy_llama(VOCAB, 1024), some_prompt([128] * 4, prefix=32, suffix=40)
    right, coarse, found, rough = (
        prefills(model, dtype, where, prompt)
        for where in ("cpu", "cuda")
        for dtype in (torch.float32, torch.bfloat16)
    )
    for name, (numbers, chosen) in right.items():
        if name in CHOOSING:
            assert len(chosen & found[name][1]) >= LEAST_COMMON * len(chosen | found[name][1]), name
        else:
            assert distance(found[name][0], numbers) < FP32_BOUND, name
            assert distance(rough[name][0], numbers) <= BF16_TIMES * distance(coarse[name][0], numbers), name


def prefills(model: Any, dtype: torch.dtype, device: str, prompt: Prompt) -> Prefills:
    """A copy of the model on that device, by every method."""
    decoder = DecoderModel.of(deepcopy(model).to(device, dtype).eval())
    blender = Blender(decoder, f"{dtype}", MemoryStore(1 << 32), prompt.prefix, prompt.prefix)
    blender.writer.precompute([chunk.ids for chunk in prompt.chunks])
    found: Prefills = {}
    for method in parse_methods(("full", "reuse", *CORRECTED, *CHOOSING), ()):
        done = blender.run(prompt, method.blend).result
        parts = done.logits, stacked(done.cache.keys), stacked(done.cache.values)
        numbers = torch.cat([x.cpu().double().flatten() for x in parts])
        found[method.name] = numbers, set(done.recomputed.tolist())
    return found
