"""A missing chunk is computed once: by one thread of a process, and by one of the processes that share a store.

Who computes a chunk claims it first. A claim on what others share is a lease (KVStore.lease) that ends by itself, so that
nobody waits for the dead; it lasts some times as long as computing is expected to take.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from blendserve.store import ChunkKey, KVStore

LEAST_LEASE_S = 30.0
LEASE_MARGIN = 4.0  # times what computing is expected to take: the owner has other work, too
LEAST_PATIENCE_S = 1.0
FIRST_GUESS = 0.02  # seconds a token, until one has been computed
MEMORY = 0.5  # weight of the last run in the mean


class SingleFlight:
    """The claims of a process. Safe to share between threads."""

    def __init__(self) -> None:
        self._claims: set[ChunkKey] = set()
        self._per_token = FIRST_GUESS
        self._lock = threading.Lock()

    def claim(self, store: KVStore, tokens: Mapping[ChunkKey, int]) -> set[ChunkKey]:
        """Of these chunks, by their tokens, those that are the caller's to compute for the store now; `release` each.

        Raises StoreError; then none is claimed.
        """
        with self._lock:
            asked = [key for key in tokens if key not in self._claims]
            self._claims.update(asked)  # keeps the places while the store is asked
            expected = self._per_token * sum(tokens[key] for key in asked)
        granted: set[ChunkKey] = set()
        try:
            granted = store.lease(asked, max(LEAST_LEASE_S, LEASE_MARGIN * expected)) if asked else set()
        finally:
            with self._lock:
                self._claims.difference_update(key for key in asked if key not in granted)
        return granted

    def release(self, store: KVStore, keys: Iterable[ChunkKey]) -> None:
        """They are stored, or given up; harmless where there is no claim."""
        with self._lock:
            held = [key for key in keys if key in self._claims]
            self._claims.difference_update(held)
        if held:
            store.release(held)

    def took(self, seconds: float, n_tokens: int) -> None:
        """So many tokens were computed in so many seconds."""
        if n_tokens:
            self._per_token += MEMORY * (seconds / n_tokens - self._per_token)

    def patience(self, n_tokens: int) -> float:
        """Seconds that it is worth to wait for others' chunks: what computing them would take."""
        return max(LEAST_PATIENCE_S, self._per_token * n_tokens)
