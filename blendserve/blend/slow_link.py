"""Is what another machine stores worth fetching? Method "auto" leaves it there while computing it would be quicker.

    fetching = round trip + (seconds a token on the way + seconds a token to decode) * tokens that are far
    worth it = fetching + cost model with them < a little less than the cost model without them

What is known of a link comes from the fetches so far and from samples: a small part of a chunk, read in a thread of its
own. The first one is taken when an engine opens; while a link is too slow, or nothing comes, one behind a request now
and then, so that it is seen when that ends. A sample is twice as large as the last one, as a far link takes a while to
come to its rate, and the link is left alone after it for fifty times as long as it took; for a minute if nothing came,
which was no burden to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from blendserve.blend.cost import EXACT_FAVOUR, LoadRate
from blendserve.errors import BlendserveError
from blendserve.store import ChunkKey, KVStore

PROBE_S = 10.0  # between samples, at least
PEACE = 50.0  # times what a sample took
DEAD_S = 60.0  # after one that did not come
LEAST_BYTES, MOST_BYTES = 1 << 19, 1 << 24  # of a sample


class Link:
    """How fast chunks come from a store's remote part. Safe to share between threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self.clock = clock
        self._rate, self._decoding = LoadRate(), LoadRate()
        self._round_trip = 0.0
        self._next_probe = 0.0
        self._probing: threading.Thread | None = None
        self._sample_bytes = LEAST_BYTES
        self._lock = threading.Lock()

    def record(self, seconds: float, tokens: int) -> None:
        """So many tokens' KV was waited for."""
        with self._lock:
            self._rate.record(max(0.0, seconds - self._round_trip), tokens)

    def decoded(self, seconds: float, tokens: int) -> None:
        """So many fetched tokens' KV was read from memory, checked and decoded."""
        with self._lock:
            self._decoding.record(seconds, tokens)

    def seconds(self, tokens: int) -> float | None:
        """What fetching so many tokens' KV would take, and decoding it; None while nothing was fetched."""
        rate, decoding = self._rate.seconds_per_token, self._decoding.seconds_per_token or 0.0
        return None if rate is None else self._round_trip + (rate + decoding) * tokens

    def probe(self, store: KVStore, keys: Sequence[ChunkKey]) -> None:
        """Take a sample of these, in a thread of its own, unless that was done a moment ago."""
        with self._lock:
            if not keys or self.clock() < self._next_probe:
                return
            self._next_probe = self.clock() + PROBE_S
            self._probing = threading.Thread(target=self._probed, args=(store, keys), daemon=True)
        self._probing.start()

    def wait(self) -> None:
        """Until no sample is under way."""
        if self._probing:
            self._probing.join()

    def sample(self, store: KVStore, keys: Sequence[ChunkKey]) -> bool:
        """See how far the first of these is that another machine has -> False where that could not be seen."""
        with suppress(BlendserveError):  # a failure is the store's to tell
            if found := store.sample(keys, self._sample_bytes):
                with self._lock:
                    self._round_trip = found.round_trip
                    self._rate.record(found.seconds_per_token * found.tokens, found.tokens)
            return True
        return False

    def _probed(self, store: KVStore, keys: Sequence[ChunkKey]) -> None:
        start = self.clock()
        came = self.sample(store, keys)
        elapsed_s = self.clock() - start
        with self._lock:
            self._next_probe = start + max(PROBE_S, PEACE * elapsed_s if came else DEAD_S)
            self._sample_bytes = min(2 * self._sample_bytes, MOST_BYTES)


def worth_fetching(fetching: float, with_them: float, without: float) -> bool:
    """Whether fetched chunks save time; computing is favoured a little, as it is exact."""
    return fetching + with_them < EXACT_FAVOUR * without


def reason(fetching: float, worth: float) -> str:
    """Why chunks were not asked for."""
    return f"fetching was estimated to take {fetching * 1e3:.0f} ms, and to save {worth * 1e3:.0f} ms"
