"""One replica: an engine with its scheduler in its own process; it answers prompts that the ingress laid out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from blendserve.config import BlendConfig, DecodeConfig
from blendserve.core import BlendReport, Passage, Prompt
from blendserve.engine.batch_engine import BatchEngine
from blendserve.engine.engine import Engine
from blendserve.engine.generate import Sequence
from blendserve.engine.request import Event, Failed, Finished, Plan
from blendserve.errors import BlendserveError
from blendserve.ray.cluster import bind_to_loopback
from blendserve.serve.engine_client import event_queue
from blendserve.timing import Clock


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A laid-out request for a replica."""

    prompt: Prompt
    passages: tuple[Passage, ...]
    blend: BlendConfig
    decode: DecodeConfig
    tenant: str
    namespace: str
    seconds: float  # since the request arrived
    retrieve: float  # of them, spent on the search

    def plan(self) -> Plan:
        """As an engine takes it."""
        clock = Clock()
        clock.set_back(self.seconds, retrieve=self.retrieve)
        return Plan(self.prompt, self.passages, self.blend, self.decode, clock)


@dataclass(frozen=True, slots=True)
class ReaderFacts:
    """What the ingress needs to know of the model: names of chunks and limits of prompts."""

    name: str
    fingerprint: str
    dtype: str
    n_layers: int
    context_limit: int
    slot_tokens: int


class EngineReplica:
    """The deployment's class."""

    def __init__(self, open_engine: Callable[[], Engine], batching: Mapping[str, Any]) -> None:
        """open_engine: picklable; needs no index. batching: arguments of BatchEngine."""
        bind_to_loopback()
        self._engine = open_engine()
        self._batch = BatchEngine(self._engine, _Unobserved(), **batching)
        self._batch.scheduler.start()
        self._version = 0

    def facts(self) -> ReaderFacts:
        """Of its reader."""
        reader, pool = self._engine.reader, self._batch.pool
        adapter = reader.adapter
        dtype, context = str(adapter.dtype), adapter.context_limit
        return ReaderFacts(reader.name, reader.fingerprint, dtype, adapter.n_layers, context, pool.n_tokens)

    def record_routing_stats(self) -> dict[str, Any]:
        """The report that Ray Serve collects for routers: chunks in memory and load."""
        self._version += 1
        return {
            "cached_chunks": self._engine.fetcher.resident(),
            "load": sum(self._batch.scheduler.load),
            "version": self._version,
        }

    def check_health(self) -> None:
        """Raises RuntimeError where the scheduler's thread has ended: Ray Serve then replaces this replica."""
        if not self._batch.scheduler.alive:
            raise RuntimeError("the model's thread has ended")

    async def answer(self, request: RoutedRequest, keys: frozenset[bytes]) -> AsyncIterator[Event]:
        """PrefillDone, pieces, and at last Finished or Failed. keys: of its chunks, for the router."""
        emit, events = event_queue()
        sequence: Sequence | None = None
        try:
            sequence = await asyncio.to_thread(
                self._batch.sequence, request.plan(), emit, request.tenant, request.namespace
            )
            self._batch.scheduler.submit(sequence)
            async for event in events:
                yield event
                if isinstance(event, Finished | Failed):
                    return
        except BlendserveError as error:  # such as RateLimited: sent like a later error
            yield Failed(error)
        finally:
            if sequence:
                self._batch.scheduler.cancel(sequence)


class _Unobserved:
    """The scheduler's observer without metrics: the ingress counts."""

    def dequeued(self, method: str, seconds: float) -> None: ...

    def prefilled(self, report: BlendReport, loading: float) -> None: ...

    def step(self, batch: int) -> None: ...

    def token(self, method: str, seconds: float, first: bool) -> None: ...
