"""Fidelity by second derivation: one pass against steps and forward, KL against its sum, a collapse that shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blendserve.blend import prefill as module
from blendserve.blend.prefill import Prefilled, prefill
from blendserve.config import BlendConfig
from blendserve.evaluate.fidelity import agreement, forced, kl, nll
from blendserve.evaluate.job import Outcome
from blendserve.models.forward import append
from tests.support.blending import OneOff, assert_near, lay, model_says, some_ids, some_prompt
from tests.support.evaluations import run, write_dataset
from tests.support.models import KINDS, tiny_adapter

ANSWER, PROMPT = some_ids(9, seed=7), some_prompt([12, 9, 14])


def prefilled(name: str, **options: Any) -> Prefilled:
    adapter = tiny_adapter(name)
    return prefill(adapter, PROMPT, lay(adapter, PROMPT), BlendConfig(**options), len(ANSWER))


@pytest.mark.parametrize("name", KINDS)
def test_one_pass_is_single_steps_and_over_full_prefill_the_model_s_forward(name: str) -> None:
    adapter, at = tiny_adapter(name), len(PROMPT)
    one, many = (prefilled(name, ratio=0.3) for _ in range(2))
    singly = torch.stack([append(adapter, many.cache, at + i, (t,))[0] for i, t in enumerate(ANSWER)])
    assert_near(append(adapter, one.cache, at, ANSWER), singly)
    assert_near(one.cache.keys, many.cache.keys)
    assert_near(one.cache.values, many.cache.values)
    done = prefilled(name, ratio=1.0)
    own = model_says(adapter, (*PROMPT.ids, *ANSWER[:-1])).logits[0, at - 1 :]
    assert_near(forced(adapter, done.cache, at, done.logits, ANSWER), own)


def test_what_decoding_left_in_the_cache_does_not_matter() -> None:
    adapter, at = tiny_adapter("llama"), len(PROMPT)
    clean, used = (prefilled("llama", ratio=0.3) for _ in range(2))
    append(adapter, used.cache, at, some_ids(len(ANSWER), seed=8))
    assert torch.equal(*(forced(adapter, d.cache, at, d.logits, ANSWER) for d in (clean, used)))
    for answer in ([], [3]):  # of one decision: no pass is needed
        assert torch.equal(forced(adapter, clean.cache, at, clean.logits, answer), clean.logits[None])


def some_logits(seed: int) -> Tensor:
    return 3 * torch.randn(3, 11, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 99), st.integers(0, 99), st.floats(-50, 50))
def test_kl_is_its_sum(a: int, b: int, moved: float) -> None:
    p, q = some_logits(a), some_logits(b)
    for row, value in enumerate(kl(p, q + moved)):
        ps, qs = ([math.exp(x) for x in logits[row].tolist()] for logits in (p, q))
        wanted = sum(x / sum(ps) * math.log(x / sum(ps) / (y / sum(qs))) for x, y in zip(ps, qs, strict=True))
        assert value == pytest.approx(wanted, abs=1e-5)
        assert value >= 0
    assert kl(p, p) == [0.0] * 3


def test_likelihood_and_agreement_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    assert nll(logits, [1, 0]) == pytest.approx((math.log(4 / 3) + math.log(2)) / 2)
    assert agreement("the river Main", "River Rhine") == pytest.approx(0.5)
    empty = [agreement(*pair) for pair in (("", ""), ("...", "..."), ("", "x"), ("x", ""))]
    assert empty == [1, 1, 0, 0]


def test_a_wrong_rotation_collapses_fidelity(
    toy: Callable[[str], Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that are rotated to the position after their own."""
    right = toy("raw").figures["methods"]
    monkeypatch.setattr(module, "KVLoader", OneOff)
    wrong = run(tmp_path, write_dataset(tmp_path), methods=("prefix", "query+shift", "all")).figures[
        "methods"
    ]
    for exact in ("prefix", "all"):  # both rest on the stored prefix and first chunk
        assert wrong[exact]["mean_kl"]["mean"] > 1e-5
    by = "query+shift@0.25"
    assert wrong[by]["mean_kl"]["mean"] > 1.2 * right[by]["mean_kl"]["mean"]
