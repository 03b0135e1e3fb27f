"""Background jobs: adding documents, warming and fetching chunk KV."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from blendserve.errors import BlendserveError, Busy, NotFound

MAX_JOBS = 1000  # remembered; at most a tenth of them run concurrently
MAX_RUNNING = 8  # per namespace: each job holds the body of its request

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """The state of a job, as `GET /v1/jobs/{id}` returns it. The job updates it."""

    id: str
    namespace: str
    kind: str
    state: str = "running"  # running | done | failed
    given: int = 0  # documents to add
    documents: int = 0  # added so far
    chunks: int = 0  # to compute or fetch
    computed: int = 0  # chunks that are in the store
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        del values["namespace"]
        return values


class Jobs:
    """The jobs of all tenants. Used by the event loop only; they end with the process."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, namespace: str, kind: str, run: Callable[[Job], Awaitable[None]], given: int = 0) -> Job:
        """Start a job. Raises Busy if too many run, in total or in this namespace."""
        theirs = sum(job.namespace == namespace and job.state == "running" for job in self._jobs.values())
        if theirs >= MAX_RUNNING or len(self._tasks) >= MAX_JOBS // 10:
            raise Busy(
                f"too many jobs are running: {theirs} of this namespace, {len(self._tasks)} in total", 10
            )
        job = Job(f"job-{uuid.uuid4().hex}", namespace, kind, given=given)
        self._jobs[job.id] = job
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        task = asyncio.ensure_future(_supervised(job, run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    def get(self, namespace: str, job_id: str) -> Job:
        """A job by id. Raises NotFound, also for a job of another namespace."""
        job = self._jobs.get(job_id)
        if job is None or job.namespace != namespace:
            raise NotFound(f"there is no job {job_id!r}")
        return job

    def of(self, namespace: str) -> list[Job]:
        """The jobs of a namespace, newest first."""
        return [job for job in reversed(self._jobs.values()) if job.namespace == namespace]

    def cancel(self) -> None:
        """Cancel all running jobs."""
        for task in self._tasks:
            task.cancel()


async def _supervised(job: Job, run: Callable[[Job], Awaitable[None]]) -> None:
    try:
        await run(job)
        job.state = "done"
    except BlendserveError as error:
        job.state, job.error = "failed", str(error)
    except asyncio.CancelledError:
        job.state, job.error = "failed", "the server has shut down"
        raise
    except Exception:
        log.exception("a job failed")
        job.state, job.error = "failed", "internal server error: see the server's log"
