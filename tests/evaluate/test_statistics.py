"""Divergence by second derivation, intervals against theory and by hand, scores worked after the official scripts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given
from hypothesis import strategies as st

from blendserve.evaluate import stats
from blendserve.evaluate.methods import parse_methods
from blendserve.evaluate.summary import KL_FLOOR, Predictions, tail
from blendserve.evaluate.tasks import TASKS, agreement, exact_match, f1, normalise, rouge_l
from blendserve.quality.fidelity import forced, kl


@pytest.mark.parametrize("answer", [[], [3]])
def test_an_answer_of_one_decision_needs_no_pass(answer: list[int]) -> None:
    """Logits of longer ones are the model's own: test_runs.py, of perplexity."""
    logits, unused = torch.ones(5), cast("Any", None)
    assert torch.equal(forced(unused, unused, 9, logits, answer), logits[None])


@given(st.integers(0, 99), st.integers(0, 99), st.floats(-50, 50))
def test_kl_is_torch_s_and_never_below_zero(a: int, b: int, moved: float) -> None:
    p, q = (3 * torch.randn(3, 11, generator=torch.Generator().manual_seed(seed)) for seed in (a, b))
    log_q, log_p = (logits.double().log_softmax(-1) for logits in (q, p))
    wanted = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    assert kl(p, q + moved) == pytest.approx(wanted.tolist(), abs=1e-5)
    assert min(kl(p, q + moved)) >= 0
    assert kl(p, p) == [0.0] * 3


def test_agreement_by_hand() -> None:
    assert agreement("the river Main", "River Rhine") == pytest.approx(0.5)
    assert [agreement(*pair) for pair in (("", ""), ("...", "..."), ("", "x"), ("x", ""))] == [1, 1, 0, 0]


SCORES = yaml.safe_load((Path(__file__).parent / "data" / "scores.yaml").read_text("utf-8"))


def test_the_interval_is_that_of_the_normal_approximation() -> None:
    """Of a ratio of means, by the delta method; of a mean."""
    rng = np.random.default_rng(1)
    values, units = rng.exponential(size=400), rng.gamma(2.0, size=400)
    for unit in (units, np.ones(400)):
        ratio = float(values.mean() / unit.mean())
        half = 1.96 * np.std(values - ratio * unit) / unit.mean() / math.sqrt(400)
        expected = pytest.approx((ratio, ratio - half, ratio + half, 400), rel=0.03)
        assert (found := stats.ratio_of_means(values, unit))
        assert tuple(found.values()) == expected
    assert stats.mean(values) == found


@pytest.mark.parametrize(
    ("ratio", "values", "unit", "questions", "wanted"),
    [
        (stats.ratio_of_means, [0.25, 0.5, 7.5], [1.0, 2.0, 30.0], None, (0.25, 0.25, 0.25, 3)),
        (stats.ratio_of_means, [1.0, 1.0], [1.0, 3.0], None, (0.5, 1 / 3, 1.0, 2)),
        # A resample of the last question alone has no ratio.
        (stats.ratio_of_means, [1.0, 1.0], [1.0, 0.0], None, (2.0, 1.0, 2.0, 2)),
        (stats.ratio_of_medians, [4.0, 8.0, 800.0], [2.0, 4.0, 6.0], None, (2.0, 2.0, 800 / 6, 3)),
        # Two questions, of three prompts and of one: both may be drawn twice, and together they make a quarter.
        (stats.ratio_of_means, [0.0, 1.0, 0.0, 0.0], [1.0] * 4, [*"abaa"], (0.25, 0.0, 1.0, 2)),
        (stats.ratio_of_means, [0.0, 3.0], [1.0] * 2, [*"aa"], (1.5, 1.5, 1.5, 1)),
        # Of the questions' own medians: 4 and 2 over 2.
        (stats.ratio_of_medians, [4.0, 2.0, 4.0, 9.0], [2.0] * 4, [*"abaa"], (1.5, 1.0, 2.0, 2)),
    ],
)
def test_ratios_by_hand(ratio: Any, values: Any, unit: Any, questions: Any, wanted: Any) -> None:
    """Of means and of medians; the questions of both sides are resampled together."""
    assert tuple(ratio(values, unit, questions).values()) == pytest.approx(wanted)
    assert ratio(values, [0.0] * len(values), questions) is None


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


def test_scores_are_those_worked_by_hand() -> None:
    for text, expected in SCORES["normalised"]:
        assert normalise(text) == expected
    for answer, golds, *scores in SCORES["questions"]:
        assert [s(answer, golds) for s in (exact_match, f1, rouge_l)] == pytest.approx(scores), answer
    for task, answer, gold, score in SCORES["tasks"]:
        for golds in ([gold], ["13", gold]):  # the best gold counts
            assert TASKS[task].score(answer, golds) == pytest.approx(score, abs=1e-7), (task, answer)
