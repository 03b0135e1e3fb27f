"""One replica: an engine with its scheduler in its own process; it answers prompts that the ingress laid out.

Routers choose replicas by their reports of cached chunks and load.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from blendserve.config import ServeConfig
from blendserve.engine.batch_engine import BatchEngine
from blendserve.engine.engine import Engine
from blendserve.engine.generate import TokenSequence
from blendserve.engine.request import Completed, Event, Failed, PreparedRequest
from blendserve.errors import BlendserveError
from blendserve.ray.cluster import bind_to_loopback
from blendserve.serve.engine_client import event_queue
from blendserve.serve.metrics import Metrics

REPORT_EXPIRY_S = 10.0  # older reports are ignored


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A laid-out request for a replica, its owner, and the keys of its chunks, for the router."""

    prepared: PreparedRequest
    keys: frozenset[bytes] = frozenset()
    tenant: str = ""
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the ingress needs to know of the model: names of chunks and limits of prompts."""

    name: str
    fingerprint: str
    dtype: str
    n_kv_layers: int
    recurrent: frozenset[int]
    max_tokens: int  # of a request's prompt and answer


class EngineReplica:
    """The deployment's class."""

    def __init__(self, open_engine: Callable[[], Engine], config: ServeConfig) -> None:
        """open_engine: picklable; needs no index. config: without keys."""
        bind_to_loopback()
        with ExitStack() as opened:
            self._engine = opened.enter_context(open_engine())
            self._batch = BatchEngine(self._engine, Metrics(), config)  # unread: the ingress counts
            self._batch.scheduler.start()
            opened.pop_all()
        self._version = 0

    def facts(self) -> ModelFacts:
        """The facts of the replica's model."""
        model = self._engine.model
        decoder = model.decoder
        n_tokens = self._batch.pool.n_tokens
        layers = decoder.n_kv_layers, decoder.recurrent
        return ModelFacts(model.name, model.fingerprint, str(decoder.dtype), *layers, n_tokens)

    def record_routing_stats(self) -> dict[str, Any]:
        """The report that Ray Serve collects for routers: chunks in memory and load."""
        self._version += 1
        load = sum(self._batch.scheduler.load)
        return {"cached_chunks": self._engine.fetcher.resident(), "load": load, "version": self._version}

    def check_health(self) -> None:
        """Raises RuntimeError if the scheduler's thread has ended: Ray Serve then replaces this replica."""
        if not self._batch.scheduler.alive:
            raise RuntimeError("the model's thread has ended")

    async def answer(self, request: RoutedRequest) -> AsyncIterator[Event]:
        """PrefillDone, pieces of text, then Completed or Failed."""
        emit, events = event_queue()
        sequence: TokenSequence | None = None
        try:
            owner = request.tenant, request.namespace
            sequence = await asyncio.to_thread(self._batch.sequence, request.prepared, emit, *owner)
            self._batch.scheduler.submit(sequence)
            async for event in events:
                yield event
                if isinstance(event, Completed | Failed):
                    return
        except BlendserveError as error:  # such as RateLimited: sent like a later error
            yield Failed(error)
        finally:
            if sequence:
                self._batch.scheduler.cancel(sequence)


class CacheReports:
    """The age of each replica's report. It counts from the arrival here: clocks of other machines are not read."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}  # replica -> version of its report, and its arrival

    def cached_chunks(
        self, reports: Mapping[str, Mapping[str, Any]], now: float
    ) -> dict[str, frozenset[bytes]]:
        """Keys of the chunks in each replica's memory; none if its report is too old. Forgets other replicas."""
        before, self._seen = self._seen, {}
        for name, report in reports.items():
            version = report.get("version", 0)
            known = before.get(name)
            self._seen[name] = known if known and known[0] == version else (version, now)
        recent = {name for name, (_, arrival) in self._seen.items() if now - arrival <= REPORT_EXPIRY_S}
        return {
            n: r.get("cached_chunks", frozenset()) if n in recent else frozenset() for n, r in reports.items()
        }
