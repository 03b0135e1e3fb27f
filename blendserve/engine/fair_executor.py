"""Tenants take turns, requests go before background work: the queue, the throttle, and a thread that uses both.

The server's retrieval runs on a FairExecutor: an index may not change while it is searched, so there is one thread, and
no job may have it for long.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from blendserve.errors import RateLimited, ShuttingDown

T = TypeVar("T")

REJECTION_PENALTY = 9  # times the duration of a failed job: its tenant gets a tenth of this thread
BACKGROUND_SHARE = 0.1  # of the time, while requests are in flight
MAX_CREDIT_S = 0.5  # of a longer rest no more is made up for by more work at once
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


class BackgroundThrottle:
    """Gives the background work of one thread its share of the time while requests are in flight.

    Such work comes in small units, a layer or a passage. After each unit it rests, so that requests have the cores, and
    ends under any load. A rest ends with the last request.
    """

    def __init__(
        self, share: float = BACKGROUND_SHARE, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """share: of the time, that the work keeps while requests are in flight."""
        self._share, self._clock = share, clock
        self._began = self._not_before = clock()

    def begin(self) -> None:
        """A unit begins."""
        self._began = self._clock()

    def charge(self, in_flight: bool) -> None:
        """A unit has ended, while requests were in flight or not."""
        now = self._clock()
        start = max(self._not_before, self._began - MAX_CREDIT_S)
        self._not_before = start + (now - self._began) / self._share if in_flight else now

    @property
    def rest_s(self) -> float:
        """Seconds until the next unit may begin while requests are in flight."""
        return max(0.0, self._not_before - self._clock())


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    tenant: str
    call: Callable[[], Any]
    is_long: bool
    future: Future[Any] = field(default_factory=Future)


class FairExecutor:
    """One thread for the jobs of many tenants, who take turns; a long job lets short ones run between its parts.

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
        self._waiting, self._queue = FairQueue[_Job](), queue
        self._throttle, self._in_flight = throttle or BackgroundThrottle(), in_flight
        self._has_other_tenants, self._clock = has_other_tenants, clock
        self._not_before = dict[str, float]()  # by tenant: the time of its next job, after one that failed
        self._wake = threading.Condition()
        self._stopped = False
        self._in_long_job = False  # and not in a short one within it
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, tenant: str, call: Callable[[], T], long: bool = False) -> Future[T]:
        """Queue a job. long: it calls `yield_to_requests` between its parts. Raises RateLimited and ShuttingDown."""
        job = _Job(tenant, call, long)
        with self._wake:
            if self._stopped:
                raise ShuttingDown("the server is shutting down: ask another one")
            if not long and self._waiting.of(tenant) >= self._queue:
                raise RateLimited(f"{self._queue} of your requests are waiting already", 1)
            self._waiting.put(tenant, job)
            self._wake.notify()
        job.future.add_done_callback(lambda future: self._drop(job) if future.cancelled() else None)
        return job.future

    async def run(self, tenant: str, call: Callable[..., T], *args: Any, long: bool = False) -> T:
        """Await a job in an event loop; cancelled while it waits, it does not run. long, errors: as of `submit`."""
        return await asyncio.wrap_future(self.submit(tenant, partial(call, *args), long))

    def yield_to_requests(self) -> None:
        """Run a short job if one waits; while requests are in flight, rest for the last part and run others.

        Outside of long jobs nothing happens. Raises ShuttingDown.
        """
        if threading.current_thread() is not self._thread or not self._in_long_job:
            return
        self._throttle.charge(self._in_flight())
        self._run_next(0.0)
        while (rest_s := self._throttle.rest_s) > 0 and self._in_flight():
            self._run_next(min(rest_s, POLL_S))
        self._throttle.begin()

    def stop(self) -> None:
        """End after the running job, or where a long one gives way; cancel the waiting jobs. Idempotent."""
        with self._wake:
            self._stopped = True
            waiting = list(iter(self._waiting.pop, None))
            self._wake.notify()
        for job in waiting:
            job.future.cancel()
        self._thread.join()

    def _loop(self) -> None:
        with suppress(ShuttingDown):
            while True:
                self._run_next()

    def _run_next(self, timeout_s: float | None = None) -> None:
        """Run a job that is due now or after one wait, of POLL_S while jobs wait if no time is given.

        Raises ShuttingDown.
        """
        with self._wake:
            job = self._waiting.pop(self._is_due)
            if not job and not self._stopped and timeout_s != 0.0:
                default_s = POLL_S if len(self._waiting) else None  # None: until a job is submitted
                self._wake.wait(default_s if timeout_s is None else timeout_s)
                job = self._waiting.pop(self._is_due)
            if self._stopped:  # no job waits
                raise ShuttingDown("the server has shut down before all was done: ask again")
        if job:
            self._run(job)

    def _is_due(self, job: _Job) -> bool:
        """Whether it need not wait for a long job that runs, nor for the cost of a failed job of its tenant."""
        if job.is_long:
            return not self._in_long_job
        is_late = self._clock() >= self._not_before.get(job.tenant, 0.0)
        return is_late or not self._has_other_tenants(job.tenant)

    def _run(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        was_in_long_job, self._in_long_job = self._in_long_job, job.is_long
        began, penalty = self._clock(), 0.0
        if job.is_long:
            self._throttle.begin()
        try:
            job.future.set_result(job.call())
        except BaseException as error:
            job.future.set_exception(error)
            penalty = 0.0 if job.is_long else REJECTION_PENALTY
        self._in_long_job = was_in_long_job
        now = self._clock()
        self._not_before = {tenant: then for tenant, then in self._not_before.items() if then > now}
        if penalty:
            self._not_before[job.tenant] = now + penalty * (now - began)

    def _drop(self, job: _Job) -> None:
        with self._wake:
            self._waiting.remove(job.tenant, job)
