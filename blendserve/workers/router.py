"""Ray Serve's request routers for replicas of an engine. They run where requests are sent from."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

from ray.serve.request_router import RequestRouter

from blendserve.routing import Replica, ranked
from blendserve.workers.hot_sets import HotSets


class ChunkRouter(RequestRouter):  # type: ignore[misc]  # Ray is an extra
    """Sends a request where most of its chunks are hot, as blendserve/routing.py says."""

    def initialize_state(self, **_: Any) -> None:
        self._hot = HotSets()

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """One replica a rank: the next one is asked where one refuses, as it has as many requests as it takes."""
        now, keys = time.monotonic(), frozenset[bytes]()
        if pending_request is not None:
            keys = pending_request.kwargs.get("keys", keys)
        found = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._hot.keep(set(found))
        known = [
            Replica(name, self._hot.of(name, replica.routing_stats, now), self._load(replica))
            for name, replica in found.items()
        ]
        return [[found[name]] for name in ranked(keys, known)] if known else []

    def _load(self, replica: Any) -> int:
        """As counted here, where that is fresh, else as the replica said."""
        counted: int | None = self.replica_queue_len_cache.get(replica.replica_id)
        return replica.routing_stats.get("load", 0) if counted is None else counted


class RoundRobinRouter(RequestRouter):  # type: ignore[misc]
    """One after the other, whatever is where: what chunk affinity is measured against."""

    def initialize_state(self, **_: Any) -> None:
        self._turn = count()

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        ordered = sorted(candidate_replicas, key=lambda replica: str(replica.replica_id.unique_id))
        start = next(self._turn) % max(1, len(ordered))
        return [[replica] for replica in (*ordered[start:], *ordered[:start])]
