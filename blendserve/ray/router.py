"""The request router of Ray Serve for replicas of an engine. It runs in the process that sends the requests."""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import RequestRouter

from blendserve.ray.replica import CacheReports
from blendserve.routing import Replica, ranked


class ChunkRouter(RequestRouter):  # type: ignore[misc]  # Ray is an extra
    """Sends a request to the replica with most of its chunks in memory, by the rules of blendserve/routing.py."""

    def initialize_state(self, **_: Any) -> None:
        self._reports = CacheReports()

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Replicas in order of preference, one a rank: Ray tries the next rank if a replica is full."""
        arguments = pending_request.args if pending_request else ()
        keys: frozenset[bytes] = next((request.keys for request in arguments), frozenset())
        found = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        reports = {name: replica.routing_stats for name, replica in found.items()}
        cached = self._reports.cached_chunks(reports, time.monotonic())
        # Running requests by Ray's cached count, else by the replica's report
        counts = {
            name: self.replica_queue_len_cache.get(replica.replica_id) for name, replica in found.items()
        }
        loads = {n: reports[n].get("load", 0) if count is None else count for n, count in counts.items()}
        known = [Replica(name, cached[name], loads[name]) for name in found]
        return [[found[name]] for name in ranked(keys, known)] if known else []
