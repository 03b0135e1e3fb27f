"""Fidelity by second derivation: one pass against steps and forward, KL against its sum, a collapse that shows."""

from __future__ import annotations

import math
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
from blendserve.core import Prompt
from blendserve.evaluate.fidelity import agreement, forced, kl
from blendserve.models.forward import append
from tests.evaluate.helpers import run, write_dataset
from tests.support.blending import OneOff, assert_near, lay, model_says, some_ids, some_prompt
from tests.support.models import KINDS, tiny_adapter

ANSWER = some_ids(9, seed=7)


def prefilled(name: str, prompt: Prompt, room: int, **options: Any) -> Prefilled:
    adapter = tiny_adapter(name)
    return prefill(adapter, prompt, lay(adapter, prompt), BlendConfig(**options), room)


@pytest.mark.parametrize("name", KINDS)
def test_one_pass_is_what_single_steps_are(name: str) -> None:
    adapter, prompt = tiny_adapter(name), some_prompt([12, 9, 14])
    one, many = (prefilled(name, prompt, len(ANSWER), ratio=0.3) for _ in range(2))
    at_once = append(adapter, one.cache, len(prompt), ANSWER)
    singly = torch.stack(
        [append(adapter, many.cache, len(prompt) + i, (t,))[0] for i, t in enumerate(ANSWER)]
    )
    assert_near(at_once, singly)
    assert_near(one.cache.keys, many.cache.keys)
    assert_near(one.cache.values, many.cache.values)


@pytest.mark.parametrize("name", KINDS)
def test_over_full_prefill_it_is_forward(name: str) -> None:
    adapter, prompt = tiny_adapter(name), some_prompt([12, 9, 14])
    done = prefilled(name, prompt, len(ANSWER), ratio=1.0)
    own = model_says(adapter, (*prompt.ids, *ANSWER[:-1])).logits[0, len(prompt) - 1 :]
    assert_near(forced(adapter, done.cache, len(prompt), done.logits, ANSWER), own)


def test_what_decoding_left_behind_does_not_matter() -> None:
    adapter, prompt = tiny_adapter("llama"), some_prompt([12, 9])
    clean, used = (prefilled("llama", prompt, len(ANSWER), ratio=0.3) for _ in range(2))
    append(adapter, used.cache, len(prompt), some_ids(len(ANSWER), seed=8))
    logits = [forced(adapter, d.cache, len(prompt), d.logits, ANSWER) for d in (clean, used)]
    assert torch.equal(*logits)


def test_an_answer_of_one_decision_needs_no_pass() -> None:
    first = torch.rand(5)
    for answer in ([], [3]):
        assert torch.equal(forced(tiny_adapter("llama"), None, 4, first, answer), first[None])  # type: ignore[arg-type]


def _logits(seed: int, rows: int = 3) -> Tensor:
    return 3 * torch.randn(rows, 11, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 99), st.integers(0, 99), st.floats(-50, 50))
def test_kl_is_its_sum(a: int, b: int, moved: float) -> None:
    p, q = _logits(a), _logits(b)
    for row, value in enumerate(kl(p, q + moved)):
        ps, qs = ([math.exp(x) for x in logits[row].tolist()] for logits in (p, q))
        wanted = sum(x / sum(ps) * math.log(x / sum(ps) / (y / sum(qs))) for x, y in zip(ps, qs, strict=True))
        assert value == pytest.approx(wanted, abs=1e-5)
        assert value >= 0
    assert kl(p, p) == [0.0] * 3


def test_agreement_is_f1_with_the_reference_as_gold() -> None:
    assert agreement("the river Main", "River Rhine") == pytest.approx(0.5)
    assert (agreement("", ""), agreement("", "x"), agreement("x", "")) == (1.0, 0.0, 0.0)
    assert agreement("...", "...") == 1.0


def fidelity_of(broken: bool, folder: Path) -> dict[str, float]:
    """Mean KL of each method, with keys rotated to their places or to the places after."""
    with pytest.MonkeyPatch.context() as patch:
        if broken:
            patch.setattr(module, "KVLoader", OneOff)
        outcome = run(
            folder, write_dataset(folder), name=f"broken-{broken}", methods=("prefix", "query+shift", "all")
        )
    return {name: found["mean_kl"]["mean"] for name, found in outcome.figures["methods"].items()}


def test_a_wrong_rotation_collapses_fidelity(tmp_path: Path) -> None:
    right, wrong = fidelity_of(False, tmp_path), fidelity_of(True, tmp_path)
    for exact in ("prefix", "all"):  # both rest on the stored prefix and first chunk
        assert right[exact] < 1e-9
        assert wrong[exact] > 1e-5
    assert wrong["query+shift@0.25"] > 1.2 * right["query+shift@0.25"], (right, wrong)
