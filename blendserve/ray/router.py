"""The request router of Ray Serve for replicas of an engine. It runs in the process that sends the requests."""

from __future__ import annotations

import time
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
        """Replicas in order of preference, one a rank: Ray tries the next rank if a replica is full."""
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
        """Running requests, by Ray's cached count, else by the replica's report."""
        counted: int | None = self.replica_queue_len_cache.get(replica.replica_id)
        return replica.routing_stats.get("load", 0) if counted is None else counted
