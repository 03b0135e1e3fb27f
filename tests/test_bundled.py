"""The bundled reader on real text, in numbers: what rounding explains passes, and nothing else does."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics

import pytest
import torch
from torch import Tensor

from blendserve.blend import prefill as module
from blendserve.blend.prefill import blend_prefill
from blendserve.config import BlendConfig, PromptConfig
from blendserve.core import Passage, Prompt, run
from blendserve.engine.prompt import PromptBuilder
from blendserve.models.runner import append
from tests.support.blending import OneOff, assert_near, lay, model_says
from tests.support.tokenizers import bundled_reader, bundled_tokenizer

NAMES = ("with", "for", "lambda", "try")
PASSAGES = [Passage(topics[name][:520], name) for name in NAMES]
QUESTION = "What does the with statement do?"
TAIL = " The statement wraps a block in methods that a context manager defines, so that they"


@cache
def prompt() -> Prompt:
    return PromptBuilder(bundled_tokenizer(), PromptConfig()).build(QUESTION, PASSAGES)


@cache
def tail() -> list[int]:
    ids: list[int] = bundled_tokenizer()(TAIL, add_special_tokens=False)["input_ids"]
    return ids


@cache
def exact(dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """One `model.forward`: logits [1 + tail, V] after the prompt and each tail token, and the prompt's K and V."""
    said, n = model_says(bundled_reader(dtype).adapter, (*prompt().ids, *tail())), len(prompt())
    layers = said.past_key_values.layers
    keys, values = (torch.stack([getattr(x, part)[0, :, :n] for x in layers]) for part in ("keys", "values"))
    return said.logits[0, n - 1 :].float(), keys.float(), values.float()


@cache
def ours(dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """The same by a blending prefill at ratio 1, and decode of the tail."""
    adapter, n = bundled_reader(dtype).adapter, len(prompt())
    done = run(blend_prefill(adapter, lay(adapter, prompt()), BlendConfig(ratio=1.0), len(tail())))
    keys, values = done.cache.keys[:, :, :n].clone(), done.cache.values[:, :, :n].clone()
    logits = [done.logits]
    for i, token in enumerate(tail()):
        logits.append(append(adapter, done.cache, n + i, (token,))[0])
    return torch.stack(logits).float(), keys, values


def rms(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt())


def check_fp32() -> None:
    (logits, _, values), (expected, _, expected_values) = ours("float32"), exact("float32")
    assert_near(logits, expected, 1e-4)
    assert_near(values, expected_values, 1e-3)


def check_bf16() -> None:
    """Ours is about as far from fp32 as transformers' own bf16.

    Over the cache ours was 1.03 to 1.05 times as far off as transformers' sdpa, on four prompts: 1.15 is allowed. Logits
    are fewer and noisier, 0.97 to 1.6 times by instruction set: 2 is allowed.
    """
    parts = zip(ours("bfloat16"), exact("bfloat16"), exact("float32"), (2.0, 1.15, 1.15), strict=True)
    for blend, model, truth, bound in parts:
        assert rms(blend - truth) < bound * rms(model - truth)


CHECKS = {"float32": check_fp32, "bfloat16": check_bf16}


@pytest.mark.parametrize("dtype", CHECKS)
def test_ratio_1_and_decode_equal_forward(dtype: str) -> None:
    assert 500 < len(prompt()) < 700
    CHECKS[dtype]()


@pytest.mark.parametrize("dtype", CHECKS)
def test_the_check_sees_a_rotation_one_position_off(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KVLoader", OneOff)
    monkeypatch.setitem(globals(), "ours", ours.__wrapped__)
    with pytest.raises(AssertionError):
        CHECKS[dtype]()
