"""The rules by brute force, and the meter by adding up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.store.kdn import adapt
from blendserve.store.kdn.adapt import TEXT, Meter, Offer, Situation, cachegen, comes_in_step, quickest

RATES, SECONDS, BYTES = st.floats(1e3, 1e10), st.floats(0, 10), st.integers(0, 10**9)
LEVELS = st.lists(st.tuples(st.integers(1, 10**9), SECONDS), min_size=1, max_size=4).map(
    lambda found: [Offer(f"level{n}", n_bytes, s) for n, (n_bytes, s) in enumerate(found)]
)
OFFERS = st.tuples(SECONDS, LEVELS).map(lambda both: [Offer(TEXT, 0, both[0]), *both[1]])


def seconds(offers: list[Offer], word: str, rate: float) -> float:
    return next(o.n_bytes / rate + o.seconds for o in offers if o.word == word)


@given(OFFERS, RATES, SECONDS)
def test_the_choice_is_the_finest_of_the_quickest(offers: list[Offer], rate: float, wanted: float) -> None:
    """Without a wanted time, nothing is quicker by 5%; with one, no finer level would be there in time."""
    words = [o.word for o in offers]
    best = min(seconds(offers, word, rate) for word in words)
    assert seconds(offers, quickest(offers, Situation(rate)), rate) <= 1.05 * best
    chosen = quickest(offers, Situation(rate, wanted=wanted))
    for finer in words[: words.index(chosen)]:
        assert seconds(offers, finer, rate) > max(wanted, 1.05 * best)


@given(OFFERS, RATES, SECONDS, st.floats(0.01, 1), SECONDS)
def test_a_chunk_may_use_its_share_of_the_seconds_that_are_left(
    offers: list[Offer], rate: float, wanted: float, share: float, spent: float
) -> None:
    whole = Situation(rate, wanted=max(0.0, (wanted - spent) * share))
    assert quickest(offers, Situation(rate, None, wanted, share, spent)) == quickest(offers, whole)


@given(OFFERS, RATES, st.data())
def test_a_level_under_way_is_given_up_only_for_much(
    offers: list[Offer], rate: float, data: st.DataObject
) -> None:
    under_way = data.draw(st.sampled_from([o.word for o in offers[1:]]))
    chosen = quickest(offers, Situation(rate), under_way)
    if chosen != under_way:
        assert seconds(offers, chosen, rate) <= 1.05 * 0.75 * seconds(offers, under_way, rate)


@pytest.mark.parametrize(
    ("rate", "wanted", "expected"),
    [(1e4, 0.0, TEXT), (1e7, 0.0, "small"), (1e9, 0.0, "raw"), (None, 0.0, "small"), (1e7, 1.0, TEXT)],
)
def test_a_dying_link_leads_to_text_and_a_quick_one_to_what_needs_no_decoding(
    rate: float | None, wanted: float, expected: str
) -> None:
    offers = [Offer(TEXT, 0, 0.5), Offer("raw", 12_000_000, 0.0), Offer("small", 800_000, 0.05)]
    assert quickest(offers, Situation(rate, wanted=wanted)) == expected
    assert quickest(offers, Situation(None), "raw") == "raw"


@pytest.mark.parametrize(
    ("last", "wanted", "going_on", "expected"),
    [
        (None, 0.0, None, "1"),  # the first chunk: the level in the middle
        (1e9, 0.4, None, "0"),
        (1e6, 0.4, None, TEXT),  # computing, .5 s, is quicker than the 1 s of the smallest level
        (3e6, 0.4, None, "2"),  # and slower than .33 s of it
        (1e3, 0.6, None, TEXT),
        (1e6, 0.4, "0", "0"),
    ],
)
def test_cachegens_rule_looks_at_the_last_chunk_alone(
    last: float | None, wanted: float, going_on: str | None, expected: str
) -> None:
    offers = [Offer(TEXT, 0, 0.5), *(Offer(str(n), 10 ** (8 - n), 0.0) for n in range(3))]
    assert cachegen(offers, Situation(1e9, last, wanted=wanted), going_on) == expected


@given(BYTES, BYTES, RATES, SECONDS, SECONDS)
def test_a_chunk_is_computed_meanwhile_or_fetched_after_all_where_that_is_sooner(
    others: int, last: int, rate: float, c: float, decoding: float
) -> None:
    """The last chunk by one end, the others by the other, and no sooner than either."""
    if adapt.outlasts(others + last, rate, c):
        assert max(c, others / rate) <= (others + last) / rate
        assert not adapt.overtakes(others + last, rate, 0.0, c)  # or it would be given up at once
    if adapt.overtakes(last, rate, decoding, c):
        assert last / rate + decoding < c
    assert not adapt.overtakes(last, None, decoding, c)
    assert not adapt.outlasts(last, None, c)


@pytest.mark.parametrize(("gbit", "expected"), [(3.0, True), (0.1, True), (0.03, False)])
def test_chunks_come_in_step_unless_the_link_is_slow(gbit: float, expected: bool) -> None:
    """6 MB of chunks of .35 s of computing each: 16 ms, .48 s and 1.6 s on the link."""
    assert comes_in_step(6e6, gbit * 1.25e8, 0.35) is expected
    assert not comes_in_step(6e6, None, 0.35)


def test_a_fixed_level_that_is_not_offered_is_computed() -> None:
    offers = [Offer(TEXT, 0, 0.5), Offer("raw", 1, 0.0)]
    assert [adapt.fixed(level)(offers, Situation(1.0)) for level in ("raw", "int8")] == ["raw", TEXT]


# The meter, by adding up


@given(
    st.lists(
        st.tuples(st.integers(1, 10**6), st.floats(0.001, 1.0), st.floats(0, 100)), min_size=1, max_size=30
    )
)
def test_the_meter_gives_bytes_over_seconds_of_transfer(pieces: list[tuple[int, float, float]]) -> None:
    """Each transfer brings a piece at its end; pauses between them do not count."""
    meter, now = Meter(window_s=1e9), 5.0
    for n_bytes, s, pause in pieces:
        meter.begin(now)
        now += s
        meter.arrived(n_bytes, now)
        meter.end(now)
        now += pause
    expected = sum(n for n, _, _ in pieces) / sum(s for _, s, _ in pieces)
    assert meter.bytes_per_s(now) == pytest.approx(expected, rel=1e-6)


@given(RATES, RATES)
def test_the_meter_follows_a_step_within_its_window(before: float, after: float) -> None:
    meter, now = Meter(window_s=1.0), 0.0
    meter.begin(now)
    for rate in (before, after):
        for _ in range(40):
            now += 0.05
            meter.arrived(int(rate * 0.05) + 1, now)
    assert meter.bytes_per_s(now) == pytest.approx(after, rel=0.1, abs=50)


@pytest.mark.parametrize("wait", [0.0, 0.25, 2.0])
def test_the_round_trip_is_no_time_of_transfer_and_silence_is(wait: float) -> None:
    meter = Meter(window_s=10)
    meter.begin(1.0, wait)
    assert meter.bytes_per_s(1.0 + wait / 2) is None
    meter.begin(1.0 + wait / 2, wait)  # a second transfer shares the time of the first
    meter.arrived(100, 1.0 + wait + 0.5)
    assert meter.bytes_per_s(1.0 + wait + 0.5) == pytest.approx(200)
    assert meter.bytes_per_s(1.0 + wait + 2.0) == pytest.approx(50)
    for _ in range(2):
        meter.end(1.0 + wait + 2.0)
    assert meter.bytes_per_s(100.0) == pytest.approx(50)


@given(RATES, RATES)
def test_the_meter_forgets_as_if_it_were_new(before: float, after: float) -> None:
    meter, new = Meter(window_s=10), Meter(window_s=10)
    meter.begin(0.0)
    meter.arrived(int(before), 1.0)
    meter.forget(5.0)
    assert meter.bytes_per_s(6.0) is None
    new.begin(5.0)
    for each in (meter, new):
        each.arrived(int(after), 7.0)
    assert meter.bytes_per_s(8.0) == pytest.approx(new.bytes_per_s(8.0))
