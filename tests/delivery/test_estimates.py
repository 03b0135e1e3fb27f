"""What a store knows of link and decoding, when it notices silence, and which level it chooses by that."""

from __future__ import annotations

import threading
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.delivery import cachegen_rule
from blendserve.store import ChunkKey
from blendserve.store.codecs.base import SLOW
from blendserve.store.kdn.adapt import SAME, TEXT, WORTH, Meter, Offer, Situation, fixed, quickest
from blendserve.store.kdn.guard import FIRST, STEPS, Guard
from blendserve.store.kdn.pace import Pace
from blendserve.store.kdn.store import KdnStore
from blendserve.store.request_reads import TimeSaved
from tests.support.peers import HEADER, LEVELS, Paced, Peer, Service, settings, some_key
from tests.support.waiting import ManualClock

LONG_S = 60.0
RATES, SECONDS = st.floats(1e3, 1e10), st.floats(0, 10)
OFFERS = st.tuples(SECONDS, st.lists(st.tuples(st.integers(1, 10**9), SECONDS), min_size=1, max_size=4)).map(
    lambda found: [
        Offer(TEXT, 0, found[0]),
        *(Offer(f"level{n}", *level) for n, level in enumerate(found[1])),
    ]
)


def test_decoding_is_measured_before_the_first_request(service: Service) -> None:
    with KdnStore(settings(service.url, level="auto")) as store:
        assert [store.pace.decoding(level) for level in LEVELS] == [0.0, 0.0]
        found = store.sample([some_key()], 1)
        assert found
        assert 0 < found.part <= 1
        assert store.pace.decoding("int8") > 0 == store.pace.decoding("raw")
        assert store.pace.round_trip > 0
        assert store.pace.n_bytes > 0
        assert store.sample([b"\0" * 28], 1) is None  # not of this collection


def test_a_round_trip_is_the_shortest_of_three(service: Service) -> None:
    """The seconds of a slow start would be left out of every transfer: the link would look quicker each time."""
    clock, seconds = ManualClock(), iter([3.0, 0.5, 1.0])

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if l == HEADER:
            clock.advance(next(seconds, 0.0))

    with Peer(Paced(service.url, before)) as peer, KdnStore(settings(peer.url), clock=clock) as store:
        found = store.sample(list(store.keys()), 1)
        assert found
        assert found.round_trip == store.pace.round_trip == pytest.approx(0.5)


@pytest.mark.parametrize(("everything", "of_one"), [(0.0, 1e6), (1e6, 0.0)])
def test_a_chunk_with_a_worth_of_its_own_is_weighed_by_that(
    service: Service, everything: float, of_one: float
) -> None:
    pace = Pace()
    with pace.transfer():  # or nothing is known of the link
        pace.arrived(10**6)
    with KdnStore(settings(service.url, level="auto"), pace=pace) as store, store.reading() as snapshot:
        one, *others = list(store.keys())[:3]
        snapshot.expect([one, *others], saved=TimeSaved(everything, {one: of_one}))
        came = {key for key in (one, *others) if snapshot.get(key)}
        left = {key for key, why in snapshot.undecodable.items() if why.kind == SLOW}
    assert came == ({one} if of_one else {*others})
    assert left == {one, *others} - came


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("before", [0, 1, 5, 3 * FIRST])
def test_silence_is_a_number_of_steps_without_a_byte(before: int, busy: bool) -> None:
    """More before the first byte, and beside a prefill. The transfers are cut then, and not before."""
    looks, cut = count(), threading.Event()
    guard = Guard(lambda: min(next(looks), before), lambda: 0.001)
    guard.busy = busy
    with guard.transfer(cut.set):
        assert cut.wait(LONG_S)
    assert guard.silent
    assert next(looks) == 1 + before + (STEPS if before and not busy else FIRST)


# The rules by brute force, and the meter by adding up


@given(OFFERS, st.none() | RATES, SECONDS, st.floats(0.01, 1), SECONDS, st.data())
def test_the_choice_is_the_finest_of_the_quickest_or_of_those_in_time(
    offers: list[Offer], rate: float | None, wanted: float, share: float, spent: float, data: st.DataObject
) -> None:
    """A level under way is given up only for much; of an unknown link the fewest bytes are asked for."""
    under_way = data.draw(st.sampled_from([None, *(offer.word for offer in offers[1:])]))
    chosen = quickest(offers, Situation(rate, None, wanted, share, spent), under_way)
    if rate is None:
        assert chosen == (under_way or min(offers[1:], key=lambda offer: offer.n_bytes).word)
        return
    seconds = {offer.word: offer.n_bytes / rate + offer.seconds for offer in offers}
    best = min(seconds.values())
    if under_way and WORTH * seconds[under_way] <= best:
        assert chosen == under_way
    else:
        in_time = max(SAME * best, (wanted - spent) * share)
        assert chosen == next(word for word, s in seconds.items() if s <= in_time)


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
    assert cachegen_rule(offers, Situation(1e9, last, wanted=wanted), going_on) == expected
    assert [fixed(level)(offers, Situation(1e9)) for level in ("0", "int8")] == [
        "0",
        TEXT,
    ]  # what is not offered


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
