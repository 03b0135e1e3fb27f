"""Jobs one after another, in slices, on the thread and the stream of vLLM's steps.

    step        decode, then a slice of the job | decode, then the next slice | nothing to decode: many slices

A job runs in a greenlet: it is suspended in a hook, within the model's forward, and no second thread has
OpenMP threads or a CUDA stream of its own. Any error ends the job, never the engine: vLLM prefills the prompt itself.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable
from typing import Protocol

from greenlet import getcurrent, greenlet
from vllm.forward_context import get_forward_context, override_forward_context

from blendserve_vllm.plan import PrefillJob, Report, failed

log = logging.getLogger(__name__)
CANCELLED = "the request ended"


class JobRunnerProtocol(Protocol):
    """Runs a job to its end; calls `pause` where it may be suspended."""

    def run(self, job: PrefillJob) -> Report: ...


def pause() -> None:
    """Suspend the running job until the next step."""
    parent = getcurrent().parent
    assert parent is not None
    parent.switch()


class JobQueue:
    """Jobs of one worker, first come, first served."""

    def __init__(self, runner: JobRunnerProtocol, slices_alone: int = 1) -> None:
        """slices_alone: how many a step may have in which vLLM computes nothing."""
        self.runner, self._slices_alone = runner, slices_alone
        self._waiting = deque[PrefillJob]()
        self._running: tuple[PrefillJob, greenlet] | None = None
        self._reports: dict[str, Report] = {}

    def add(self, jobs: Iterable[PrefillJob]) -> None:
        self._waiting.extend(jobs)

    def step(self, is_alone: bool = False) -> None:
        """Run jobs until one was suspended as often as a step allows, or none is left."""
        n_slices = self._slices_alone if is_alone else 1
        while n_slices and (self._running or self._waiting):
            if self._running is None:
                job = self._waiting.popleft()
                self._running = job, greenlet(lambda job=job: self._run(job))
            _, running = self._running
            with override_forward_context(get_forward_context()):  # a job restores the one that it began in
                running.switch()
            if running.dead:
                self._running = None
            else:
                n_slices -= 1

    def cancel(self, request_ids: Collection[str]) -> None:
        """These requests have ended: their jobs end, too, and count as done."""
        for job in [job for job in self._waiting if job.request_id in request_ids]:
            self._waiting.remove(job)
            self._reports[job.request_id] = Report(error=CANCELLED)
        if self._running and self._running[0].request_id in request_ids:
            job, running = self._running
            with override_forward_context(None):
                running.throw()
            self._running = None
            self._reports[job.request_id] = Report(error=CANCELLED)

    def take_reports(self) -> dict[str, Report]:
        """Return the reports of jobs that have ended since the last call, by request."""
        reports, self._reports = self._reports, {}
        return reports

    def _run(self, job: PrefillJob) -> None:
        try:
            report = self.runner.run(job)
        except Exception as error:
            log.warning("vLLM prefills request %s, as its job failed", job.request_id, exc_info=True)
            report = failed(error)
        self._reports[job.request_id] = report
