"""Statistics of losses: against naive twins, and by simulation at the limit that they must not pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.quality.risk import (
    FALSE_ALARM,
    GRID,
    MAX_STAKE,
    RARER,
    SHARES,
    Detector,
    capital,
    interval,
    p_value,
    p_value_of_share,
)

LIMIT, ERROR, TRIALS = 0.1, 0.1, 1_000
Draw = Callable[[np.random.Generator, int], np.ndarray]
LOSSES = st.lists(st.floats(0, 1), min_size=1, max_size=30)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def failures(rng: np.random.Generator, n: int) -> np.ndarray:
    return (rng.random(n) < LIMIT).astype(float)


def agreement_losses(rng: np.random.Generator, n: int) -> np.ndarray:
    """Skewed: most answers lose nothing, some much; their mean is the limit."""
    return rng.beta(0.3, 2.7, n)


def naive_capital(losses: Sequence[float], limit: float) -> list[float]:
    money, made = [1.0] * len(SHARES), list[float]()
    for i, loss in enumerate(losses):
        before = list(losses[:i])
        means = [(0.5 + sum(before[: k + 1])) / (k + 2) for k in range(i)]
        mean = means[-1] if means else 0.5
        variance = (0.25 + sum((x - m) ** 2 for x, m in zip(before, means, strict=True))) / (i + 1)
        stake = (limit - mean) / (variance + (limit - mean) ** 2)
        stakes = [min(max(share * stake, 0.0), MAX_STAKE / (1 - limit)) for share in SHARES]
        money = [m * (1 + s * (limit - loss)) for m, s in zip(money, stakes, strict=True)]
        made.append(sum(money) / len(money))
    return made


@given(LOSSES, st.floats(0.02, 0.5))
def test_the_capital_is_that_of_a_bettor_who_sees_one_loss_after_another(
    losses: list[float], limit: float
) -> None:
    assert capital(losses, limit)[:, 0] == pytest.approx(naive_capital(losses, limit))
    assert p_value(losses, limit) == pytest.approx(1 / max(1.0, *naive_capital(losses, limit)))


@pytest.mark.parametrize("draw", [failures, agreement_losses])
@pytest.mark.parametrize("n", [64, 256])
def test_a_calibration_at_the_limit_is_accepted_no_more_often_than_promised(
    draw: Draw, n: int, rng: np.random.Generator
) -> None:
    accepted = sum(p_value(draw(rng, n), LIMIT) <= ERROR for _ in range(TRIALS))
    assert accepted <= TRIALS * ERROR + 3 * (TRIALS * ERROR * (1 - ERROR)) ** 0.5


def test_a_good_ratio_is_accepted_with_the_usual_number_of_prompts(rng: np.random.Generator) -> None:
    assert sum(p_value(rng.beta(1.1, 18.5, 128), LIMIT) <= ERROR for _ in range(100)) >= 95
    assert sum(p_value(rng.random(128) < 0.02, LIMIT) <= ERROR for _ in range(100)) >= 80


def test_an_interval_holds_the_mean_at_every_time(rng: np.random.Generator) -> None:
    n, error, missed = 400, 0.05, 0
    for _ in range(TRIALS):
        x = failures(rng, 1_000)
        refuted = np.maximum(capital(x, LIMIT)[:, 0], capital(1 - x, 1 - LIMIT)[:, 0])
        missed += bool((refuted >= 2 / error).any())
    assert missed <= TRIALS * error + 3 * (TRIALS * error) ** 0.5
    x = failures(rng, n)
    for end in (50, 400):  # the same, read off a grid
        low, high = interval(x[:end], error)
        inside = [
            m for m in GRID if max(capital(x[:end], m).max(), capital(1 - x[:end], 1 - m).max()) < 2 / error
        ]
        assert low == (inside[0] if inside[0] > GRID[0] else 0.0)
        assert high == inside[-1]
    assert interval([0.0] * 20, error)[0] == 0.0
    assert interval([1.0] * 20, error)[1] == 1.0
    assert interval(x, error)[1] - interval(x, error)[0] < 0.15
    assert interval([], error) == (0.0, 1.0)


def naive_likelihood_ratio(cases: Sequence[bool], limit: float) -> float:
    """The largest capital of bettors on a share of 0, a quarter and half of the limit."""
    most, money = 1.0, dict(RARER)
    for case in cases:
        for factor in money:
            p = factor * limit
            money[factor] *= p / limit if case else (1 - p) / (1 - limit)
        most = max(most, sum(money.values()))
    return most


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.floats(0.02, 0.3))
def test_a_rare_event_is_bet_on_by_its_likelihood(cases: list[bool], limit: float) -> None:
    assert p_value_of_share(cases, limit) == pytest.approx(1 / naive_likelihood_ratio(cases, limit))


def test_a_share_at_its_limit_is_accepted_no_more_often_than_promised(rng: np.random.Generator) -> None:
    accepted = sum(p_value_of_share(rng.random(1_000) < 0.02, 0.02) <= ERROR for _ in range(TRIALS))
    assert accepted <= TRIALS * ERROR + 3 * (TRIALS * ERROR) ** 0.5
    assert p_value_of_share([0.0] * 128, 0.02) <= ERROR < p_value_of_share([0.0] * 127, 0.02)
    assert p_value_of_share([0.0] * 329 + [1.0], 0.02) <= ERROR  # looked at before the last
    assert p_value_of_share([1.0] + [0.0] * 329, 0.02) <= ERROR
    assert p_value_of_share([], 0.02) == 1.0


@given(LOSSES, st.floats(0.02, 0.5))
def test_weights_are_shares_of_a_stake(losses: list[float], limit: float) -> None:
    none, half = np.zeros(len(losses)), np.full(len(losses), 0.5)
    assert capital(losses, limit, none)[-1, 0] == pytest.approx(1.0)
    ones = capital(losses, limit, np.ones(len(losses)))
    assert ones == pytest.approx(capital(losses, limit))
    first = capital(losses[:1], limit, half[:1])[0, 0] - 1
    assert first == pytest.approx((capital(losses[:1], limit)[0, 0] - 1) / 2)
    cases = [loss > 0.5 for loss in losses]
    assert p_value_of_share(cases, limit, none) == 1.0
    assert interval(losses, ERROR, none) == (0.0, 1.0)


def test_half_a_weight_needs_about_twice_the_prompts() -> None:
    n = next(n for n in range(1, 500) if p_value([0.05] * n, LIMIT) <= ERROR)
    m = next(m for m in range(1, 500) if p_value([0.05] * m, LIMIT, [0.5] * m) <= ERROR)
    assert 1.4 * n < m < 2.2 * n


def checks_to_alarm(rng: np.random.Generator, share: float, limit: float, most: int) -> int:
    detector = Detector(limit)
    return next((n + 1 for n in range(most) if detector.add(float(rng.random() < share))), most)


@pytest.mark.parametrize("streams", [100, pytest.param(2_000, marks=pytest.mark.nightly)])
def test_false_alarms_are_rare_and_a_doubled_loss_is_seen(streams: int, rng: np.random.Generator) -> None:
    runs = [checks_to_alarm(rng, 0.05, 0.05, 2_000) for _ in range(streams)]
    assert np.mean(runs) >= 1 / FALSE_ALARM  # cut at 2,000, so the true mean is larger
    assert np.median([checks_to_alarm(rng, 0.1, 0.05, 500) for _ in range(streams)]) <= 100
    assert np.median([checks_to_alarm(rng, 0.2, 0.05, 500) for _ in range(streams)]) <= 40


def test_a_detector_takes_losses_between_0_and_1() -> None:
    detector = Detector(LIMIT)
    assert not any(detector.add(0.02) for _ in range(2_000))
    assert any(detector.add(0.3) for _ in range(60))
