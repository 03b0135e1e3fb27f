"""The circuit breaker of a server, the negative cache of chunks, the deadline and the arrival of layers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from blendserve.errors import StoreLeftAlone
from blendserve.store.network.arrival import Arrival
from blendserve.store.network.breaker import Breaker
from blendserve.store.network.deadline import Deadline
from blendserve.store.network.failed import Failed
from blendserve.store.record import ChunkRecord
from tests.support.codecs import Toy
from tests.support.stores import chunk, key_of
from tests.support.waiting import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def breaker(clock: ManualClock) -> Breaker:
    return Breaker("the server", first_pause_s=1.0, longest_pause_s=4.0, now=clock)


def refused(breaker: Breaker) -> bool:
    try:
        breaker.enter()
    except StoreLeftAlone:
        return True
    return False


def test_pauses_double_up_to_the_longest_and_a_success_ends_them(
    breaker: Breaker, clock: ManualClock
) -> None:
    for _ in range(5):  # calls that were under way when it opened do not lengthen the pause
        breaker.failure("is away")
    for pause in (1.0, 2.0, 4.0, 4.0):
        clock.advance(pause - 0.01)
        assert refused(breaker)
        clock.advance(0.02)
        assert [refused(breaker) for _ in range(3)] == [False, True, True]  # one call at a time tries
        breaker.failure("is away")
    clock.advance(4.01)
    breaker.enter()
    breaker.abandon()
    breaker.enter()
    breaker.success()
    breaker.enter()
    breaker.failure("is away again")
    clock.advance(1.01)  # the pauses begin anew
    assert not refused(breaker)


def test_a_small_answer_does_not_close_what_slow_chunks_opened(breaker: Breaker, clock: ManualClock) -> None:
    breaker.failure("is slow", reading=True)
    clock.advance(1.01)
    assert not refused(breaker)
    breaker.success()
    assert not refused(breaker)  # it is still half open
    breaker.failure("is slow", reading=True)
    assert refused(breaker)
    clock.advance(2.01)
    breaker.enter()
    breaker.success(reading=True)
    assert [refused(breaker) for _ in range(3)] == [False] * 3


def test_failed_chunks_are_skipped_for_a_while_and_the_newest_are_kept(clock: ManualClock) -> None:
    failed = Failed(seconds=5.0, most=2, now=clock)
    for key in (b"a", b"b", b"c"):
        failed.add(key, "damaged")
    assert [failed.why(key) for key in (b"a", b"b", b"c")] == ["", "damaged", "damaged"]
    clock.advance(5.01)
    assert not failed.why(b"c")


def test_who_waits_for_a_layer_is_given_none_of_another_record() -> None:
    one, other = (ChunkRecord.encode(key_of(1), chunk(), Toy(level)) for level in (1, 2))
    header = one.header
    arrival = Arrival()
    arrival.begin(header)
    arrival.add(one.segment(0))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(arrival.segment, header, 1, 60.0)
        arrival.begin(other.header)
        assert waits.result(60.0) is None
    arrival.add(other.segment(0))
    assert arrival.segment(header, 0, 0.0) is None


def test_threads_that_wait_concurrently_count_once(clock: ManualClock) -> None:
    allowed = Deadline(10.0, clock)
    with allowed.waiting():
        clock.advance(1.0)
        with allowed.waiting():
            clock.advance(2.0)
            assert (allowed.waited, allowed.left) == pytest.approx((3.0, 7.0))
        clock.advance(1.0)
    clock.advance(96.0)
    assert (allowed.waited, allowed.left) == pytest.approx((4.0, 6.0))
    with allowed.waiting():
        clock.advance(7.0)
        assert allowed.left == 0.0
