"""Fidelity by second derivation, intervals against theory and by hand, scores worked after the official scripts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blendserve.blend import prefill as module
from blendserve.blend.prefill import PassResult, blend_prefill
from blendserve.config import BlendConfig
from blendserve.core import run as run_steps
from blendserve.evaluate import stats
from blendserve.evaluate.fidelity import forced, kl, nll
from blendserve.evaluate.job import Outcome
from blendserve.evaluate.methods import parse_methods
from blendserve.evaluate.metrics import agreement, exact_match, f1, normalise, rouge_l
from blendserve.evaluate.summary import KL_FLOOR, Predictions, opponents, tail
from blendserve.evaluate.tasks import TASKS
from blendserve.models.runner import append
from tests.support.blending import OneOff, assert_near, lay, model_says, some_ids, some_prompt
from tests.support.evaluations import run, write_dataset
from tests.support.models import KINDS, tiny_adapter

ANSWER, PROMPT = some_ids(9, seed=7), some_prompt([12, 9, 14])


def prefilled(name: str, **options: Any) -> PassResult:
    adapter = tiny_adapter(name)
    return run_steps(blend_prefill(adapter, lay(adapter, PROMPT), BlendConfig(**options), len(ANSWER)))


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
    right = toy("raw").metrics["methods"]
    monkeypatch.setattr(module, "KVLoader", OneOff)
    wrong = run(tmp_path, write_dataset(tmp_path), methods=("prefix", "query+shift", "all")).metrics[
        "methods"
    ]
    for exact in ("prefix", "all"):  # both rest on the stored prefix and first chunk
        assert wrong[exact]["mean_kl"]["mean"] > 1e-5
    by = "query+shift@0.25"
    assert wrong[by]["mean_kl"]["mean"] > 1.2 * right[by]["mean_kl"]["mean"]


SCORES = yaml.safe_load((Path(__file__).parent / "data" / "scores.yaml").read_text("utf-8"))


def test_the_interval_is_that_of_the_normal_approximation() -> None:
    """Of a mean, and by the delta method of a ratio of means."""
    rng = np.random.default_rng(1)
    values, unit = rng.exponential(size=400), rng.gamma(2.0, size=400)
    ratio = float(values.mean() / unit.mean())
    for found, mean, deviation in (
        (stats.mean(values), values.mean(), np.std(values)),
        (stats.ratio_of_means(values, unit), ratio, np.std(values - ratio * unit) / unit.mean()),
    ):
        assert found
        half = 1.96 * deviation / math.sqrt(400)
        expected = pytest.approx((mean, mean - half, mean + half), rel=0.03)
        assert (found["mean"], found["low"], found["high"]) == expected
        assert found["n"] == 400
    assert stats.mean(values) == stats.mean(values)


def test_ratios_by_hand() -> None:
    """Of means and of medians; the questions of both are resampled together."""
    unit = [1.0, 2.0, 30.0, 4.0]
    for ratio, values, of, wanted in (
        (stats.ratio_of_means, [0.25 * u for u in unit], unit, (0.25, 0.25, 0.25)),
        (stats.ratio_of_means, [1.0, 1.0], [1.0, 3.0], (0.5, 1 / 3, 1.0)),
        # A resample of the last question alone has no ratio.
        (stats.ratio_of_means, [1.0, 1.0], [1.0, 0.0], (2.0, 1.0, 2.0)),
        (stats.ratio_of_medians, [4.0, 8.0, 800.0], [2.0, 4.0, 6.0], (2.0, 2.0, 800 / 6)),
    ):
        found = ratio(values, of)
        assert found
        assert (found["mean"], found["low"], found["high"]) == pytest.approx(wanted)
    assert stats.ratio_of_means([1.0], [0.0]) is None


def test_a_question_with_fewer_prompts_weighs_less() -> None:
    """Two questions, of three prompts and of one: both may be drawn twice, and together they make a quarter."""
    found = stats.mean([0.0, 1.0, 0.0, 0.0], ["a", "b", "a", "a"])
    assert (found["mean"], found["low"], found["high"], found["n"]) == (0.25, 0.0, 1.0, 2)
    one = stats.mean([0.0, 3.0], ["a", "a"])
    assert (one["mean"], one["low"], one["high"], one["n"]) == (1.5, 1.5, 1.5, 1)
    median = stats.ratio_of_medians([4.0, 2.0, 4.0, 9.0], [2.0, 2.0, 2.0, 2.0], ["a", "b", "a", "a"])
    assert median  # of the questions' own medians: 4 and 2 over 2
    assert (median["mean"], median["low"], median["high"]) == (1.5, 1.0, 2.0)


def predictions(**kls: list[float]) -> Predictions:
    """Of four prompts: c~1 is a permutation of c."""
    ids = ["a", "b", "c", "c~1"]
    methods = parse_methods(kls, (), coded=True)
    zero = {"full": [0.0] * 4, "reuse": [0.0] * 4}
    records = {
        (i, name): {"mean_kl": kl}
        for name, own in {**zero, **kls}.items()
        for i, kl in zip(ids, own, strict=True)
    }
    return Predictions(records, {i: i[0] for i in ids}, methods)


def test_a_tail_by_hand() -> None:
    kls, others = [0.02, KL_FLOOR / 5, 0.3, 0.05], [0.01, KL_FLOOR / 100, 0.1, 0.1]
    found = tail(predictions(prefix=kls, reuse=others), "prefix", "reuse")  # 2, both at the floor, 3, 0.5
    assert (found["against"], found["worse"]["mean"], found["worse"]["n"]) == ("reuse", 0.5, 3)
    assert found["p95"] == pytest.approx(2 + 0.85)  # at 0.95 * 3 of 0.5, 1, 2, 3
    assert found["worst"] == pytest.approx(3.0)
    assert found["prompt"] == "c"
    above = tail(predictions(prefix=[3 * KL_FLOOR] * 4, reuse=[1e-9] * 4), "prefix", "reuse")
    assert above["worst"] == pytest.approx(3.0)  # above the floor everything counts


def test_methods_are_set_against_full_reuse_and_themselves_without_correction() -> None:
    wanted: dict[str, list[str]] = {
        **{name: [] for name in ("full", "reuse", "prefix", "exact")},
        **{
            name: ["reuse"]
            for name in ("exact/int8", "reuse/int8", "query@0.1", "none+shift", "query@0.1/bos/int8")
        },
        "query+shift@0.1": ["reuse", "query@0.1"],
        "query+shift@0.1/bos/int8": ["reuse", "query@0.1/bos/int8"],
    }
    found = {v.name: opponents(v) for v in parse_methods(wanted, (0.1,), coded=True)}
    assert {name: [other for other in found[name] if other in wanted] for name in wanted} == wanted


def test_scores_are_those_worked_by_hand() -> None:
    for text, expected in SCORES["normalised"]:
        assert normalise(text) == expected
    for answer, golds, *scores in SCORES["questions"]:
        assert [s(answer, golds) for s in (exact_match, f1, rouge_l)] == pytest.approx(scores), answer
    for task, answer, gold, score in SCORES["tasks"]:
        for golds in ([gold], ["13", gold]):  # the best gold counts
            assert TASKS[task].score(answer, golds) == pytest.approx(score, abs=1e-7), (task, answer)
