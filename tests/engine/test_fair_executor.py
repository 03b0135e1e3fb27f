"""Work that gives way to requests keeps its share, and no more: on a manual clock, and by events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import Steps
from blendserve.engine.fair_executor import MAX_CREDIT_S, BackgroundThrottle, FairExecutor, FairQueue
from blendserve.errors import InputError, RateLimited, ShuttingDown
from tests.support.waiting import ManualClock, eventually


def test_tenants_take_turns() -> None:
    waiting: FairQueue[str] = FairQueue()
    for tenant in "aaaaabbc":
        waiting.put(tenant, tenant)
    assert "".join(iter(waiting.pop, None)) == "abcabaaa"


def test_a_full_queue_and_an_end_are_refused() -> None:
    held, executor = threading.Event(), FairExecutor("test", queue=1)
    futures = [executor.submit("a", held.wait)]
    eventually(futures[0].running)
    futures.append(executor.submit("a", held.wait))
    with pytest.raises(RateLimited):
        executor.submit("a", held.wait)
    futures.append(executor.submit("b", held.wait))
    held.set()
    assert all(future.result(60) for future in futures)
    executor.stop()
    with pytest.raises(ShuttingDown):
        executor.submit("a", held.wait)


@given(st.floats(0.01, 1.0), st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=50), st.floats(1e-3, 1.0))
def test_under_constant_load_work_has_its_share_of_the_time(
    share: float, units: list[float], request: float
) -> None:
    """Requests of one length come without a pause; between two of them the work does as many units as it may."""
    clock = ManualClock(0)
    throttle, rested = BackgroundThrottle(share, clock), 0.0
    for unit in units:
        with throttle.charged(in_flight=lambda: True):
            clock.advance(unit)
        while throttle.rest_s > 0:
            clock.advance(request)
            rested += request
    expected = sum(units) * (1 / share - 1)
    assert rested >= expected - 1e-5
    assert rested <= expected + len(units) * max(0.0, request - MAX_CREDIT_S) + request + 1e-5


class Jobs:
    """A FairExecutor whose clock is advanced by what it does."""

    def __init__(self) -> None:
        self.clock, self.done, self.looks = ManualClock(0), list[str](), 0
        self.in_flight, self.others = True, dict[str, bool]()  # by tenant: whether another one's are
        throttle = BackgroundThrottle(0.1, self.clock)
        others = lambda tenant: self.others.get(tenant, False)  # noqa: E731
        self.thread = FairExecutor("test", 10, throttle, self.look, others, self.clock)

    def look(self) -> bool:
        self.looks += 1
        return self.in_flight

    def work(self, name: str, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.done.append(name)
        self.clock.advance(seconds)
        if error:
            raise error

    def submit(self, tenant: str, name: str, seconds: float = 0.0) -> Future[None]:
        return self.thread.submit(tenant, partial(self.work, name, seconds))

    def submit_long(self, parts: int, first: Callable[[], object] = lambda: None) -> Future[None]:
        def long() -> Steps[None]:
            first()
            for n in range(parts):
                self.work(f"part {n}", 1.0)
                yield

        return self.thread.submit("jobs", long())

    def refuse(self) -> None:
        """A job of the tenant "hostile" that fails."""
        with pytest.raises(InputError):
            self.thread.submit("hostile", partial(self.work, "refused", 1.0, InputError("no"))).result(60)


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    made = Jobs()
    yield made
    made.thread.stop()


def test_a_long_job_rests_between_its_parts_and_short_ones_go_meanwhile(jobs: Jobs) -> None:
    go = threading.Event()
    job = jobs.submit_long(2, go.wait)
    eventually(job.running)
    for n in range(4):  # the rest after a part is 9 s: three of these
        jobs.submit("asks", f"short {n}", 3.0)
    go.set()
    jobs.submit("asks", "last", 9.0).result(60)
    job.result(60)
    assert jobs.done == ["part 0", "short 0", "short 1", "short 2", "part 1", "short 3", "last"]


@pytest.mark.parametrize("stops", [True, False])
def test_a_rest_ends_with_the_last_request_or_the_thread(jobs: Jobs, stops: bool) -> None:
    """Nothing moves the clock while it rests."""
    job, second, third = (jobs.submit_long(1) for _ in range(3))
    eventually(lambda: jobs.looks > 3)
    assert not job.done()
    assert second.cancel()
    if stops:
        jobs.thread.stop()
        with pytest.raises(ShuttingDown):
            job.result(60)
        assert third.cancelled()
    else:
        jobs.in_flight = False
        third.result(60)
    assert jobs.done == ["part 0"] * (1 if stops else 2)


def test_after_a_refusal_its_tenant_waits_nine_times_as_long_for_requests_of_others(jobs: Jobs) -> None:
    jobs.refuse()
    jobs.submit("hostile", "as no other request is in flight").result(60)
    jobs.refuse()
    jobs.others["hostile"] = True
    second = jobs.submit("hostile", "second")
    for n in range(9):
        jobs.submit("asks", f"answer {n}", 0.99).result(60)
        assert not second.done()
    jobs.clock.advance(1.0)
    second.result(60)
    jobs.submit("hostile", "third").result(60)  # the second was no refusal
    jobs.refuse()
    fourth = jobs.submit("hostile", "fourth")
    jobs.submit("asks", "answer").result(60)
    assert not fourth.done()
    jobs.others["hostile"] = False
    fourth.result(60)
