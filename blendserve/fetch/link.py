"""Estimates a link and decoding: the rate, the round trip, decode times by level, and when to probe.

    seconds = round trip + bytes / rate + decoding

The rate excludes the round trip, in which nothing can arrive, and the time between transfers. A probe transfers a part
of a chunk in its own thread. When an engine opens, probes run until one takes long enough to be measured. Later, a probe
follows a request whose chunks did not arrive, or for which the link was too slow. Each probe is twice as large as the
last, as a distant link takes a while to reach its rate. The next one waits 50 times as long as the last took, or a
minute after a failed one.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from blendserve.errors import BlendserveError
from blendserve.fetch.plan import LinkState
from blendserve.store.base import ReadTime
from blendserve.store.clock import TimeSource

PROBE_S = 10.0  # minimum time between probes
PROBE_PAUSE = 50.0  # times the duration of a probe
DEAD_LINK_S = 60.0  # after a probe that gave nothing
MIN_PROBE_BYTES, MAX_PROBE_BYTES = 1 << 19, 1 << 24
SURE_S = 0.05  # of transfer, and the round trip: a shorter probe shows how a transfer starts, not the rate
WINDOW_S = 0.15  # of transfer that the rate is measured over
STALL_FIRST = 4.0  # times the patience, before the first byte and beside a prefill
MEAN_WEIGHT = 0.5  # of the last sample in a running mean


class TokenRate:
    """Running mean of an amount per token, such as seconds or bytes."""

    def __init__(self) -> None:
        self.per_token: float | None = None

    def record(self, amount: float, tokens: int) -> None:
        if tokens:
            known = self.per_token
            new = amount / tokens
            self.per_token = new if known is None else (1 - MEAN_WEIGHT) * known + MEAN_WEIGHT * new


class LinkEstimator:
    """One link. Thread-safe."""

    def __init__(self, clock: TimeSource = time, window_s: float = WINDOW_S) -> None:
        self.clock = clock
        self._window_s = window_s
        self.round_trip_s = 0.0
        self.n_bytes = 0  # that have arrived, of all transfers
        self.last_rate: float | None = None  # of the last chunk that came whole
        self._decode_s = defaultdict[str, TokenRate](TokenRate)  # a token, by level
        self._transfers = 0
        self._since = 0.0
        self._busy_s = 0.0  # busy seconds up to `since`
        self._pieces: deque[tuple[float, int]] = deque()  # busy seconds at their arrival, and bytes
        self._from_s = 0.0  # busy seconds that the pieces are counted from
        self._next_probe = float("-inf")
        self._probe_bytes = MIN_PROBE_BYTES
        self._probing: threading.Thread | None = None
        self._lock = threading.Lock()

    # Transfers

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Count a transfer inside the block: from the request to the end of its body."""
        with self._lock:
            self._tick()
            if not self._transfers:
                self._since += self.round_trip_s
            self._transfers += 1
        try:
            yield
        finally:
            with self._lock:
                self._tick()
                self._transfers -= 1

    def arrived(self, n_bytes: int) -> None:
        """Count bytes of any transfer that have arrived."""
        with self._lock:
            self._tick()
            self.n_bytes += n_bytes
            self._pieces.append((self._busy_s, n_bytes))
            while len(self._pieces) > 1 and self._pieces[0][0] < self._busy_s - self._window_s:
                self._from_s = self._pieces.popleft()[0]

    def forget_rate(self) -> None:
        """Forget the rate of a link that stood still."""
        with self._lock:
            self._tick()
            self._pieces.clear()
            self._from_s = self._busy_s

    @property
    def rate(self) -> float | None:
        """Bytes a second over the last moments of transfer; None while unknown. Silence within a transfer counts."""
        with self._lock:
            self._tick()
            seconds = self._busy_s - self._from_s
            n_bytes = sum(n for _, n in self._pieces)
            return n_bytes / seconds if n_bytes and seconds > 0 else None

    @property
    def state(self) -> LinkState:
        """Return what is known of the link now."""
        return LinkState(self.rate, self.last_rate, self.round_trip_s, self.decode_s)

    def _tick(self) -> None:
        now = self.clock.monotonic()
        if self._transfers:
            self._busy_s += max(0.0, now - self._since)
            self._since = max(now, self._since)
        else:
            self._since = now

    # Decoding

    def record_decoding(self, level: str, seconds: float, tokens: int) -> None:
        """Record that these tokens at this level were decoded in this time."""
        self._decode_s[level].record(seconds, tokens)

    def decode_s(self, level: str) -> float:
        """Return the seconds per token; 0 where it was not measured."""
        return self._decode_s[level].per_token or 0.0

    # Probes

    def probe_now(self, probe: Callable[[int], ReadTime | None]) -> None:
        """Transfer growing parts of a chunk, at least two; the last one counts.

        probe: transfers this number of bytes, fewer if the chunk has no more. Raises its BlendserveErrors.
        """
        n_bytes = MIN_PROBE_BYTES
        while sample := self._sample(probe, n_bytes):
            transfer_s = sample.seconds - sample.round_trip_s
            is_sure = n_bytes > MIN_PROBE_BYTES and transfer_s >= max(SURE_S, sample.round_trip_s)
            if is_sure or sample.n_bytes < n_bytes or n_bytes >= MAX_PROBE_BYTES:
                return
            n_bytes *= 2

    def _sample(self, probe: Callable[[int], ReadTime | None], n_bytes: int) -> ReadTime | None:
        sample = probe(n_bytes)
        if sample:
            with self._lock:
                self.round_trip_s = sample.round_trip_s
                self._tick()
                self._pieces.clear()
                self._from_s = self._busy_s
                self._busy_s += max(1e-9, sample.seconds - sample.round_trip_s)
                self._pieces.append((self._busy_s, sample.n_bytes))
        return sample

    def probe_later(self, probe: Callable[[int], ReadTime | None]) -> None:
        """Probe in a thread, if a probe is due."""
        with self._lock:
            if self.clock.monotonic() < self._next_probe:
                return
            self._next_probe = self.clock.monotonic() + PROBE_S
            self._probing = threading.Thread(target=self._probe, args=(probe,), daemon=True)
        self._probing.start()

    def wait(self) -> None:
        """Wait until no probe runs."""
        if self._probing:
            self._probing.join()

    def _probe(self, probe: Callable[[int], ReadTime | None]) -> None:
        start = self.clock.monotonic()
        answered = True
        try:
            self._sample(probe, self._probe_bytes)
        except BlendserveError:  # the source logs its own failures
            answered = False
        elapsed_s = self.clock.monotonic() - start
        with self._lock:
            self._next_probe = start + max(PROBE_S, PROBE_PAUSE * elapsed_s if answered else DEAD_LINK_S)
            self._probe_bytes = min(2 * self._probe_bytes, MAX_PROBE_BYTES)


class StallDetector:
    """Notices that no byte arrives over a link, from looks at any times. Thread-safe.

    A process that was suspended finds what came meanwhile when it goes on. So one look counts at most a quarter of the
    patience.
    """

    def __init__(self, link: LinkEstimator) -> None:
        self._link = link
        self._n_bytes = link.n_bytes
        self._looked_s = link.clock.monotonic()
        self._is_first = True  # no byte has come yet
        self.silent_s = 0.0
        self._lock = threading.Lock()

    def is_stalled(self, patience_s: float, is_hidden: bool) -> bool:
        """Whether no byte came for so long: STALL_FIRST times that before the first one, and if a prefill hides it."""
        with self._lock:
            now = self._link.clock.monotonic()
            n_bytes = self._link.n_bytes
            if n_bytes != self._n_bytes:
                self._n_bytes = n_bytes
                self.silent_s = 0.0
                self._is_first = False
            else:
                self.silent_s += min(now - self._looked_s, patience_s / 4)
            self._looked_s = now
            return self.silent_s > patience_s * (STALL_FIRST if self._is_first or is_hidden else 1.0)
