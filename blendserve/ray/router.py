"""Ray Serve's request routers for replicas of an engine. They run where requests are sent from."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

from ray.serve.request_router import RequestRouter

from blendserve.ray.cache_reports import CacheReports
from blendserve.routing import Replica, ranked


class ChunkRouter(RequestRouter):  # type: ignore[misc]  # Ray is an extra
    """Sends a request to the replica with most of its chunks in memory, by the rules of blendserve/routing.py."""

    def initialize_state(self, **_: Any) -> None:
        self._reports = CacheReports()

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """One replica a rank: Ray tries the next one where a replica is full."""
        now, keys = time.monotonic(), frozenset[bytes]()
        if pending_request is not None:
            keys = pending_request.kwargs.get("keys", keys)
        found = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._reports.keep(set(found))
        known = [
            Replica(name, self._reports.cached_chunks(name, replica.routing_stats, now), self._load(replica))
            for name, replica in found.items()
        ]
        return [[found[name]] for name in ranked(keys, known)] if known else []

    def _load(self, replica: Any) -> int:
        """Requests as Ray counted them lately, else as the replica reported."""
        counted: int | None = self.replica_queue_len_cache.get(replica.replica_id)
        return replica.routing_stats.get("load", 0) if counted is None else counted


class RoundRobinRouter(RequestRouter):  # type: ignore[misc]
    """Round robin: the baseline of chunk affinity."""

    def initialize_state(self, **_: Any) -> None:
        self._turn = count()

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        ordered = sorted(candidate_replicas, key=lambda replica: str(replica.replica_id.unique_id))
        start = next(self._turn) % max(1, len(ordered))
        return [[replica] for replica in (*ordered[start:], *ordered[:start])]
