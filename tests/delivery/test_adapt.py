"""The rules by brute force, and the meter by adding up."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from blendserve.store.kdn.adapt import (
    SAME,
    TEXT,
    WORTH,
    Meter,
    Offer,
    Situation,
    cachegen,
    comes_in_step,
    fixed,
    outlasts,
    overtakes,
    quickest,
)

RATES = st.floats(1e3, 1e10)
SECONDS = st.floats(0, 10)
LEVELS = st.lists(st.tuples(st.integers(1, 10**9), SECONDS), min_size=1, max_size=4).map(
    lambda found: [Offer(f"level{n}", n_bytes, s) for n, (n_bytes, s) in enumerate(found)]
)
OFFERS = st.tuples(SECONDS, LEVELS).map(lambda both: [Offer(TEXT, 0, both[0]), *both[1]])


def took(offers: list[Offer], word: str, rate: float) -> float:
    return next(o.n_bytes / rate + o.seconds for o in offers if o.word == word)


@given(OFFERS, RATES)
def test_the_quickest_is_as_quick_as_any(offers: list[Offer], rate: float) -> None:
    chosen = quickest(offers, Situation(rate))
    assert took(offers, chosen, rate) <= SAME * min(took(offers, o.word, rate) for o in offers)


@given(OFFERS, RATES, SECONDS)
def test_no_finer_one_would_have_done(offers: list[Offer], rate: float, wanted: float) -> None:
    words = [o.word for o in offers]
    chosen = quickest(offers, Situation(rate, wanted=wanted))
    best = min(took(offers, word, rate) for word in words)
    for finer in words[: words.index(chosen)]:
        assert took(offers, finer, rate) > max(wanted, SAME * best)


@given(OFFERS, RATES, SECONDS, st.floats(0.01, 1), SECONDS)
def test_what_is_spent_is_not_spent_twice(
    offers: list[Offer], rate: float, wanted: float, share: float, spent: float
) -> None:
    """A share of what is left is all that counts."""
    whole = Situation(rate, wanted=max(0.0, (wanted - spent) * share))
    assert quickest(offers, Situation(rate, None, wanted, share, spent)) == quickest(offers, whole)


@given(OFFERS, RATES, st.data())
def test_what_is_under_way_is_given_up_only_for_much(
    offers: list[Offer], rate: float, data: st.DataObject
) -> None:
    under_way = data.draw(st.sampled_from([o.word for o in offers[1:]]))
    chosen = quickest(offers, Situation(rate), under_way)
    if chosen != under_way:
        assert took(offers, chosen, rate) <= SAME * WORTH * took(offers, under_way, rate)


def test_a_dying_link_leads_to_text_and_a_quick_one_to_what_needs_no_decoding() -> None:
    offers = [Offer(TEXT, 0, 0.5), Offer("raw", 12_000_000, 0.0), Offer("small", 800_000, 0.05)]
    assert quickest(offers, Situation(1e4)) == TEXT
    assert quickest(offers, Situation(1e7)) == "small"
    assert quickest(offers, Situation(1e9)) == "raw"
    assert quickest(offers, Situation(None)) == "small"
    assert quickest(offers, Situation(1e7, wanted=1.0)) == TEXT  # exact, and in time


def test_nothing_known_goes_on_with_what_is_under_way() -> None:
    assert quickest([Offer("a", 10, 0.0), Offer("b", 5, 0.0)], Situation(None), "a") == "a"


def test_cachegens_rule_looks_at_the_last_chunk_alone() -> None:
    offers = [Offer(TEXT, 0, 0.5), *(Offer(str(n), 10 ** (8 - n), 0.0) for n in range(3))]
    assert cachegen(offers, Situation(1e9)) == "1"  # the first one: the level in the middle
    slow, quick = Situation(1e9, 1e6, wanted=0.4), Situation(1e3, 1e9, wanted=0.4)
    assert cachegen(offers, quick) == "0"
    assert cachegen(offers, slow) == "2" or cachegen(offers, slow) == TEXT
    assert cachegen(offers, Situation(1e9, 1e3, wanted=0.6)) == TEXT
    assert cachegen(offers, slow, going_on="0") == "0"


@given(st.integers(0, 10**9), st.integers(0, 10**9), RATES, SECONDS)
def test_what_is_computed_meanwhile_makes_nothing_later(
    others: int, last: int, rate: float, c: float
) -> None:
    """The last chunk by one end, the others by the other, and no sooner than either."""
    if outlasts(others + last, rate, c):
        assert max(c, others / rate) <= (others + last) / rate
        assert not overtakes(others + last, rate, 0.0, c)  # or it would be given up at once


@given(st.integers(0, 10**9), RATES, SECONDS, SECONDS)
def test_what_overtakes_is_here_sooner(n_bytes: int, rate: float, decoding: float, c: float) -> None:
    if overtakes(n_bytes, rate, decoding, c):
        assert n_bytes / rate + decoding < c
    assert not overtakes(n_bytes, None, decoding, c)
    assert not outlasts(n_bytes, None, c)


@pytest.mark.parametrize(("gbit", "expected"), [(3.0, True), (0.1, True), (0.03, False)])
def test_chunks_come_in_step_unless_the_link_is_slow(gbit: float, expected: bool) -> None:
    """6 MB of chunks that take .35 s each to compute: 16 ms, .48 s and 1.6 s on the way."""
    assert comes_in_step(6e6, gbit * 1.25e8, 0.35) is expected
    assert not comes_in_step(6e6, None, 0.35)


@given(st.integers(0, 10**9), RATES, SECONDS, st.integers(0, 10**9))
def test_more_bytes_are_no_step_back_from_a_slow_link(n_bytes: int, rate: float, c: float, more: int) -> None:
    """Once there is too much for coming in step, there is with more."""
    if not comes_in_step(n_bytes, rate, c):
        assert not comes_in_step(n_bytes + more, rate, c)


def test_a_fixed_level_that_is_not_offered_is_computed() -> None:
    offers = [Offer(TEXT, 0, 0.5), Offer("raw", 1, 0.0)]
    assert fixed("raw")(offers, Situation(1.0)) == "raw"
    assert fixed("int8")(offers, Situation(1.0)) == TEXT


@given(
    st.lists(
        st.tuples(st.integers(1, 10**6), st.floats(0.001, 1.0), st.floats(0, 100)), min_size=1, max_size=30
    )
)
def test_the_meter_gives_bytes_over_seconds_of_transfer(pieces: list[tuple[int, float, float]]) -> None:
    """Each transfer brings a piece at its end; pauses between them do not count."""
    meter, now = Meter(window_s=1e9), 5.0
    for n_bytes, seconds, pause in pieces:
        meter.begin(now)
        now += seconds
        meter.arrived(n_bytes, now)
        meter.end(now)
        now += pause
    expected = sum(n for n, _, _ in pieces) / sum(s for _, s, _ in pieces)
    assert meter.bytes_per_s(now) == pytest.approx(expected, rel=1e-6)


@given(RATES, RATES)
def test_the_meter_follows_a_step_within_its_window(before: float, after: float) -> None:
    assume(abs(before - after) > 1)
    meter, now = Meter(window_s=1.0), 0.0
    meter.begin(now)
    for rate in (before, after):
        for _ in range(40):
            now += 0.05
            meter.arrived(int(rate * 0.05) + 1, now)
    assert meter.bytes_per_s(now) == pytest.approx(after, rel=0.1, abs=50)


def test_two_transfers_at_once_share_the_time_and_silence_counts() -> None:
    meter = Meter(window_s=10)
    assert meter.bytes_per_s(0.0) is None
    meter.begin(0.0)
    meter.begin(0.0)
    meter.arrived(100, 1.0)
    meter.arrived(100, 1.0)
    assert meter.bytes_per_s(1.0) == pytest.approx(200)
    assert meter.bytes_per_s(4.0) == pytest.approx(50)


@given(RATES, RATES)
def test_what_is_forgotten_is_as_if_it_had_not_been(before: float, after: float) -> None:
    meter, new = Meter(window_s=10), Meter(window_s=10)
    meter.begin(0.0)
    meter.arrived(int(before), 1.0)
    meter.forget(5.0)
    assert meter.bytes_per_s(6.0) is None
    new.begin(5.0)
    for each in (meter, new):
        each.arrived(int(after), 7.0)
    assert meter.bytes_per_s(8.0) == pytest.approx(new.bytes_per_s(8.0))


@pytest.mark.parametrize("wait", [0.0, 0.25, 2.0])
def test_the_round_trip_is_no_time_of_transfer(wait: float) -> None:
    meter = Meter(window_s=10)
    meter.begin(1.0, wait)
    assert meter.bytes_per_s(1.0 + wait / 2) is None
    meter.begin(1.0 + wait / 2, wait)  # of what is under way already, nothing is taken off twice
    meter.arrived(100, 1.0 + wait + 0.5)
    assert meter.bytes_per_s(1.0 + wait + 0.5) == pytest.approx(200)
    meter.end(1.0 + wait + 0.5)
    meter.end(1.0 + wait + 0.5)
    assert meter.bytes_per_s(100.0) == pytest.approx(200)
