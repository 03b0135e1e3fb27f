"""Background jobs: adding documents, warming and fetching chunk KV.

A job over a collection is saved in the collection's file, so that its state can be read after a restart. A job that adds
documents saves its progress in the transaction that adds each document.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from blendserve.errors import BlendserveError, NotFound, RateLimited, VectorIndexError
from blendserve.retrieve import VectorIndex

MAX_JOBS = 1000  # remembered; above it, the oldest ended job of the namespace with most of them is forgotten
MAX_RUNNING = 100
MAX_RUNNING_PER_NAMESPACE = 8  # each job holds the body of its request
MAX_READING = 2  # files of all jobs, each in a process of its own

STOPPED = "the server has shut down"

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Job:
    """The state of a job, as `GET /v1/jobs/{id}` returns it. The job updates it."""

    id: str
    namespace: str
    kind: str
    state: str = "running"  # running | done | failed
    total_documents: int = 0  # to add
    documents: int = 0  # saved
    chunks: int = 0  # to compute or fetch
    computed: int = 0  # chunks that are in the store
    error: str = ""
    files: list[dict[str, Any]] = field(default_factory=list)  # of an upload: what was read of each
    created: float = field(default_factory=time.time)

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON, without namespace and time."""
        values = asdict(self)
        del values["namespace"], values["created"]
        return values

    @property
    def progress(self) -> str:
        """Return what the job has done, and what is lost, as text."""
        text = f"{self.kind}: {self.computed} of {self.chunks} chunks have their KV stored"
        if not self.total_documents:
            return text
        left = self.total_documents - self.documents
        advice = f", {left} are lost: send them again" if left else ""
        return f"{text}, {self.documents} of {self.total_documents} documents are saved{advice}"


class Jobs:
    """The jobs of all tenants. Used by the event loop only.

    A job that another process has begun and not ended counts as failed here, as the process was probably killed.
    """

    def __init__(self, indexes: Iterable[VectorIndex] = ()) -> None:
        """indexes: their saved jobs are listed, too."""
        saved = [Job(**values) for index in indexes for values in index.saved_jobs()]
        found = sorted(saved, key=lambda job: job.created)
        for job in found:
            if job.state == "running":
                job.state = "failed"
                job.error = STOPPED
        self._jobs = {job.id: job for job in found}
        self._tasks: set[asyncio.Task[None]] = set()
        self.reading = asyncio.Semaphore(MAX_READING)

    def start(
        self,
        namespace: str,
        kind: str,
        work: Callable[[Job], Awaitable[None]],
        total_documents: int = 0,
        index: VectorIndex | None = None,
    ) -> Job:
        """Start a job. index: saves its state. Raises RateLimited if too many run, in total or in this namespace."""
        n_running = sum(job.state == "running" for job in self.of(namespace))
        if n_running >= MAX_RUNNING_PER_NAMESPACE or len(self._tasks) >= MAX_RUNNING:
            message = f"too many jobs are running: {n_running} of this namespace, {len(self._tasks)} in total"
            raise RateLimited(message, 10)
        job = Job(f"job-{uuid.uuid4().hex}", namespace, kind, total_documents=total_documents)
        self._jobs[job.id] = job
        if len(self._jobs) > MAX_JOBS:
            self._forget_one()
        task = asyncio.ensure_future(_run(job, work, index))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    def _forget_one(self) -> None:
        """Forget the oldest ended job of the namespace with most of them, so that no tenant displaces others'."""
        ended = [job for job in self._jobs.values() if job.state != "running"]
        ((most, _),) = Counter(job.namespace for job in ended).most_common(1)
        del self._jobs[next(job.id for job in ended if job.namespace == most)]

    def get(self, namespace: str, job_id: str) -> Job:
        """Return a job by id. Raises NotFound, also for a job of another namespace."""
        job = self._jobs.get(job_id)
        if job is None or job.namespace != namespace:
            raise NotFound(f"there is no job {job_id!r}")
        return job

    def of(self, namespace: str) -> list[Job]:
        """Return the jobs of a namespace, newest first."""
        return [job for job in reversed(self._jobs.values()) if job.namespace == namespace]

    async def finish(self) -> None:
        """Stop all running jobs; each saves what it has done."""
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _run(job: Job, work: Callable[[Job], Awaitable[None]], index: VectorIndex | None) -> None:
    """Run a job to its end. Its state is saved at the start, and at the end before it is reported."""
    state = "done"
    error = ""
    try:
        await _save(job, index)
        await work(job)
    except BlendserveError as failure:
        log.warning("a job failed: %s", failure)
        state = "failed"
        error = failure.public_message
    except asyncio.CancelledError:
        state = "failed"
        error = STOPPED
        log.warning("a job was cut by the shutdown, at %s", job.progress)
        raise
    except Exception:
        log.exception("a job failed")
        state = "failed"
        error = "internal server error: see the server's log"
    finally:
        await _save(replace(job, state=state, error=error), index)
        job.state = state
        job.error = error


async def _save(job: Job, index: VectorIndex | None) -> None:
    """Save the state of a job. A failure is only logged: chunks of an index that cannot be written can be warmed."""
    try:
        if index is not None:
            await uncancelled(asyncio.to_thread(index.save_job, asdict(job)))
    except VectorIndexError as error:
        log.warning("the state of a job was not saved: %s", error)


async def uncancelled(work: Awaitable[T]) -> T:
    """Await work to its end. A cancellation meanwhile is raised afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
