"""The bundled reader on real text, in numbers: what rounding explains passes, and nothing else does."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import Tensor

from blendserve.blend import prefill as module
from blendserve.blend.layout import Layout
from blendserve.blend.prefill import Prefilled, prefill
from blendserve.config import BlendConfig, Config, DecodeConfig, PromptConfig
from blendserve.core import Passage, Prompt
from blendserve.engine.engine import Engine
from blendserve.engine.prompt import PromptBuilder
from blendserve.models.forward import append
from blendserve.store import MemoryStore
from tests.support.blending import OneOff, assert_near, distance, lay, model_says
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
def layout(dtype: str) -> Layout:
    return lay(bundled_reader(dtype).adapter, prompt())


def blended(dtype: str, **options: Any) -> Prefilled:
    config = BlendConfig(**options)
    return prefill(bundled_reader(dtype).adapter, prompt(), layout(dtype), config, len(tail()))


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
    done, n = blended(dtype, ratio=1.0), len(prompt())
    keys, values = done.cache.keys[:, :, :n].clone(), done.cache.values[:, :, :n].clone()
    logits = [done.logits]
    for i, token in enumerate(tail()):
        logits.append(append(bundled_reader(dtype).adapter, done.cache, n + i, (token,))[0])
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


def test_each_step_of_the_method_brings_logits_nearer() -> None:
    """On this prompt, which reuse alone gets wrong; the evaluation tells whether it holds in the mean."""
    expected = exact("float32")[0][0]
    reuse = blended("float32", policy="none", correction="none")
    chosen = blended("float32", ratio=0.15, correction="none")
    shifted = blended("float32", ratio=0.15, correction="shift")
    errors = [rms(done.logits - expected) for done in (reuse, chosen, shifted)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.2
    assert errors[2] < 0.6 * errors[0]
    assert distance(shifted.logits, expected) > 1e-2


def test_a_blended_answer_end_to_end() -> None:
    config = Config(blend=BlendConfig(method="blend"), decode=DecodeConfig(max_new_tokens=8))
    with Engine(config, bundled_reader("float32"), MemoryStore(2**30)) as engine:
        engine.precompute(PASSAGES)
        full = engine.answer(QUESTION, PASSAGES, method="full")
        everything = engine.answer(QUESTION, PASSAGES, ratio=1.0)
        answer = engine.answer(QUESTION, PASSAGES, ratio=0.15)
    assert everything.text == full.text
    assert "with" in full.text.lower()
    assert answer.report.blended
    assert (answer.report.chunks_hit, answer.report.chunks_missing) == (4, 0)
    assert answer.report.share_recomputed == pytest.approx(0.15, abs=0.005)
    assert answer.text
