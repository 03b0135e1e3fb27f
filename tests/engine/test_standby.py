"""Work that stands back for requests keeps its share, and no more: on a clock of its own, and by events."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.engine.fair_thread import FairThread
from blendserve.engine.standby import CREDIT, Standby
from blendserve.errors import InputError, Stopping


class Now:
    """A clock that is put forward."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@given(st.floats(0.01, 1.0), st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=50), st.floats(1e-3, 1.0))
def test_under_constant_load_work_has_its_share_of_the_time(
    share: float, units: list[float], request: float
) -> None:
    """Requests of one length come without a pause; between two of them the work does as many units as it may."""
    now = Now()
    standby, worked, rested = Standby(share, now), 0.0, 0.0
    standby.begin()
    for unit in units:
        now.seconds += unit
        worked += unit
        standby.worked(in_flight=True)
        while standby.rest > 0:
            now.seconds += request
            rested += request
            standby.rested()
    times = 1 / share - 1
    assert rested >= worked * times - 1e-6
    assert rested <= worked * times + len(units) * max(0.0, request - CREDIT) + request + 1e-6


def test_when_nobody_is_in_the_way_there_is_nothing_to_rest_for() -> None:
    now = Now()
    standby = Standby(0.1, now)
    now.seconds = 5.0
    standby.worked(in_flight=False)
    assert standby.rest == 0
    now.seconds = 6.0
    standby.worked(in_flight=True)
    assert standby.rest == pytest.approx(9.0)
    standby.worked(in_flight=False)
    assert standby.rest == 0


def test_a_new_unit_does_not_count_what_went_by_before() -> None:
    now = Now()
    standby = Standby(0.5, now)
    now.seconds = 100.0
    standby.begin()
    now.seconds = 101.0
    standby.worked(in_flight=True)
    assert standby.rest == pytest.approx(1.0)


class Thread:
    """A FairThread whose clock is put forward by what it does."""

    def __init__(self) -> None:
        self.now, self.in_flight, self.done = Now(), True, list[str]()
        self.others = dict[str, bool]()  # by tenant: whether another one's requests are in flight
        standby = Standby(0.1, self.now)
        self.thread = FairThread(
            "test",
            10,
            standby,
            lambda: self.in_flight,
            lambda tenant: self.others.get(tenant, False),
            self.now,
        )

    def part(self, name: str, seconds: float) -> None:
        self.done.append(name)
        self.now.seconds += seconds


@pytest.fixture
def thread() -> Iterator[Thread]:
    made = Thread()
    yield made
    made.thread.stop()


def test_a_long_job_stands_back_until_it_has_rested_and_short_ones_go_meanwhile(thread: Thread) -> None:
    begun = threading.Event()

    def long() -> None:
        begun.set()
        waited.wait()
        for n in range(2):
            thread.part(f"part {n}", 1.0)
            thread.thread.give_way()

    waited = threading.Event()
    job = thread.thread.submit("jobs", long, long=True)
    begun.wait()
    for n in range(4):  # ten seconds of rest behind two parts: each of these takes three
        thread.thread.submit("asks", partial(thread.part, f"short {n}", 3.0))
    waited.set()
    thread.thread.submit("asks", lambda: thread.part("last", 9.0)).result(60)
    job.result(60)
    assert thread.done == ["part 0", "short 0", "short 1", "short 2", "part 1", "short 3", "last"]


def test_a_rest_ends_with_the_last_request(thread: Thread) -> None:
    """Nothing moves the clock while it rests, so it would rest for ever."""
    resting = threading.Event()

    def look() -> bool:
        looks.append(thread.in_flight)
        if len(looks) > 3:
            resting.set()
        return thread.in_flight

    looks = list[bool]()
    thread.thread._in_flight = look

    def long() -> None:
        thread.part("part", 1.0)
        thread.thread.give_way()

    job = thread.thread.submit("jobs", long, long=True)
    assert resting.wait(60)
    assert not job.done()
    thread.in_flight = False
    job.result(60)
    assert thread.done == ["part"]


def test_without_requests_a_long_job_goes_on_at_once(thread: Thread) -> None:
    thread.in_flight = False

    def long() -> None:
        for n in range(100):
            thread.part(str(n), 1.0)
            thread.thread.give_way()

    thread.thread.submit("jobs", long, long=True).result(60)
    assert len(thread.done) == 100


def test_who_rests_is_stopped(thread: Thread) -> None:
    resting = threading.Event()

    def look() -> bool:
        resting.set()
        return True

    thread.thread._in_flight = look

    def long() -> None:
        thread.part("part", 1.0)
        thread.thread.give_way()

    job = thread.thread.submit("jobs", long, long=True)
    resting.wait()
    thread.thread.stop()
    with pytest.raises(Stopping):
        job.result(60)


def _refused(thread: Thread, seconds: float) -> None:
    def fail() -> None:
        thread.part("refused", seconds)
        raise InputError("no")

    with pytest.raises(InputError):
        thread.thread.submit("hostile", fail).result(60)


def test_after_a_refusal_its_tenant_waits_and_the_others_go(thread: Thread) -> None:
    thread.others["hostile"] = True
    _refused(thread, 1.0)
    second = thread.thread.submit("hostile", partial(thread.part, "second", 0.0))
    for n in range(9):
        thread.thread.submit("asks", partial(thread.part, f"answer {n}", 0.99)).result(60)
        assert not second.done()
    thread.now.seconds += 1.0
    second.result(60)
    thread.thread.submit("hostile", partial(thread.part, "third", 0.0)).result(
        60
    )  # the second was no refusal


def test_after_a_refusal_nobody_waits_when_no_other_request_is_in_flight(thread: Thread) -> None:
    _refused(thread, 1.0)
    thread.thread.submit("hostile", partial(thread.part, "second", 0.0)).result(60)
    thread.others["hostile"] = True
    third = thread.thread.submit("hostile", partial(thread.part, "third", 0.0))
    thread.thread.submit("asks", partial(thread.part, "answer", 0.0)).result(60)
    assert not third.done()
    thread.others["hostile"] = False
    third.result(60)


def test_who_waits_after_a_refusal_is_stopped_and_cancelled(thread: Thread) -> None:
    thread.others["hostile"] = True
    _refused(thread, 1.0)
    second, third = (thread.thread.submit("hostile", partial(thread.part, "more", 0.0)) for _ in range(2))
    assert second.cancel()
    thread.thread.stop()
    assert third.cancelled()
    assert thread.done == ["refused"]
