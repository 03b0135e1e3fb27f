"""One thread for the jobs of many tenants, who take turns; a long job lets the short ones go between its parts.

The server's retrieval runs here: an index may not change while it is searched, and a tokenizer keeps settings of the
last call, so there is one thread, and nobody may have it for long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from blendserve.engine.fair_queue import FairQueue
from blendserve.errors import Busy, Stopping

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    tenant: str
    call: Callable[[], Any]
    long: bool
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        """Do it, unless it was cancelled."""
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.call())
            except BaseException as error:
                self.future.set_exception(error)


class FairThread:
    """Give it jobs with `submit`; cancel their futures when nobody waits for them any more."""

    def __init__(self, name: str, queue: int) -> None:
        """queue: so many jobs of one tenant may wait; long ones are not refused, whoever makes them counts them."""
        self._waiting: FairQueue[_Job] = FairQueue()
        self._queue = queue
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
        """Do a short job that waits, if one does; outside of long jobs nothing happens. Raises Stopping."""
        if threading.current_thread() is not self._thread or not self._open:
            return
        with self._wake:
            if self._stopped:
                raise Stopping("the server has shut down before all was done: ask again")
            job = self._waiting.pop(lambda job: not job.long)
        if job:
            self._open = False
            job.run()
            self._open = True

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
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopped or len(self._waiting))
                job = None if self._stopped else self._waiting.pop()
            if job is None:
                return
            self._open = job.long
            job.run()
            self._open = False

    def _drop(self, job: _Job) -> None:
        with self._wake:
            self._waiting.remove(job)
