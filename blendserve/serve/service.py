"""The service with a model in this process: retrieval, queueing and answering, independent of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial

from blendserve.config import ServeConfig
from blendserve.engine.batch_engine import BatchEngine
from blendserve.engine.engine import Engine
from blendserve.engine.fair_executor import BackgroundThrottle, FairExecutor
from blendserve.engine.generate import Sequence
from blendserve.engine.library import Documents, Library
from blendserve.engine.request import Event
from blendserve.retrieve import VectorIndex
from blendserve.serve.asking import Answering, Ask, Asking
from blendserve.serve.jobs import Jobs
from blendserve.serve.keys import Tenant
from blendserve.serve.limits import counted
from blendserve.serve.metrics import Metrics
from blendserve.timing import Clock


class Service(Asking):
    """One engine and its collections. Raises ModelUnsupported for a reader that fails the gate."""

    def __init__(self, engine: Engine, library: Library, serve: ServeConfig) -> None:
        metrics = Metrics()
        self.engine, self.jobs = engine, Jobs()
        self.batch = BatchEngine(engine, metrics, **serve.batching)
        self.scheduler, self.slot_tokens = self.batch.scheduler, self.batch.pool.n_tokens
        super().__init__(engine.config, library, serve, metrics, engine.reader)
        metrics.watch(lambda: self.scheduler.load, serve.slots, engine.fetcher)
        self._preparing: Counter[str] = Counter()
        engine.prompts.between = self.retrieval.give_way
        for index in library.collections.values():
            index.embedder.set_yield_point(self.retrieval.give_way)

    def _retrieval(self) -> FairExecutor:
        scheduler, serve = self.scheduler, self.serve
        return FairExecutor(
            "retrieval",
            serve.queue,
            BackgroundThrottle(serve.background_share),
            lambda: scheduler.in_flight,
            scheduler.has_other_tenants,
        )

    @property
    def alive(self) -> bool:
        return self.scheduler.alive

    def start(self) -> None:
        """Start the model's thread."""
        self.scheduler.start()

    def drain(self) -> None:
        self.scheduler.drain()

    def stopping(self) -> None:
        self.jobs.cancel()

    def close(self) -> None:
        """End the threads; the engine is its opener's to close."""
        self.scheduler.stop()
        super().close()

    async def ask(self, tenant: Tenant, ask: Ask) -> Answering:
        """Retrieve, lay out and queue. Raises InputError, NotFound, Busy, Stopping and other BlendserveErrors."""
        self.scheduler.refuse_if_full(tenant.name, self._preparing[tenant.name])
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def emit(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        clock = Clock()
        with counted(self._preparing, tenant.name), self.scheduler.preparing(tenant.name):
            request = await self.on_retrieval(tenant, self._planned, tenant, ask, emit, clock)
            self.scheduler.submit(request)
        return Answering(request.plan, _drained(events), partial(self.scheduler.cancel, request))

    def documents(self, index: VectorIndex) -> Documents:
        """Those of a collection, whose KV may lie in every key's namespace. For the thread that may touch indexes."""
        namespaces = self.batch.namespaces | (self.keys.namespaces() if self.keys else set())
        others = [other for other in self.library.collections.values() if other is not index]
        return Documents(index, self.engine.prompts, [self.batch.blender(n) for n in namespaces], others)

    def _planned(self, tenant: Tenant, ask: Ask, emit: Callable[[Event], None], clock: Clock) -> Sequence:
        """What takes checking, searching and tokenising."""
        search = partial(self.search, tenant, ask.collections)
        plan = self.engine.plan(ask.seeded(), search, clock, self.slot_tokens)
        return self.batch.sequence(plan, emit, tenant.name, tenant.namespace)


async def _drained(events: asyncio.Queue[Event]) -> AsyncIterator[Event]:
    while True:
        yield await events.get()
