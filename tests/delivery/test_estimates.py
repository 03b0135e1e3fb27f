"""What a store knows of link and decoding, and when it notices silence."""

from __future__ import annotations

import threading
from itertools import count, repeat
from typing import Any

import pytest
import torch

from blendserve.store import ChunkKey
from blendserve.store.base import TimeSaved
from blendserve.store.chunk import StoredChunk
from blendserve.store.codecs.base import SLOW
from blendserve.store.kdn.client import Client
from blendserve.store.kdn.guard import FIRST, NAME, STEPS, Guard
from blendserve.store.kdn.pace import BESIDE, Pace
from blendserve.store.kdn.store import KdnStore
from tests.support.peers import HEADER, LAYERS, LEVELS, Paced, Peer, Service, settings, some_key
from tests.support.waiting import ManualClock

LONG_S = 60.0


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


def test_chunks_beyond_the_memory_in_flight_are_not_decoded_to_measure(service: Service) -> None:
    pace = Pace()
    with KdnStore(settings(service.url, level="auto", in_flight_mb=1), pace=pace) as store:
        client, key = Client(store.config), next(iter(store.keys()))
        pace.learn_decoding(client, key, {"int8": 1 << 40}, 1 << 20, 10.0, lambda hash: None)
    assert pace.decoding("int8") == 0


def test_a_round_trip_is_the_shortest_of_three(service: Service) -> None:
    """The seconds of a slow start would be left out of every transfer: the link would look quicker each time."""
    clock, seconds = ManualClock(), iter([3.0, 0.5, 1.0])

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if l == HEADER:
            clock.advance(next(seconds, 0.0))

    with (
        Peer(Paced(service.url, before)) as peer,
        KdnStore(settings(peer.url), clock=clock) as store,
    ):
        found = store.sample(list(store.keys()), 1)
        assert found
        assert found.round_trip == store.pace.round_trip == pytest.approx(0.5)


def test_what_a_codec_prepares_once_is_not_counted_as_decoding(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, prepared, layer = ManualClock(), set[int](), StoredChunk.layer

    def slow_at_first(self: StoredChunk, l: int) -> Any:
        clock.advance(1.0 if l in prepared else 5.0)
        prepared.add(l)
        return layer(self, l)

    monkeypatch.setattr(StoredChunk, "layer", slow_at_first)
    with KdnStore(settings(service.url, level="auto"), clock=clock) as store:
        keys = list(store.keys())
        store.sample(keys, 1)
        tokens = sorted(info.n_tokens for info in store.info(keys).values())
    chunk_s = store.pace.decoding("int8") * torch.get_num_threads() / BESIDE * tokens[len(tokens) // 2]
    assert chunk_s == pytest.approx(LAYERS * 1.0)


def test_a_silent_link_has_no_rate_and_is_trusted_after_a_request_came_through() -> None:
    clock = ManualClock()
    pace = Pace(clock)
    with pace.transfer():
        clock.advance(2.0)
        pace.arrived(10**6)
        assert pace.bytes_per_s() == pytest.approx(5e5)
        pace.silence()
        assert (pace.bytes_per_s(), pace.wary) == (None, True)
        clock.advance(1.0)
        pace.arrived(10**6)
    assert pace.bytes_per_s() == pytest.approx(1e6)
    assert pace.wary
    pace.came_through()
    assert not pace.wary


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


# Silence: not a slow connection, a slow service or a slow machine


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("before", [0, 1, 5])
def test_silence_is_a_number_of_steps_without_a_byte(before: int, busy: bool) -> None:
    """More before the first byte, and beside a prefill. The transfers are cut then."""
    looks, cut = count(), threading.Event()
    guard = Guard(lambda: min(next(looks), before), lambda: 0.001)
    guard.busy = busy
    with guard.transfer(cut.set):
        assert cut.wait(LONG_S)
    assert guard.silent
    assert next(looks) == 1 + before + (STEPS if before and not busy else FIRST)


def test_transfers_that_bring_something_at_every_look_are_not_cut() -> None:
    looks, enough, cut = count(), threading.Event(), threading.Event()

    def arrived() -> int:
        if (n := next(looks)) >= 3 * FIRST:
            enough.set()
        return n

    guard = Guard(arrived, lambda: 0.001)
    with guard.transfer(cut.set):
        assert enough.wait(LONG_S)
    assert (guard.silent, cut.is_set()) == (False, False)


def test_transfers_that_ended_are_not_watched() -> None:
    looks = iter(repeat(0, 1))  # a second look would be an error
    guard = Guard(lambda: next(looks), lambda: LONG_S)
    before = set(threading.enumerate())
    with guard.transfer(lambda: None), guard.transfer(lambda: None):
        (watching,) = (t for t in threading.enumerate() if t.name == NAME and t not in before)
    watching.join(LONG_S)
    assert not watching.is_alive()
    assert not guard.silent
