"""Eviction and admission at the cap: which chunks are dropped, and whether a new chunk is worth them.

The least recently used chunks make room. Pinned chunks, such as a precomputed corpus, are never candidates for eviction
and are always admitted. Below the cap every chunk is stored.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash

from blendserve.store.key import ChunkKey


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored chunk that may be evicted."""

    key: ChunkKey
    n_bytes: int


def least_recent(oldest_first: Iterable[Candidate], needed: int) -> list[Candidate] | None:
    """The least recently used chunks, as few as have `needed` bytes together; None if all of them have fewer."""
    chosen: list[Candidate] = []
    for candidate in oldest_first:
        if needed <= 0:
            break
        chosen.append(candidate)
        needed -= candidate.n_bytes
    return chosen if needed <= 0 else None


class Admission(Protocol):
    """Sees every look-up, decides at the cap."""

    def record_access(self, key: ChunkKey) -> None:
        """Count a look-up, hit or miss."""

    def admits(self, key: ChunkKey, n_bytes: int, victims: Sequence[Candidate], n_chunks: int) -> bool:
        """Whether to store the chunk in place of the victims. n_chunks: in the store now."""


class Always:
    """Admits everything. One pass over new chunks then flushes the store."""

    def record_access(self, key: ChunkKey) -> None:
        pass

    def admits(self, key: ChunkKey, n_bytes: int, victims: Sequence[Candidate], n_chunks: int) -> bool:
        return True


class TinyLFU:
    """Admits a chunk that was looked up more often than its victims (Einziger, Friedman, Manes: TinyLFU, 1512.00727).

    The frequency is estimated over the last look-ups in constant memory: a count-min sketch of four rows with counters up
    to 15, behind a doorkeeper (a Bloom filter of the keys that were looked up once). After ten look-ups per stored chunk
    all counters are halved and the doorkeeper is emptied, so that old popularity fades.

    Unlike in the paper, chunks differ in size, and a hit saves work in proportion to it. So frequency x bytes of the
    chunk is compared with the sum over its victims; a tie keeps the victims. The sketch is in this process only: after a
    restart a chunk that was looked up once more than its victims is admitted.
    """

    ROWS = 4
    WIDTH = 1 << 15
    TOP = 15
    _rows = np.arange(ROWS)

    def __init__(self, seed: int | None = None) -> None:
        """seed: of the hashes. Random by default, so that no tenant can aim at a counter."""
        self._seed = random.getrandbits(64) if seed is None else seed
        self._counts = np.zeros((self.ROWS, self.WIDTH), dtype=np.uint8)
        self._door = np.zeros(self.WIDTH, dtype=bool)
        self._sample = 1000
        self._seen = 0
        self._lock = threading.RLock()

    def record_access(self, key: ChunkKey) -> None:
        with self._lock:
            self._seen += 1
            if self._seen >= self._sample:
                self._counts >>= 1
                self._door[:] = False
                self._seen = 0
            at = self._slots(key)
            if self._door[at].all():
                counts = self._counts[self._rows, at]
                is_lowest = (counts == counts.min()) & (counts < self.TOP)
                self._counts[self._rows, at] = counts + is_lowest
            self._door[at] = True

    def admits(self, key: ChunkKey, n_bytes: int, victims: Sequence[Candidate], n_chunks: int) -> bool:
        with self._lock:
            self._sample = max(1000, 10 * n_chunks)
            price = sum(self.frequency(victim.key) * victim.n_bytes for victim in victims)
            return self.frequency(key) * n_bytes > price

    def frequency(self, key: ChunkKey) -> int:
        """The number of recent look-ups, estimated; never too low until the counters are halved."""
        with self._lock:
            at = self._slots(key)
            return int(self._counts[self._rows, at].min()) + int(self._door[at].all())

    def _slots(self, key: ChunkKey) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return np.frombuffer(xxhash.xxh3_128_digest(key, self._seed), dtype=np.uint32) % self.WIDTH
