"""Is what another machine stores worth fetching? Method "auto" leaves it there while computing it would be quicker.

    fetching = seconds a token by the fetches so far * tokens that are far
    worth it = cost model without them - cost model with them

While a link is too slow, one chunk is fetched beside a request now and then, so that it is seen when that ends. What is
fetched counts with its round trip: for a single chunk that is dearer than for many in one go, never cheaper.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from blendserve.blend.cost import LoadRate
from blendserve.errors import BlendserveError
from blendserve.store import ChunkKey, KVStore
from blendserve.store.base import REMOTE

PROBE_S = 10.0  # between chunks that are fetched to see how fast the link is


class Link:
    """How fast chunks come from a store's remote part. Safe to share between threads."""

    def __init__(self) -> None:
        self._rate = LoadRate()
        self._next_probe = 0.0
        self._lock = threading.Lock()

    def record(self, seconds: float, tokens: int) -> None:
        """So many tokens' KV was waited for."""
        with self._lock:
            self._rate.record(seconds, tokens)

    def seconds(self, tokens: int) -> float | None:
        """What fetching so many tokens' KV would take; None while nothing was fetched."""
        rate = self._rate.seconds_per_token
        return None if rate is None else rate * tokens

    def probe(self, store: KVStore, keys: Sequence[ChunkKey]) -> None:
        """Fetch the first of these that is there, in a thread of its own, unless that was done a moment ago."""
        with self._lock:
            if not keys or time.monotonic() < self._next_probe:
                return
            self._next_probe = time.monotonic() + PROBE_S
        threading.Thread(target=self._fetch, args=(store, keys), daemon=True).start()

    def _fetch(self, store: KVStore, keys: Sequence[ChunkKey]) -> None:
        with suppress(BlendserveError), store.reading() as snapshot:  # a failure is the store's to tell
            for key in keys:
                start = time.perf_counter()
                view = snapshot.get(key)
                if view is not None and snapshot.tier(key) == REMOTE:
                    self.record(time.perf_counter() - start, view.n_tokens)
                    return


def reason(fetching: float, worth: float) -> str:
    """Why chunks were not asked for."""
    return f"fetching was estimated to take {fetching * 1e3:.0f} ms, and to save {worth * 1e3:.0f} ms"
