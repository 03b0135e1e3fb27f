"""How fast chunks come over a link, from transfers and from probes.

    seconds = round trip + (seconds per token in transfer + seconds per token to decode) * tokens

A probe transfers a small part of a chunk, in a thread of its own: one when an engine opens, and while a link is too slow
or gives nothing, one after a request. Each probe is twice as large as the last one, as a distant link takes a while to
reach its rate. The next one waits for 50 times as long as the last one took, or a minute if that gave nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from blendserve.errors import BlendserveError
from blendserve.store import ChunkKey, KVStore

PROBE_S = 10.0  # minimum time between probes
PROBE_PAUSE = 50.0  # times what a probe took
DEAD_LINK_S = 60.0  # after a probe that gave nothing
MIN_PROBE_BYTES, MAX_PROBE_BYTES = 1 << 19, 1 << 24
MEAN_WEIGHT = 0.5  # of the last sample in a running mean


class TokenRate:
    """Running mean of seconds per token."""

    def __init__(self) -> None:
        self.seconds_per_token: float | None = None

    def record(self, seconds: float, tokens: int) -> None:
        if tokens:
            known, new = self.seconds_per_token, seconds / tokens
            self.seconds_per_token = new if known is None else (1 - MEAN_WEIGHT) * known + MEAN_WEIGHT * new


class LinkEstimator:
    """Estimates transfer times from a store's remote part. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self.clock = clock
        self._transfer, self._decoding = TokenRate(), TokenRate()
        self._round_trip = 0.0
        self._next_probe = 0.0
        self._probing: threading.Thread | None = None
        self._probe_bytes = MIN_PROBE_BYTES
        self._lock = threading.Lock()

    def record(self, seconds: float, tokens: int) -> None:
        """Transferring so many tokens' KV took so many seconds."""
        with self._lock:
            self._transfer.record(max(0.0, seconds - self._round_trip), tokens)

    def record_decoding(self, seconds: float, tokens: int) -> None:
        with self._lock:
            self._decoding.record(seconds, tokens)

    def seconds(self, tokens: int) -> float | None:
        """Time to transfer and decode so many tokens' KV; None before the first transfer."""
        rate, decoding = self._transfer.seconds_per_token, self._decoding.seconds_per_token or 0.0
        return None if rate is None else self._round_trip + (rate + decoding) * tokens

    def probe_later(self, store: KVStore, keys: Sequence[ChunkKey]) -> None:
        """Probe with these chunks in a thread of its own, if a probe is due."""
        with self._lock:
            if not keys or self.clock() < self._next_probe:
                return
            self._next_probe = self.clock() + PROBE_S
            self._probing = threading.Thread(target=self._probed, args=(store, keys), daemon=True)
        self._probing.start()

    def wait(self) -> None:
        """Wait until no probe is under way."""
        if self._probing:
            self._probing.join()

    def probe(self, store: KVStore, keys: Sequence[ChunkKey]) -> bool:
        """Transfer a part of the first of these that another machine has -> whether the store answered."""
        with suppress(BlendserveError):  # the store logs its own failures
            if sample := store.sample(keys, self._probe_bytes):
                with self._lock:
                    self._round_trip = sample.round_trip
                    self._transfer.record(sample.seconds_per_token * sample.tokens, sample.tokens)
            return True
        return False

    def _probed(self, store: KVStore, keys: Sequence[ChunkKey]) -> None:
        start = self.clock()
        answered = self.probe(store, keys)
        elapsed_s = self.clock() - start
        with self._lock:
            self._next_probe = start + max(PROBE_S, PROBE_PAUSE * elapsed_s if answered else DEAD_LINK_S)
            self._probe_bytes = min(2 * self._probe_bytes, MAX_PROBE_BYTES)
