"""What happens at the cap: which chunks go (eviction), and whether a new one is worth them (admission).

A store asks both and drops what it is told to. Pinned chunks (precomputed corpora) are never offered for eviction, so
requests on demand cannot push them out, and admission is never asked about them. Below the cap everything is
stored.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from blendserve.store.key import ChunkKey


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored chunk that may be dropped."""

    key: ChunkKey
    n_bytes: int


class Eviction(Protocol):
    """Chooses victims."""

    def victims(self, oldest_first: Iterable[Candidate], needed: int) -> list[Candidate] | None:
        """Chunks of at least `needed` bytes together; None when they cannot be had, which is StoreFull."""
        ...


class LRU:
    """The least recently used go first, as few as are needed."""

    def victims(self, oldest_first: Iterable[Candidate], needed: int) -> list[Candidate] | None:
        chosen: list[Candidate] = []
        for candidate in oldest_first:
            if needed <= 0:
                break
            chosen.append(candidate)
            needed -= candidate.n_bytes
        return chosen if needed <= 0 else None


class Refuse:
    """Nothing goes: a full store is full. The plain variant."""

    def victims(self, oldest_first: Iterable[Candidate], needed: int) -> list[Candidate] | None:
        return [] if needed <= 0 else None


class Admission(Protocol):
    """Sees every request for a chunk, decides at the cap."""

    def record_access(self, key: ChunkKey) -> None:
        """A request asked for this chunk, whether it was there or not."""
        ...

    def admits(self, key: ChunkKey, n_bytes: int, victims: Sequence[Candidate], n_chunks: int) -> bool:
        """Whether to store the chunk at the price of the victims; `n_chunks` are in the store now."""
        ...


class Always:
    """Everything is admitted: the plain variant. One pass over novel chunks then flushes the store."""

    def record_access(self, key: ChunkKey) -> None:
        pass

    def admits(self, key: ChunkKey, n_bytes: int, victims: Sequence[Candidate], n_chunks: int) -> bool:
        return True


class TinyLFU:
    """Admit what was asked for more often than what would go (Einziger, Friedman, Manes: TinyLFU, 1512.00727).

    How often is an estimate over the last requests, in constant memory: a count-min sketch of four rows whose
    counters saturate at 15, behind a doorkeeper (a Bloom filter that holds whatever was asked for once). After ten
    requests per stored chunk all counters are halved and the doorkeeper is emptied, so that popularity fades.

    Chunks differ in size, and a hit saves work in proportion to it; so what is compared is frequency x bytes, of the
    chunk against the sum over its victims. Ties keep what is there. TierEntry in this process only: after a restart
    nothing is known of either side, and a chunk asked for once more than its victims is admitted.
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

    def record_access(self, key: ChunkKey) -> None:
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

    def admits(self, key: ChunkKey, n_bytes: int, victims: Sequence[Candidate], n_chunks: int) -> bool:
        with self._lock:
            self._sample = max(1000, 10 * n_chunks)
            price = sum(self._frequency(victim.key) * victim.n_bytes for victim in victims)
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


class Policies(NamedTuple):
    """What one store goes by."""

    eviction: Eviction
    admission: Admission
