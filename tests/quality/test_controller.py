"""Choice of a ratio, the record of a calibration, and changes by checks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.config import Config, QualityConfig
from blendserve.errors import ConfigError
from blendserve.quality.calibration import KIND, Calibration, owner_of
from blendserve.quality.controller import LEVELS, MIN_CHECKS, RatioController
from blendserve.quality.target import RATIOS, Loss, Target
from blendserve.store import MemoryStore

TARGET = Target(0.1, None)
PROMPTS = 128


def losses(*agreements: float) -> dict[float, tuple[Loss, ...]]:
    """The same loss for every prompt, at each ratio."""
    return {r: (Loss(a, 1 - a),) * PROMPTS for r, a in zip(RATIOS, agreements, strict=True)}


def calibration(*agreements: float) -> Calibration:
    return Calibration(losses(*agreements), 100, "made")


def controller(*agreements: float) -> RatioController:
    return RatioController(TARGET, calibration(*agreements))


def check(made: RatioController, n: int, agreements: Mapping[float, float]) -> None:
    for _ in range(n):
        made.add(made.ratio, {r: Loss(agreements[r], 0.1) for r in made.checked_ratios})


@pytest.mark.parametrize(
    ("agreements", "ratio"),
    [
        ((0.8, 0.85, 0.96, 0.97, 0.99), 0.05),
        ((0.99, 0.85, 0.96, 0.97, 0.99), 0.05),  # smaller ones are not looked at behind one that fails
        ((0.96, 0.96, 0.96, 0.97, 0.99), 0.0),
        ((0.8, 0.85, 0.86, 0.87, 0.88), None),
        ((0.99, 0.99, 0.99, 0.99, 0.89), None),
    ],
)
def test_the_least_ratio_above_which_all_keep_the_target_is_chosen(
    agreements: tuple[float, ...], ratio: float | None
) -> None:
    assert TARGET.ratio(losses(*agreements)) == ratio
    assert controller(*agreements).ratio == ratio


def test_a_limit_of_kl_counts_answers_above_it() -> None:
    target, of = Target(0.1, 0.1), [Loss(0.5, 0.05)] * 100
    assert target.losses([Loss(1.0, 0.2), Loss(0.0, 0.1)]) == [1.0, 0.0]
    assert target.p_value(of) < 0.1
    assert target.p_value([*of, *[Loss(1.0, 0.2)] * 20]) < target.p_value([Loss(1.0, 0.2)] * 20 + of)


def test_without_a_calibration_answers_are_exact_and_nothing_changes_that() -> None:
    made = RatioController(TARGET, None)
    assert made.ratio is None
    assert made.checked_ratios == ()
    for _ in range(300):
        made.add(None, {})
    assert made.ratio is None
    assert made.report().interval is None


def test_an_alarm_raises_the_ratio_and_proof_lowers_it() -> None:
    made = controller(0.8, 0.85, 0.96, 0.97, 0.99)
    assert made.checked_ratios == (0.02, 0.05, 0.15)
    check(made, MIN_CHECKS - 1, dict.fromkeys(RATIOS, 0.5))
    assert made.ratio == 0.05
    check(made, 1, dict.fromkeys(RATIOS, 0.5))
    assert (made.ratio, made.alarms, made.changes) == (0.15, 1, 1)
    made.add(0.05, {0.05: Loss(0.0, 1.0)})  # served before the change
    check(made, 2 * MIN_CHECKS, dict.fromkeys(RATIOS, 0.5))
    assert made.ratio is None
    assert made.checked_ratios == (0.3,)
    check(made, 50, dict.fromkeys(RATIOS, 0.85))
    assert made.ratio is None
    check(made, 1_000, dict.fromkeys(RATIOS, 0.99))
    assert made.ratio == 0.0
    assert made.changes == 3 + len(RATIOS)


def test_each_step_down_needs_twice_the_proof() -> None:
    steps = list[int]()
    made, n = controller(*[0.5] * len(RATIOS)), 0
    while made.ratio != 0.0:
        before, n = made.ratio, n + 1
        check(made, 1, dict.fromkeys(RATIOS, 0.95))
        if made.ratio != before:
            steps, n = [*steps, n], 0
    assert len(steps) == len(RATIOS)
    assert steps == sorted(steps)
    assert steps[0] < steps[-1]


def test_the_report_has_the_estimate_and_its_interval_in_terms_of_the_target() -> None:
    made = controller(0.8, 0.85, 0.96, 0.97, 0.99)
    assert made.report().estimate is None
    check(made, 100, dict.fromkeys(RATIOS, 0.95) | {0.02: 0.5})
    report = made.report()
    assert report.estimate == pytest.approx(0.95)
    assert report.interval
    assert report.interval[0] < 0.95 < report.interval[1]
    assert report.ratio == 0.05


def test_a_calibration_is_read_as_it_was_stored_and_replaces_the_one_before() -> None:
    store = MemoryStore(2**20)
    owner = owner_of("docs", "model", "query", 0.5)
    assert Calibration.load(store, owner) is None
    for made in (calibration(*[0.5] * 5), calibration(*[0.75] * 5)):
        made.save(store, owner)
        assert Calibration.load(store, owner) == made
    assert len(store.blobs.list()) == 1
    for other in (
        ("books", "model", "query", 0.5),
        ("docs", "m2", "query", 0.5),
        ("docs", "model", "none", 0.5),
    ):
        assert Calibration.load(store, owner_of(*other)) is None


def test_a_prompt_is_added_at_every_ratio() -> None:
    made = Calibration.empty(10, "made")
    assert made.prompts == 0
    for _ in range(2):
        made = made.with_prompt({r: Loss(1 - r, r) for r in RATIOS}, {"full": 2.0, "0.05": 0.5})
    assert made.prompts == 2
    assert made.seconds == {"full": 4.0, "0.05": 1.0}
    assert made.losses[0.15] == (Loss(0.85, 0.15),) * 2
    assert made.fits(15)
    assert not made.fits(16)


@given(st.data())
def test_a_damaged_record_is_no_calibration(data: st.DataObject) -> None:
    whole = calibration(*[0.5] * 5).to_bytes()
    values = json.loads(whole)
    damage = data.draw(st.sampled_from(["cut", "ratio", "loss", "kl", "short", "passages", "none"]))
    if damage == "ratio":
        del values["losses"][data.draw(st.sampled_from(sorted(values["losses"])))]
    elif damage in ("loss", "kl"):
        at = data.draw(st.integers(0, PROMPTS - 1))
        values["losses"]["0.05"][at] = [1.5, 0.1] if damage == "loss" else [0.5, float("nan")]
    elif damage == "short":
        values["losses"]["0.15"].pop()
    elif damage == "passages":
        values["passages"] = "many"
    raw = json.dumps([] if damage == "none" else values).encode()
    raw = whole[: data.draw(st.integers(0, len(whole) - 1))] if damage == "cut" else raw
    with pytest.raises(ValueError):  # noqa: PT011  any reason will do
        Calibration.from_bytes(raw)
    store = MemoryStore(2**22)
    store.blobs.put(KIND, "owner", raw)
    assert Calibration.load(store, "owner") is None


@pytest.mark.parametrize(
    ("values", "setting"),
    [
        ({"quality": {"min_agreement": 0.9, "max_kl": 0.1}}, "quality"),
        ({"quality": {"min_agreement": 0.9}, "blend": {"ratio": 0.2}}, "blend.ratio"),
        ({"quality": {"max_kl": 0.1}, "blend": {"ratio": "auto"}}, "blend.ratio"),
        ({"quality": {"min_agreement": 0.9}, "blend": {"method": "reuse"}}, "blend.method"),
        ({"quality": {"min_agreement": 0.99}}, "quality.min_agreement"),
        ({"quality": {"max_kl": 0.001}}, "quality.max_kl"),
    ],
)
def test_settings_that_leave_a_target_nothing_to_choose_are_refused(
    values: dict[str, Any], setting: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Config(**values)
    assert error.value.setting == setting
    assert LEVELS[-1] is None


def test_a_target_is_a_limit_of_one_of_two_losses() -> None:
    assert Target.of(QualityConfig()) is None
    agreement = Target.of(QualityConfig(min_agreement=0.75))
    kl = Target.of(QualityConfig(max_kl=0.2, violation_rate=0.05))
    assert agreement
    assert kl
    assert (agreement.limit, kl.limit) == (0.25, 0.05)
    answers = [Loss(0.5, 0.3), Loss(1.0, 0.1)]
    assert agreement.losses(answers) == [0.5, 0.0]
    assert kl.losses(answers) == [1.0, 0.0]
