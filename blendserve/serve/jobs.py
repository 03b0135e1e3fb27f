"""Work that a client does not wait for: documents on their way into the index and the store."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from blendserve.errors import BlendserveError, Busy, NotFound

MAX_JOBS = 1000  # remembered; and the most that may run at a time is a tenth
MAX_RUNNING = 8  # of one namespace: each holds the body that it was started with

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """What `GET /v1/jobs/{id}` tells. Filled by whoever does it."""

    id: str
    namespace: str
    kind: str
    state: str = "running"  # running | done | failed
    given: int = 0  # documents to be added
    documents: int = 0  # added so far
    chunks: int = 0  # whose KV is wanted
    computed: int = 0  # of those, how many are in the store
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        del values["namespace"]
        return values


class Jobs:
    """The jobs of all tenants. Used by the event loop alone; they end with the process."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, namespace: str, kind: str, run: Callable[[Job], Awaitable[None]], given: int = 0) -> Job:
        """Begin a job. Raises Busy when very many run, or some of this namespace."""
        theirs = sum(job.namespace == namespace and job.state == "running" for job in self._jobs.values())
        if theirs >= MAX_RUNNING or len(self._tasks) >= MAX_JOBS // 10:
            raise Busy(f"{theirs} of your jobs and {len(self._tasks)} in all are running already", 10)
        job = Job(f"job-{uuid.uuid4().hex}", namespace, kind, given=given)
        self._jobs[job.id] = job
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        task = asyncio.ensure_future(_supervised(job, run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    def get(self, namespace: str, job_id: str) -> Job:
        """Raises NotFound, also for another namespace's."""
        job = self._jobs.get(job_id)
        if job is None or job.namespace != namespace:
            raise NotFound(f"there is no job {job_id!r}")
        return job

    def of(self, namespace: str) -> list[Job]:
        """A namespace's, the latest first."""
        return [job for job in reversed(self._jobs.values()) if job.namespace == namespace]

    def cancel(self) -> None:
        """End all that run."""
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
        job.state, job.error = "failed", "the server made a mistake: its log has more"
