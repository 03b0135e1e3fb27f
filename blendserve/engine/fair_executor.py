"""Tenants take turns, requests go before background work: the queue, the throttle, and a thread that uses both.

The server's retrieval runs on a FairExecutor: an index may not change while it is searched, so there is one thread, and
no job may have it for long.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from blendserve.core import Steps
from blendserve.errors import BlendserveError, RateLimited, ShuttingDown

T = TypeVar("T")

log = logging.getLogger(__name__)

REJECTION_PENALTY = 9  # times the duration of a failed job: its tenant gets a tenth of this thread
BACKGROUND_SHARE = 0.1  # of the time, while requests are in flight
MAX_CREDIT_S = 0.5  # of a longer rest no more is made up for by more work at once
ACTIVE_S = 60.0  # since the last request of a tenant: its share of the slots is kept for it
POLL_S = 0.01  # between two looks whether a request is in flight


class FairQueue(Generic[T]):
    """First come, first served for each tenant, and tenants take turns. Not locked: its owner does that.

    However much one tenant sends, the next item of another one waits for at most one item of each other tenant.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[T]] = OrderedDict()  # the tenant whose turn it is first

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def of(self, tenant: str) -> int:
        """Number of items of one tenant."""
        return len(self._lines.get(tenant, ()))

    def put(self, tenant: str, item: T) -> None:
        """Append to the tenant's line."""
        self._lines.setdefault(tenant, deque()).append(item)

    def pop(self, is_wanted: Callable[[T], bool] = lambda _: True) -> T | None:
        """The first of the first line whose first is wanted; its tenant goes to the back."""
        for tenant, line in self._lines.items():
            if is_wanted(item := line[0]):
                self._lines.move_to_end(tenant)
                self.remove(tenant, item)
                return item
        return None

    def remove(self, tenant: str, item: T) -> None:
        """Remove an item if it still waits."""
        line = self._lines.get(tenant, deque())
        if item in line:
            line.remove(item)
            if not line:
                del self._lines[tenant]


class RecentTenants:
    """The two tenants whose requests came last: enough to tell each tenant whether there are others. Not locked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, float] = {}  # when its last request came; the latest tenant last

    def add(self, tenant: str) -> None:
        """A request of this tenant came."""
        self._seen.pop(tenant, None)
        self._seen = dict([*self._seen.items()][-1:])
        self._seen[tenant] = self._clock()

    def has_others(self, tenant: str) -> bool:
        """Whether a request of another tenant came within ACTIVE_S."""
        since = self._clock() - ACTIVE_S
        return any(at >= since for other, at in self._seen.items() if other != tenant)


class BackgroundThrottle:
    """Gives the background work of one thread its share of the time while requests are in flight.

    Such work comes in small units, a layer or a passage. After each unit it rests, so that requests have the cores, and
    ends under any load. A rest ends with the last request.
    """

    def __init__(
        self, share: float = BACKGROUND_SHARE, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """share: of the time, that the work keeps while requests are in flight."""
        self._share = share
        self._clock = clock
        self._not_before = clock()

    @contextmanager
    def charged(self, in_flight: Callable[[], bool]) -> Iterator[None]:
        """A unit of work; at its end, `in_flight` says whether there is a request."""
        began = self._clock()
        try:
            yield
        finally:
            now = self._clock()
            start = max(self._not_before, began - MAX_CREDIT_S)
            self._not_before = start + (now - began) / self._share if in_flight() else now

    @property
    def rest_s(self) -> float:
        """Seconds until the next unit may begin while requests are in flight."""
        return max(0.0, self._not_before - self._clock())


def as_task(steps: Steps[T], future: Future[T]) -> Steps[None]:
    """Steps whose result, or error, is the future's; none of them runs if it was cancelled while they waited."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result((yield from steps))
    except GeneratorExit:
        future.set_exception(ShuttingDown("the server has shut down before all was done: ask again"))
        raise
    except BaseException as error:
        future.set_exception(error)


def run_step(task: Steps[None]) -> bool:
    """Run the next step of a task -> whether the task has ended; one that raised has ended, too."""
    try:
        next(task)
        return False
    except StopIteration:
        return True
    except BlendserveError as error:
        log.warning("a background task failed: %s", error)
        return True


@dataclass(frozen=True, slots=True, eq=False)
class _QueuedCall:
    tenant: str
    work: Callable[[], Any] | Steps[None]
    future: Future[Any]


class FairExecutor:
    """One thread for the jobs of many tenants, who take turns. Short jobs run between the steps of a long one.

    A rejected job costs the others as much as an answered one, and its sender has no reason to stop. So after a short
    job that failed, its tenant's next one waits for REJECTION_PENALTY times its duration while requests of others are in
    flight. Cancel the futures of jobs whose result is not needed any more.
    """

    def __init__(
        self,
        name: str,
        queue: int,
        throttle: BackgroundThrottle | None = None,
        in_flight: Callable[[], bool] = lambda: False,
        has_other_tenants: Callable[[str], bool] = lambda tenant: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """queue: maximum of waiting short jobs of one tenant; the caller limits long ones.

        throttle: of long jobs while a request is in flight anywhere. has_other_tenants: whether another tenant's is.
        """
        self._waiting = FairQueue[_QueuedCall]()
        self._queue = queue
        self._throttle = throttle or BackgroundThrottle()
        self._in_flight = in_flight
        self._has_other_tenants = has_other_tenants
        self._clock = clock
        self._not_before = dict[str, float]()  # by tenant: the time of its next job, after one that failed
        self._wake = threading.Condition()
        self._stopped = False
        self._long: _QueuedCall | None = None  # the long job that has begun
        self._has_given_way = False  # to a short job, since its last step
        self._n_jobs = 0
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    @property
    def n_jobs(self) -> int:
        """Jobs that wait or run, also those whose result nobody awaits any more."""
        return self._n_jobs

    def submit(self, tenant: str, work: Callable[[], T] | Steps[T]) -> Future[T]:
        """Queue a short job, or the steps of a long one. Raises RateLimited and ShuttingDown."""
        future: Future[T] = Future()
        is_long = isinstance(work, Generator)
        job = _QueuedCall(tenant, as_task(work, future) if isinstance(work, Generator) else work, future)
        with self._wake:
            if self._stopped:
                raise ShuttingDown("the server is shutting down: ask another one")
            if not is_long and self._waiting.of(tenant) >= self._queue:
                raise RateLimited(f"{self._queue} of your requests are waiting already", 1)
            self._waiting.put(tenant, job)
            self._n_jobs += 1
            self._wake.notify()
        future.add_done_callback(lambda _: self._forget(job))
        return future

    async def run(self, tenant: str, call: Callable[..., T], *args: Any) -> T:
        """Await a short job in an event loop; cancelled while it waits, it does not run. Errors: as of `submit`."""
        return await asyncio.wrap_future(self.submit(tenant, partial(call, *args)))

    def stop(self) -> None:
        """End after the running job, or step of a long one; cancel the waiting jobs. Idempotent."""
        with self._wake:
            self._stopped = True
            waiting = list(iter(self._waiting.pop, None))
            self._wake.notify()
        for job in waiting:
            job.future.cancel()
        self._thread.join()

    def _loop(self) -> None:
        while job := self._next():
            if isinstance(job.work, Generator):
                self._advance(job, job.work)
            elif job.future.set_running_or_notify_cancel():
                self._run(job, job.work)
        if self._long and isinstance(self._long.work, Generator):
            self._long.work.close()

    def _next(self) -> _QueuedCall | None:
        """The job to run now, after waiting for one; None at the end."""
        with self._wake:
            while not self._stopped:
                if job := self._due():
                    return job
                self._wake.wait(POLL_S if self._long or len(self._waiting) else None)
        return None

    def _due(self) -> _QueuedCall | None:
        """The next job. A short job has its turn after each step of a long one; while the long one rests, all have."""
        rests = self._long and self._throttle.rest_s > 0 and self._in_flight()
        if self._long and self._has_given_way and not rests:
            return self._long
        self._has_given_way = True
        return self._waiting.pop(self._may_run) or (None if rests else self._long)

    def _may_run(self, job: _QueuedCall) -> bool:
        """Whether it need not wait for a long job that has begun, nor for the cost of a failed job of its tenant."""
        if isinstance(job.work, Generator):
            return self._long is None
        is_late = self._clock() >= self._not_before.get(job.tenant, 0.0)
        return is_late or not self._has_other_tenants(job.tenant)

    def _advance(self, job: _QueuedCall, steps: Steps[None]) -> None:
        """Run the next step of a long job."""
        self._long = job
        self._has_given_way = False
        with self._throttle.charged(self._in_flight):
            self._long = None if run_step(steps) else job

    def _run(self, job: _QueuedCall, call: Callable[[], Any]) -> None:
        began = self._clock()
        try:
            job.future.set_result(call())
        except BaseException as error:
            now = self._clock()
            later = {tenant: then for tenant, then in self._not_before.items() if then > now}
            self._not_before = {**later, job.tenant: now + REJECTION_PENALTY * (now - began)}
            job.future.set_exception(error)

    def _forget(self, job: _QueuedCall) -> None:
        """It has ended, or was cancelled while it waited."""
        with self._wake:
            self._n_jobs -= 1
            self._waiting.remove(job.tenant, job)
