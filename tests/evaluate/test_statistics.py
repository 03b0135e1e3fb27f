"""Intervals against theory and by hand, tails by hand, scores worked after the official scripts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from blendserve.evaluate import longbench_rouge
from blendserve.evaluate.intervals import bootstrap, by_group, paired_difference, share, times
from blendserve.evaluate.metrics import exact_match, f1, normalise, rouge_l
from blendserve.evaluate.tail import FLOOR, opponents, rounding, tail
from blendserve.evaluate.tasks import TASKS
from blendserve.evaluate.variants import variants

SCORES = yaml.safe_load((Path(__file__).parent / "data" / "scores.yaml").read_text("utf-8"))


def test_the_interval_is_that_of_the_normal_approximation() -> None:
    values = np.random.default_rng(1).exponential(size=400).tolist()
    interval = bootstrap(values)
    half = 1.96 * np.std(values) / math.sqrt(400)
    assert interval.mean == pytest.approx(np.mean(values))
    assert (interval.low, interval.high) == pytest.approx(
        (interval.mean - half, interval.mean + half), rel=0.03
    )
    assert (interval.n, interval.significant) == (400, True)
    assert interval == bootstrap(values) != bootstrap(values, seed=1)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng, means, ratios = np.random.default_rng(2), 0, 0
    for n in range(150):
        interval = bootstrap((rng.random(80) < 0.3).tolist(), seed=n)
        means += interval.low <= 0.3 <= interval.high
        unit = rng.gamma(2.0, size=80)
        ratio = share((unit * rng.gamma(4.0, 0.1, size=80)).tolist(), unit.tolist(), seed=n)
        assert ratio
        ratios += ratio.low <= 0.4 <= ratio.high
    assert 0.88 * 150 <= means < 150
    assert 0.88 * 150 <= ratios < 150


def test_pairing_finds_what_two_intervals_hide() -> None:
    hard = np.random.default_rng(3).random(60)
    difference = paired_difference((hard + 0.02).tolist(), hard.tolist())
    assert difference.significant
    assert difference.low == pytest.approx(0.02)
    assert not paired_difference([0.0, 1.0] * 20, [1.0, 0.0] * 20).significant


def test_ratios_by_hand() -> None:
    """A share is a ratio of means, `times` of medians; the questions of both are resampled together."""
    unit = [1.0, 2.0, 30.0, 4.0]
    for ratio, values, of, wanted in (
        (share, [0.25 * u for u in unit], unit, (0.25, 0.25, 0.25)),
        (share, [1.0, 1.0], [1.0, 3.0], (0.5, 1 / 3, 1.0)),
        (times, [4.0, 8.0, 800.0], [2.0, 4.0, 6.0], (2.0, 2.0, 800 / 6)),
    ):
        found = ratio(values, of)
        assert found
        assert (found.mean, found.low, found.high) == pytest.approx(wanted)
    assert share([1.0], [0.0]) is None


def test_prompts_of_one_question_are_drawn_together() -> None:
    """Three equal prompts a question tell no more than one."""
    rng = np.random.default_rng(4)
    values, unit = rng.random(20).tolist(), (1 + rng.random(20)).tolist()
    questions = [str(n) for n in range(20) for _ in range(3)]
    three, three_unit = np.repeat(values, 3).tolist(), np.repeat(unit, 3).tolist()
    once, often, apart = bootstrap(values), bootstrap(three, questions=questions), bootstrap(three)
    assert (often.mean, often.low, often.high, often.n) == pytest.approx((once.mean, once.low, once.high, 20))
    assert apart.high - apart.low < 0.7 * (often.high - often.low)
    for ratio in (share, times):
        one, many = ratio(values, unit), ratio(three, three_unit, questions=questions)
        assert one
        assert many
        assert (many.low, many.high) == pytest.approx((one.low, one.high))


def test_a_question_with_fewer_prompts_weighs_less() -> None:
    """Two questions, of three prompts and of one: both may be drawn twice, and together they make a quarter."""
    found = bootstrap([0.0, 1.0, 0.0, 0.0], questions=["a", "b", "a", "a"])
    assert (found.mean, found.low, found.high, found.n) == (0.25, 0.0, 1.0, 2)
    groups = by_group([0.0, 1.0, 0.0, 3.0], ["x", "y", "x", "x"], questions=["a", "b", "a", "c"])
    assert {name: (i.mean, i.low, i.high, i.n) for name, i in groups.items()} == {
        "x": (1.0, 0.0, 3.0, 2),
        "y": (1.0, 1.0, 1.0, 1),
    }
    median = times([4.0, 2.0, 4.0, 4.0], [2.0, 2.0, 2.0, 2.0], questions=["a", "b", "a", "a"])
    assert median
    assert (median.mean, median.low, median.high) == (2.0, 1.0, 2.0)


def test_a_tail_by_hand() -> None:
    ids = ["a", "b", "c", "c~1"]
    kls, others = [0.02, FLOOR / 5, 0.3, 0.05], [0.01, FLOOR / 100, 0.1, 0.1]
    found = tail("reuse", ids, ["a", "b", "c", "c"], kls, others)  # ratios: 2, both at the floor, 3, 0.5
    assert (found["against"], found["worse"]["mean"], found["worse"]["n"]) == ("reuse", 0.5, 3)
    assert found["p95"] == pytest.approx(2 + 0.85)  # at 0.95 * 3 of 0.5, 1, 2, 3
    assert found["worst"] == pytest.approx(3.0)
    assert [prompt["id"] for prompt in found["prompts"]] == ["c", "a", "b", "c~1"]
    assert found["prompts"][0] == pytest.approx({"id": "c", "ratio": 3.0, "mean_kl": 0.3, "other": 0.1})
    assert (found["prompts"][2]["ratio"], found["prompts"][2]["mean_kl"]) == (1.0, FLOOR / 5)
    above = tail("x", ["a"], ["a"], [3 * FLOOR], [1e-9])
    assert above["worst"] == pytest.approx(3.0)  # above the floor everything counts


def test_methods_are_set_against_full_reuse_and_themselves_without_correction() -> None:
    wanted: dict[str, list[str]] = {
        **{name: [] for name in ("full", "reuse", "prefix", "exact")},
        **{
            name: ["reuse"]
            for name in ("exact/int8", "reuse/int8", "query@0.1", "none+shift", "query@0.1/bos/int8")
        },
        "query+shift@0.1": ["reuse", "query@0.1"],
        "query+shift@0.2": ["reuse"],  # without the same method at the same ratio
        "query+shift@0.1/bos/int8": ["reuse", "query@0.1/bos/int8"],
    }
    found = variants(wanted, (0.1,), coded=True)
    assert {v.name: opponents(v, list(wanted)) for v in found} == wanted
    exact = variants(("prefix", "transformers", "query@0.1"), ())
    kls = {v.name: [9.0] * 21 for v in exact}
    kls["prefix"] = kls["transformers"] = [0.001 * n for n in range(21)]
    assert rounding(exact, kls) == pytest.approx(0.019, abs=5e-4)  # by what exact methods differ
    assert rounding(variants((), ()), kls) is None


def test_scores_are_those_worked_by_hand() -> None:
    for text, expected in SCORES["normalised"]:
        assert normalise(text) == expected
    for answer, golds, *scores in SCORES["questions"]:
        assert [s(answer, golds) for s in (exact_match, f1, rouge_l)] == pytest.approx(scores), answer
    for answer, gold, score in SCORES["rouge"]:
        assert longbench_rouge.rouge_l(answer, gold) == pytest.approx(score, abs=1e-12), answer
    for task, answer, gold, score in SCORES["tasks"]:
        for golds in ([gold], ["13", gold]):  # the best gold counts
            assert TASKS[task].score(answer, golds) == pytest.approx(score, abs=1e-7), (task, answer)
