"""Choice of a ratio, the record of evidence, and changes by checks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend.policies import START_RATIO
from blendserve.config import Config
from blendserve.errors import ConfigError
from blendserve.quality.controller import MIN_CHECKS, RatioController
from blendserve.quality.evidence import (
    KEPT,
    KIND,
    SHIPPED,
    Evidence,
    MeasuredPrompt,
    owner_of,
    read_shipped,
    write_shipped,
)
from blendserve.quality.target import RATIOS, WORSE, Loss, Target
from blendserve.store import MemoryStore

TARGET = Target(0.1)
PROMPTS = 300
PASSAGES = 100
SAME = (0.0,) * len(RATIOS)


def sample(agreements: Sequence[float], worse: Sequence[float] = SAME, n: int = 0) -> MeasuredPrompt:
    """Of the n-th prompt, if a share of `worse` of all are worse."""
    each = zip(agreements, worse, strict=True)
    losses = (Loss(a, 1 - a, int((n + 1) * w) > int(n * w)) for a, w in each)
    return MeasuredPrompt(tuple(losses), PASSAGES)


def evidence(agreements: Sequence[float], worse: Sequence[float] = SAME, prompts: int = PROMPTS) -> Evidence:
    return Evidence(tuple(sample(agreements, worse, n) for n in range(prompts)))


def controller(*agreements: float, prompts: int = PROMPTS, passages: int = PASSAGES) -> RatioController:
    return RatioController(TARGET, evidence(agreements, prompts=prompts), passages)


def check(made: RatioController, n: int, agreements: Sequence[float], worse: Sequence[float] = SAME) -> None:
    for i in range(n):
        made.add(made.ratio, sample(agreements, worse, i))


@pytest.mark.parametrize(
    ("agreements", "ratio"),
    [
        ((0.8, 0.96, 0.96, 0.97, 0.99), 0.05),
        ((0.99, 0.85, 0.96, 0.97, 0.99), 0.15),  # smaller ones are not looked at behind one that fails
        ((0.96, 0.96, 0.96, 0.97, 0.99), 0.0),
        ((0.5, 0.6, 0.7, 0.8, 0.96), 0.5),
        ((0.8, 0.85, 0.86, 0.87, 0.88), None),
    ],
)
def test_the_least_ratio_above_which_all_keep_the_target_is_chosen(
    agreements: tuple[float, ...], ratio: float | None
) -> None:
    assert controller(*agreements).ratio == ratio


@pytest.mark.parametrize(
    ("worse", "ratio"), [((0.3, 0.1, 0.0, 0.0, 0.0), 0.15), ((0.3, 0.1, 0.1, 0.1, 0.1), None), (SAME, 0.0)]
)
def test_prompts_that_are_worse_than_full_reuse_count_whatever_the_mean_is(
    worse: tuple[float, ...], ratio: float | None
) -> None:
    assert RatioController(TARGET, evidence([0.99] * 5, worse), PASSAGES).ratio == ratio


def test_without_proof_the_ratio_is_the_start_or_the_next_that_is_not_missed() -> None:
    assert controller(*[0.99] * 5, prompts=0).ratio == START_RATIO
    assert controller(*[0.99] * 5, prompts=100).ratio == START_RATIO  # too few for the second bound
    assert controller(*[0.99] * 5, prompts=128).ratio == 0.0
    assert controller(0.5, 0.5, 0.8, 0.88, 0.93, prompts=100).ratio == 0.5
    assert controller(*[0.5] * 5, prompts=100).ratio is None
    assert controller(*[0.5] * 5, prompts=5).ratio == START_RATIO  # too few to tell
    worse = (0.1, 0.1, 0.1, 0.02, 0.0)
    assert RatioController(TARGET, evidence([0.95] * 5, worse, 60), PASSAGES).ratio == 0.3


def test_old_prompts_weigh_what_their_index_is_of_the_one_now() -> None:
    good = [0.99] * 5
    assert controller(*good, prompts=140).ratio == 0.0
    assert controller(*good, prompts=140, passages=2 * PASSAGES).ratio == START_RATIO
    assert controller(*good, prompts=300, passages=2 * PASSAGES).ratio == 0.0
    assert controller(*good, prompts=140, passages=PASSAGES // 2).ratio == 0.0
    assert controller(*good, passages=3 * PASSAGES).report().prompts == PROMPTS / 3


def test_an_alarm_raises_the_ratio_and_proof_lowers_it() -> None:
    made = controller(0.8, 0.96, 0.97, 0.98, 0.99)
    assert made.ratio == 0.05
    check(made, MIN_CHECKS - 1, [0.5] * 5)
    assert made.ratio == 0.05
    check(made, 1, [0.5] * 5)
    assert (made.alarms, made.changes) == (1, 1)
    assert made.ratio is None  # the checks since then say that no ratio keeps it
    check(made, 400, [0.99] * 5)
    assert made.ratio == 0.0


def test_after_an_alarm_no_smaller_ratio_serves_without_proof() -> None:
    made = controller(*[0.99] * 5)
    n = 0
    while not made.alarms:
        check(made, 1, [0.5, 0.99, 0.99, 0.99, 0.99])
        n += 1
    assert n <= 100
    assert made.ratio == START_RATIO
    made = controller(0.5, 0.5, 0.5, 0.96, 0.99)
    while not made.alarms:
        check(made, 1, [0.99, 0.99, 0.99, 0.5, 0.99])
    assert made.ratio == 0.5
    made.add(0.3, sample([0.0] * 5))  # served before the change
    assert made.alarms == 1


def test_prompts_that_turn_worse_set_off_the_alarm_too() -> None:
    made = controller(*[0.99] * 5)
    for n in range(100):
        check(made, 1, [0.99] * 5, [0.3 if n % 3 == 0 else 0.0, 0, 0, 0, 0])
        made.add(made.ratio, sample([0.99] * 5, [1.0, 0, 0, 0, 0])) if n % 3 == 0 else None
        if made.alarms:
            break
    assert made.alarms
    assert made.ratio != 0.0


def test_the_report_says_what_is_kept() -> None:
    fresh = RatioController(TARGET).report()
    assert (fresh.agreement, fresh.ratio, fresh.prompts) == (None, START_RATIO, 0)
    report = controller(0.8, 0.85, 0.94, 0.97, 0.99).report()
    assert report.agreement == pytest.approx(0.94)
    assert report.interval
    assert report.interval[0] < 0.94 < report.interval[1]
    assert (report.ratio, report.worse, report.prompts) == (0.15, 0.0, PROMPTS)
    assert "0.94" in report.summary
    assert "0.15" in report.summary
    few = controller(0.8, 0.85, 0.94, 0.97, 0.99, prompts=20).report()
    exact = controller(*[0.5] * 5).report()
    assert len({each.status for each in (fresh, report, few, exact)}) == 4
    assert exact.to_dict()["summary"] == exact.summary


def test_evidence_is_read_as_it_was_stored_and_replaces_what_was_before() -> None:
    store = MemoryStore(2**20)
    owner = owner_of("docs", "model", "query", 0.5)
    assert Evidence.load(store, owner) is None
    for made in (evidence([0.5] * 5), evidence([0.75] * 5)):
        made.save(store, owner)
        assert Evidence.load(store, owner) == made
    assert len(store.blobs.list()) == 1
    for other in (
        ("books", "model", "query", 0.5),
        ("docs", "m2", "query", 0.5),
        ("docs", "model", "none", 0.5),
    ):
        assert Evidence.load(store, owner_of(*other)) is None


def test_shipped_evidence_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "shipped.json"
    assert read_shipped(file) == {}
    made = {"a": evidence([0.5] * 5, prompts=3), "b": evidence([0.75] * 5, [0.5] * 5, prompts=2)}
    write_shipped(file, made)
    assert read_shipped(file) == made
    write_shipped(file, {"a": Evidence((sample([1 / 3] * 5),))})
    ((read, *_),) = (found.samples for found in read_shipped(file).values())
    assert read.at(0.15).agreement == pytest.approx(1 / 3, abs=1e-4)
    assert read_shipped(SHIPPED)


def test_the_newest_prompts_are_kept() -> None:
    made, last = evidence([0.5] * 5, prompts=KEPT), sample([0.75] * 5)
    made = made.plus(last)
    assert len(made.samples) == KEPT
    assert made.samples[-1] == last
    assert made.latest(3).samples == made.samples[-3:]


@given(st.data())
def test_a_damaged_record_is_no_evidence(data: st.DataObject) -> None:
    whole = evidence([0.5] * 5).to_bytes()
    values = json.loads(whole)
    damage = data.draw(st.sampled_from(["cut", "agreement", "kl", "short", "passages", "none"]))
    losses, passages, question = values[data.draw(st.integers(0, PROMPTS - 1))]
    if damage in ("agreement", "kl"):
        losses[2] = [1.5, 0.1, False] if damage == "agreement" else [0.5, float("nan"), False]
    elif damage == "short":
        losses.pop()
    elif damage == "passages":
        values[0] = [losses, "many", question]
    assert passages == PASSAGES
    raw = json.dumps({} if damage == "none" else values).encode()
    raw = whole[: data.draw(st.integers(0, len(whole) - 1))] if damage == "cut" else raw
    with pytest.raises(ValueError):  # noqa: PT011  any reason will do
        Evidence.from_bytes(raw)
    store = MemoryStore(2**22)
    store.blobs.put(KIND, "owner", raw)
    assert Evidence.load(store, "owner") is None


def test_a_target_outside_its_range_is_refused() -> None:
    for value in (0.4, 0.99):
        with pytest.raises(ConfigError) as error:
            Config(quality={"min_agreement": value})
        assert error.value.setting == "quality.min_agreement"
    assert 0 < WORSE < 1
