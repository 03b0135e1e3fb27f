"""Which stored chunks have a stretch of text in common with this one? Fingerprints of token ids, in memory.

    ids -> a hash of every SHINGLE tokens in a row -> the least of every WINDOW hashes in a row: the fingerprints

That is winnowing (Schleimer, Wilkerson, Aiken, SIGMOD 2003). Chunks that have SURE tokens in a row in common have a
fingerprint in common, wherever the run stands and however small a part of them it is. A MinHash of whole chunks promises
less: it tells how alike two chunks are, and a donor of a fifth of a chunk is not.

A fingerprint and its chunk's number are one integer of 64 bits, in sorted arrays, each more than twice as large as the
next one: what is added is one more, and they are merged as they grow. What is found is a hint: who reads a donor compares
the tokens themselves.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from blendserve.store.key import ChunkKey

SHINGLE, WINDOW = 12, 21
SURE = SHINGLE + WINDOW - 1
SLOT_BITS = 26  # of a chunk's number: 67 million of them; the other 38 are the hash's
MOST = 64  # chunks of each array that are looked at for a fingerprint, the latest ones: boilerplate is everywhere
SPARE = 1024  # numbers of chunks that have gone are given up when there are more of them than this and of those that stay

Marks = NDArray[np.uint64]
_SLOT = np.uint64((1 << SLOT_BITS) - 1)
_UP = np.uint64(SLOT_BITS)
_ODD = np.random.default_rng(0).integers(1 << 63, size=SHINGLE, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def fingerprints(ids: Sequence[int]) -> Marks:
    """Of a chunk's tokens [C] -> ascending, each once; none where it has fewer than SHINGLE tokens."""
    if len(ids) < SHINGLE:
        return np.empty(0, np.uint64)
    tokens = np.asarray(ids, np.uint64) + np.uint64(1)
    hashes = np.lib.stride_tricks.sliding_window_view(tokens, SHINGLE) @ _ODD
    hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) >> _UP
    windows = np.lib.stride_tricks.sliding_window_view(hashes, min(WINDOW, len(hashes)))
    return np.unique(windows.min(axis=1))


class NearIndex:
    """The fingerprints of chunks, by key. Safe to share between threads."""

    def __init__(self) -> None:
        self._slots: dict[ChunkKey, int] = {}
        self._keys: list[ChunkKey | None] = []  # by number; None: gone
        self._tables: tuple[Marks, ...] = ()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._slots

    @property
    def keys(self) -> set[ChunkKey]:
        return set(self._slots)

    @property
    def n_bytes(self) -> int:
        """Of the sorted arrays."""
        return sum(table.nbytes for table in self._tables)

    def add(self, chunks: Iterable[tuple[ChunkKey, Marks]]) -> None:
        """Chunks with their fingerprints; what is there already, or is one too many, is passed over."""
        with self._lock:
            new = [np.empty(0, np.uint64)]
            for key, marks in chunks:
                if key not in self._slots and len(self._keys) <= _SLOT:
                    new.append(marks << _UP | np.uint64(len(self._keys)))
                    self._slots[key] = len(self._keys)
                    self._keys.append(key)
            tables = [*self._tables, np.sort(np.concatenate(new))]
            while len(tables) > 1 and len(tables[-2]) <= 2 * len(tables[-1]):
                tables[-2:] = [np.sort(np.concatenate(tables[-2:]))]
            self._tables = tuple(tables)

    def discard(self, keys: Iterable[ChunkKey]) -> None:
        """These are no longer stored."""
        with self._lock:
            for key in keys:
                if (slot := self._slots.pop(key, None)) is not None:
                    self._keys[slot] = None
            if len(self._keys) > 2 * len(self._slots) + SPARE:
                self._renumber()

    def find(self, marks: Marks, most: int) -> list[ChunkKey]:
        """At most so many chunks that share fingerprints with these: first the one that shares most, then those that
        share most of what is left; of equals the one that was added last."""
        with self._lock:
            tables, keys = self._tables, self._keys
        shared = _sharing(tables, keys, marks)
        found: list[ChunkKey] = []
        while shared and len(found) < most:
            counts = Counter(slot for slots in shared for slot in slots)
            best = max(counts, key=lambda slot: (counts[slot], slot))
            if key := keys[best]:  # it may have gone meanwhile
                found.append(key)
            shared = [slots for slots in shared if best not in slots]
        return found

    def _renumber(self) -> None:
        """Close the gaps in the numbers, and drop the fingerprints of what has gone. Order stays."""
        new = np.cumsum([key is not None for key in self._keys], dtype=np.uint64) - np.uint64(1)
        there = np.array([key is not None for key in self._keys])
        tables = []
        for table in self._tables:
            slots = table & _SLOT
            tables.append((table - slots + new[slots])[there[slots]])
        left = [key for key in self._keys if key is not None]
        self._slots = {key: slot for slot, key in enumerate(left)}
        self._keys = [*left]  # a list of its own: who is reading has the other
        self._tables = tuple(tables)


def _sharing(tables: Sequence[Marks], keys: Sequence[ChunkKey | None], marks: Marks) -> list[set[int]]:
    """The numbers of the chunks that have each fingerprint, where any has."""
    found: list[set[int]] = [set() for _ in marks]
    for table in tables:
        starts = np.searchsorted(table, marks << _UP)
        stops = np.searchsorted(table, marks << _UP | _SLOT, side="right")
        for slots, start, stop in zip(found, starts, stops, strict=True):
            some = (table[max(start, stop - MOST) : stop] & _SLOT).tolist()
            slots.update(slot for slot in some if keys[slot])
    return [slots for slots in found if slots]
