"""One thread for the jobs of many tenants, who take turns; a long job lets the short ones go between its parts.

What is refused has cost the others as much as what is answered, and its sender has no reason to stop: after a short job
that failed, its tenant's next one waits for REFUSED times as long while others' requests are in flight.

The server's retrieval runs here: an index may not change while it is searched, so there is one thread, and nobody may
have it for long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from blendserve.engine.fair_queue import FairQueue
from blendserve.engine.standby import LOOK, Standby
from blendserve.errors import Busy, Stopping

T = TypeVar("T")

REFUSED = 9  # times what a failed job took: so its sender has a tenth of this thread


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    tenant: str
    call: Callable[[], Any]
    long: bool
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> bool:
        """Do it, unless it was cancelled -> whether it failed."""
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.call())
            except BaseException as error:
                self.future.set_exception(error)
                return True
        return False


class FairThread:
    """Give it jobs with `submit`; cancel their futures when nobody waits for them any more."""

    def __init__(
        self,
        name: str,
        queue: int,
        standby: Standby | None = None,
        in_flight: Callable[[], bool] = lambda: False,
        others_in_flight: Callable[[str], bool] = lambda tenant: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """queue: so many jobs of one tenant may wait; long ones are not refused, whoever makes them counts them.

        standby, in_flight: how long jobs stand back while a request is in flight anywhere, and whether one is;
        others_in_flight: whether one of another tenant is.
        """
        self._waiting: FairQueue[_Job] = FairQueue()
        self._queue = queue
        self._standby, self._in_flight = standby or Standby(), in_flight
        self._others_in_flight, self._clock = others_in_flight, clock
        self._not_before: dict[
            str, float
        ] = {}  # by tenant, on the clock: its next short job, where one failed
        self._wake = threading.Condition()
        self._stopped = False
        self._open = False  # a long job runs, and no short one inside of it
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, tenant: str, call: Callable[[], T], long: bool = False) -> Future[T]:
        """Queue a job. long: it calls `give_way` between its parts. Raises Busy and Stopping."""
        job = _Job(tenant, call, long)
        with self._wake:
            if self._stopped:
                raise Stopping("the server is shutting down: ask another one")
            if not long and self._waiting.of(tenant) >= self._queue:
                raise Busy(f"{self._queue} of your requests are waiting already", 1)
            self._waiting.put(job)
            self._wake.notify()
        job.future.add_done_callback(lambda future: self._drop(job) if future.cancelled() else None)
        return job.future

    def give_way(self) -> None:
        """Do the short jobs that wait, one at least, and rest for the part that is done while requests are in flight.

        Outside of long jobs nothing happens. Raises Stopping.
        """
        if threading.current_thread() is not self._thread or not self._open:
            return
        self._standby.worked(self._in_flight())
        self._do_short(0.0)
        self._standby.rested()
        while self._standby.rest > 0 and self._in_flight():
            self._do_short(min(self._standby.rest, LOOK))
            self._standby.rested()

    def _do_short(self, patience: float) -> None:
        """A short job, if one comes within so many seconds. Raises Stopping."""
        with self._wake:
            job = self._next_short()
            if job is None and patience:
                self._wake.wait(patience)
                job = self._next_short()
        if job:
            self._open = False
            self._run_short(job)
            self._open = True

    def _next_short(self) -> _Job | None:
        if self._stopped:
            raise Stopping("the server has shut down before all was done: ask again")
        return self._waiting.pop(lambda job: not job.long and self._may_go(job))

    def _may_go(self, job: _Job) -> bool:
        """Whether it need not wait for what its tenant's last one has cost."""
        if job.long or self._clock() >= self._not_before.get(job.tenant, 0.0):
            return True
        return not self._others_in_flight(job.tenant)

    def _run_short(self, job: _Job) -> None:
        began = self._clock()
        failed, now = job.run(), self._clock()
        self._not_before = {tenant: then for tenant, then in self._not_before.items() if then > now}
        if failed:
            self._not_before[job.tenant] = now + REFUSED * (now - began)

    def stop(self) -> None:
        """End when the job that runs is done, a long one where it gives way; cancel those that wait. Idempotent."""
        with self._wake:
            self._stopped = True
            left = self._waiting.all()
            self._wake.notify()
        for job in left:
            job.future.cancel()
        self._thread.join()

    def _loop(self) -> None:
        while job := self._next():
            if job.long:
                self._open = True
                self._standby.begin()
                job.run()
                self._open = False
            else:
                self._run_short(job)

    def _next(self) -> _Job | None:
        """Wait for a job that may go; None at the end."""
        with self._wake:
            while not self._stopped:
                if job := self._waiting.pop(self._may_go):
                    return job
                self._wake.wait(LOOK if len(self._waiting) else None)
        return None

    def _drop(self, job: _Job) -> None:
        with self._wake:
            self._waiting.remove(job)
