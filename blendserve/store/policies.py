"""Whether a chunk computed on demand is worth the chunks that would have to go for it.

Only asked at the cap: while there is room everything is stored, and pinned chunks are never asked about.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import xxhash

from blendserve.store.eviction import Held
from blendserve.store.key import ChunkKey


class Admission(Protocol):
    """Sees every request for a chunk, decides at the cap."""

    def saw(self, key: ChunkKey) -> None:
        """A request asked for this chunk, whether it was there or not."""
        ...

    def admits(self, key: ChunkKey, n_bytes: int, victims: Sequence[Held], n_chunks: int) -> bool:
        """Whether to store the chunk at the price of the victims; `n_chunks` are in the store now."""
        ...


class Always:
    """Everything is let in: the plain variant. One pass over novel chunks then flushes the store."""

    def saw(self, key: ChunkKey) -> None:
        pass

    def admits(self, key: ChunkKey, n_bytes: int, victims: Sequence[Held], n_chunks: int) -> bool:
        return True


class TinyLFU:
    """Let in what was asked for more often than what would go (Einziger, Friedman, Manes: TinyLFU, 1512.00727).

    How often is an estimate over the last requests, in constant memory: a count-min sketch of four rows whose
    counters saturate at 15, behind a doorkeeper (a Bloom filter that holds whatever was asked for once). After ten
    requests per stored chunk all counters are halved and the doorkeeper is emptied, so that fame fades.

    Chunks differ in size, and a hit saves work in proportion to it; so what is compared is frequency x bytes, of the
    chunk against the sum over its victims. Ties keep what is there. Kept in this process only: after a restart
    nothing is known of either side, and a chunk asked for once more than its victims is let in.
    """

    ROWS, WIDTH, TOP = 4, 1 << 15, 15

    def __init__(self, seed: int | None = None) -> None:
        self._seed = (
            random.getrandbits(64) if seed is None else seed
        )  # so that no tenant can aim at a counter
        self._counts = np.zeros((self.ROWS, self.WIDTH), dtype=np.uint8)
        self._door = np.zeros(self.WIDTH, dtype=bool)
        self._sample, self._seen = 1000, 0
        self._lock = threading.Lock()

    def saw(self, key: ChunkKey) -> None:
        with self._lock:
            self._seen += 1
            if self._seen >= self._sample:
                self._age()
            at = self._slots(key)
            if self._door[at].all():
                counts = self._counts[self._rows, at]
                self._counts[self._rows, at] = np.where(
                    counts == counts.min(), np.minimum(counts + 1, self.TOP), counts
                )
            else:
                self._door[at] = True

    def admits(self, key: ChunkKey, n_bytes: int, victims: Sequence[Held], n_chunks: int) -> bool:
        with self._lock:
            self._sample = max(1000, 10 * n_chunks)
            price = sum(self._frequency(held.key) * held.n_bytes for held in victims)
            return self._frequency(key) * n_bytes > price

    def frequency(self, key: ChunkKey) -> int:
        """About how often the chunk was asked for lately, at least that often unless it aged."""
        with self._lock:
            return self._frequency(key)

    _rows = np.arange(ROWS)

    def _frequency(self, key: ChunkKey) -> int:
        at = self._slots(key)
        return int(self._counts[self._rows, at].min()) + int(self._door[at].all())

    def _slots(self, key: ChunkKey) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        digest = xxhash.xxh3_128_digest(key, self._seed)
        return np.frombuffer(digest, dtype=np.uint32) % self.WIDTH

    def _age(self) -> None:
        self._counts >>= 1
        self._door[:] = False
        self._seen = 0


ADMISSIONS: dict[str, type[TinyLFU] | type[Always]] = {"tinylfu": TinyLFU, "always": Always}
