"""Calls to a server end in time; a breaker and a negative cache spare it after a failure; waiting counts once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from blendserve.errors import StoreCircuitOpen, StoreError, StoreUnavailable
from blendserve.store.bounded import BoundedClient, Breaker, Deadline
from tests.support.waiting import ManualClock, eventually


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def breaker(clock: ManualClock) -> Breaker:
    return Breaker("the server", first_pause_s=1.0, longest_pause_s=4.0, now=clock)


def refused(breaker: Breaker) -> bool:
    try:
        breaker.enter()
    except StoreCircuitOpen:
        return True
    return False


def test_pauses_double_up_to_the_longest_and_a_success_ends_them(
    breaker: Breaker, clock: ManualClock
) -> None:
    for _ in range(5):  # calls that had begun before it opened do not lengthen the pause
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
    breaker.failure("is away")
    breaker.success()  # of a call that had begun before
    breaker.failure("is away")
    assert refused(breaker)


def test_a_small_answer_does_not_close_what_slow_chunks_opened(breaker: Breaker, clock: ManualClock) -> None:
    breaker.failure("is slow", reading=True)
    clock.advance(1.01)
    assert not refused(breaker)
    breaker.success()
    assert not refused(breaker)  # it is still half open
    breaker.failure("is slow", reading=True)
    assert refused(breaker)
    clock.advance(2.01)
    with breaker.call(reading=True):
        pass
    assert [refused(breaker) for _ in range(3)] == [False] * 3


class Server:
    """A peer that answers when it is let; cutting its connections ends what waits."""

    where = server = "the server"

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s, self.answers = deadline_s, threading.Event()
        self.connected = self.cut = 0

    def connect(self) -> threading.Event:
        self.connected += 1
        return threading.Event()

    def disconnect(self, client: threading.Event) -> None:
        self.cut += 1
        client.set()

    def explain(self, error: Exception) -> StoreError | str:
        return "is cut"

    def timeout_reason(self) -> str:
        return "is late"

    def is_stale(self, error: Exception) -> bool:
        return False

    def job(self, client: threading.Event) -> str:
        eventually(lambda: self.answers.is_set() or client.is_set())
        if client.is_set():
            raise ConnectionError
        return "answer"


@pytest.mark.parametrize("late", [True, False])
def test_an_interrupt_ends_every_call_and_opens_the_breaker_if_the_answer_is_late(late: bool) -> None:
    server = Server(60.0)
    client = BoundedClient(server)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(client.run, server.job, True) for _ in range(2)]
        eventually(lambda: server.connected)
        client.interrupt(late, reading=True)
        for call in calls:
            with pytest.raises(StoreUnavailable):
                call.result(60)
    server.answers.set()
    if late:
        with pytest.raises(StoreCircuitOpen):
            client.run(server.job)
    else:
        assert client.run(server.job) == "answer"
    client.close()


def test_a_call_that_does_not_end_is_given_up_at_the_deadline() -> None:
    server = Server(0.05)
    client = BoundedClient(server)
    with pytest.raises(StoreUnavailable):
        client.ask(server.job)
    assert server.cut == 1
    client.close()
    with pytest.raises(StoreUnavailable):
        client.ask(server.job)


def test_threads_that_wait_concurrently_count_once(clock: ManualClock) -> None:
    allowed: Any = Deadline(10.0, clock)
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
