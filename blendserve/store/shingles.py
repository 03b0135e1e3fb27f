"""Finds stored chunks that share a run of tokens with a given one, by fingerprints of token ids, in memory.

    ids -> a hash of every SHINGLE consecutive tokens -> the minimum of every WINDOW consecutive hashes: the fingerprints

This is winnowing (Schleimer, Wilkerson, Aiken, SIGMOD 2003). Chunks that share SURE consecutive tokens share a
fingerprint, at any position and however small a part of them the run is. A MinHash of whole chunks estimates how similar
two chunks are; a donor of a fifth of a chunk is not similar.

A fingerprint and its chunk's number are one integer of 64 bits, in sorted arrays, each more than twice as large as the
next one. New chunks become one more array, and arrays are merged as they grow. A match is a hint: the reader of a donor
compares the tokens.
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
SLOT_BITS = 26  # of a chunk's number: at most 67 million; the other 38 bits are the hash's
MOST = 64  # matches of a fingerprint in each array, the latest ones: boilerplate is in many chunks
SPARE = 1024  # numbers of deleted chunks, beside as many as there are chunks, before all are numbered again

Marks = NDArray[np.uint64]
_SLOT = np.uint64((1 << SLOT_BITS) - 1)
_UP = np.uint64(SLOT_BITS)
_ODD = np.random.default_rng(0).integers(1 << 63, size=SHINGLE, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def fingerprints(ids: Sequence[int]) -> Marks:
    """Of a chunk's tokens [C] -> ascending, without duplicates; none for fewer than SHINGLE tokens."""
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
        self._keys: list[ChunkKey | None] = []  # by number; None: deleted
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
        """Add chunks with their fingerprints; known ones are skipped, and all when the numbers are used up."""
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
        """Forget chunks that are no longer stored."""
        with self._lock:
            for key in keys:
                if (slot := self._slots.pop(key, None)) is not None:
                    self._keys[slot] = None
            if len(self._keys) > 2 * len(self._slots) + SPARE:
                self._renumber()

    def find(self, marks: Marks, most: int) -> list[ChunkKey]:
        """At most `most` chunks that share fingerprints with these: first the one that shares most, then the one that
        shares most of the rest, and so on; of equals the one that was added last."""
        with self._lock:
            tables, keys = self._tables, self._keys
        shared = _sharing(tables, keys, marks)
        found: list[ChunkKey] = []
        while shared and len(found) < most:
            counts = Counter(slot for slots in shared for slot in slots)
            best = max(counts, key=lambda slot: (counts[slot], slot))
            if key := keys[best]:  # else deleted meanwhile
                found.append(key)
            shared = [slots for slots in shared if best not in slots]
        return found

    def _renumber(self) -> None:
        """Close the gaps in the numbers, and drop the fingerprints of deleted chunks. The order stays."""
        is_stored = np.array([key is not None for key in self._keys])
        new = np.cumsum(is_stored, dtype=np.uint64) - np.uint64(1)
        tables = []
        for table in self._tables:
            slots = table & _SLOT
            tables.append((table - slots + new[slots])[is_stored[slots]])
        # a new list: `find` may be reading the old one
        self._keys = [key for key in self._keys if key is not None]
        self._slots = {key: slot for slot, key in enumerate(self._keys) if key is not None}
        self._tables = tuple(tables)


def _sharing(tables: Sequence[Marks], keys: Sequence[ChunkKey | None], marks: Marks) -> list[set[int]]:
    """The numbers of the chunks with each fingerprint; a fingerprint without any is left out."""
    found: list[set[int]] = [set() for _ in marks]
    for table in tables:
        starts = np.searchsorted(table, marks << _UP)
        stops = np.searchsorted(table, marks << _UP | _SLOT, side="right")
        for slots, start, stop in zip(found, starts, stops, strict=True):
            some = (table[max(start, stop - MOST) : stop] & _SLOT).tolist()
            slots.update(slot for slot in some if keys[slot])
    return [slots for slots in found if slots]
