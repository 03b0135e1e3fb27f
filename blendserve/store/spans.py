"""Finds text of stored chunks inside a prompt, at any offset, by hashes of token windows, in memory.

    chunk   -> hashes of a window every STRIDE tokens: its anchors
    prompt  -> hash of every window, in O(n) -> filter of bits -> anchors with the same hash: hits

This is rsync's search (Tridgell and Mackerras, 1996) with anchors in place of blocks: the stored side has few windows,
the prompt's side has all. So any stretch of STRIDE + WINDOW - 1 equal tokens has an anchor, at half the memory of
boundaries that the content defines on both sides (winnowing; Schleimer et al., 2003: 2 / (w + 1) of the windows for
stretches of w + WINDOW - 1). A hit is a hint: its reader compares the tokens.

An anchor is one integer of 64 bits, 38 of its hash and 26 of its chunk's number, in sorted arrays, each more than twice
as large as the next one. New chunks become one more array, and arrays are merged as they grow. A filter in front of them,
of 16 to 32 bits an anchor, rules out nearly all windows of other text.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blendserve.store.key import ChunkKey

STRIDE = 16  # tokens from anchor to anchor of a chunk
WINDOW = 16  # tokens of an anchor
MOST = 16  # hits at one place of a prompt, of the chunks that were added last: boilerplate is in many chunks
APART = 48  # tokens from one place of a window to the next one that counts: ruled tables, blank lines
SLOT_BITS = 26  # of a chunk's number: at most 67 million
FILTER_BITS = 16  # for each anchor, at least
N_IDS = 1 << 18  # random numbers; token ids beyond them share theirs
SPARE = 1024  # numbers of deleted chunks, beside as many as there are chunks, before all are numbered again

Tokens = NDArray[np.int64]
Marks = NDArray[np.uint64]
_SLOT = np.uint64((1 << SLOT_BITS) - 1)


class Hasher:
    """Hashes of token windows: a polynomial over secret random numbers, one for each token id. Thread-safe.

        hash(ids) = sum of number[ids[j]] * base ** j    mod 2 ** 64

    The numbers come from the operating system, anew in every process, so windows of equal hash cannot be prepared.
    """

    def __init__(self) -> None:
        self._numbers = np.frombuffer(os.urandom(8 * N_IDS), np.uint64)
        self._base = int.from_bytes(os.urandom(8), "little") | 1  # odd: it has an inverse
        self._powers = np.ones(1, np.uint64), np.ones(1, np.uint64)

    def windows(self, ids: Tokens, width: int) -> Marks:
        """The hashes of all windows of `width` tokens [n - width + 1]; none if there are fewer tokens."""
        n = len(ids)
        if n < width:
            return np.empty(0, np.uint64)
        powers, inverses = self._powers_to(n)
        sums = np.zeros(n + 1, np.uint64)
        np.cumsum(self._numbers[ids & (N_IDS - 1)] * powers[:n], out=sums[1:])
        hashes: Marks = (sums[width:] - sums[:-width]) * inverses[: n - width + 1]
        hashes ^= hashes >> np.uint64(32)
        hashes *= np.uint64(0x9E3779B97F4A7C15)  # readers use the upper bits
        return hashes

    def _powers_to(self, n: int) -> tuple[Marks, Marks]:
        """Return at least n powers of the base, and of its inverse."""
        powers = self._powers
        if len(powers[0]) < n:
            n_powers = 1 << (n - 1).bit_length()
            powers = _powers(self._base, n_powers), _powers(pow(self._base, -1, 1 << 64), n_powers)
            self._powers = powers
        return powers


def _powers(base: int, n: int) -> Marks:
    factors = np.full(n, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


@lru_cache(maxsize=1)
def process_hasher() -> Hasher:
    """The one of this process."""
    return Hasher()


class Hit(NamedTuple):
    """An anchor of a chunk that seems to be in a prompt."""

    place: int  # of its window in the prompt
    key: ChunkKey
    hash: int


class SpanIndex:
    """The anchors of chunks, by key. Safe to share between threads."""

    def __init__(self) -> None:
        self._hasher = process_hasher()
        self._slots: dict[ChunkKey, int] = {}
        self._keys: list[ChunkKey | None] = []  # by number; None: deleted
        self._tables: tuple[Marks, ...] = ()
        self._filter = _Filter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def keys(self) -> set[ChunkKey]:
        return set(self._slots)

    @property
    def n_bytes(self) -> int:
        """The bytes of the sorted arrays and the filter."""
        return sum(table.nbytes for table in self._tables) + self._filter.n_bytes

    def anchors(self, ids: Sequence[int] | Tokens) -> Marks:
        """The hashes of a chunk's anchors; none for fewer than WINDOW tokens."""
        return self._hasher.windows(np.asarray(ids, np.int64), WINDOW)[::STRIDE]

    def places(self, ids: Sequence[int] | Tokens) -> dict[int, list[int]]:
        """Where in a chunk its anchors start, by hash."""
        places: dict[int, list[int]] = {}
        for n, anchor in enumerate(self.anchors(ids).tolist()):
            places.setdefault(anchor, []).append(n * STRIDE)
        return places

    def add(self, chunks: Iterable[tuple[ChunkKey, Marks]]) -> None:
        """Add chunks with their anchors; known ones are skipped, and all when the numbers are used up."""
        with self._lock:
            new = [np.empty(0, np.uint64)]
            for key, anchors in chunks:
                if key not in self._slots and len(self._keys) <= _SLOT:
                    new.append(np.unique(anchors & ~_SLOT) | np.uint64(len(self._keys)))
                    self._slots[key] = len(self._keys)
                    self._keys.append(key)
            tables = [*self._tables, np.sort(np.concatenate(new))]
            self._filter = self._filter.with_last(tables)
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

    def find(self, ids: Tokens) -> list[Hit]:
        """Hits in a prompt, by place; at one place at most MOST, the chunk that was added last first.

        There is at most one hit for each token. Where there would be more, places keep their first hits.
        """
        with self._lock:
            tables = self._tables
            keys = self._keys
            bits = self._filter
        hashes = self._hasher.windows(ids, WINDOW)
        places = np.flatnonzero(bits.may_have(hashes))
        places = _first_places(places, hashes[places])
        at, slots = _look_up(tables, hashes[places])
        is_stored = np.array([keys[slot] is not None for slot in slots.tolist()], bool)
        at, slots = _best(at[is_stored], slots[is_stored], len(ids))
        found = zip(places[at].tolist(), slots.tolist(), hashes[places[at]].tolist(), strict=True)
        return [Hit(place, key, hash) for place, slot, hash in found if (key := keys[slot])]

    def _renumber(self) -> None:
        """Close the gaps in the numbers, and drop the anchors of deleted chunks. The order stays."""
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
        self._filter = _Filter(tables)


class _Filter:
    """Bits by the upper bits of hashes: 0 says that a hash is in no table."""

    def __init__(self, tables: Sequence[Marks] = ()) -> None:
        self.n_bits = max(16, (FILTER_BITS * sum(map(len, tables)) - 1).bit_length())
        self._bits = np.zeros(1 << (self.n_bits - 3), np.uint8)
        for table in tables:
            self._set(table)

    @property
    def n_bytes(self) -> int:
        return self._bits.nbytes

    def with_last(self, tables: Sequence[Marks]) -> _Filter:
        """A filter with the hashes of the last table, too; a larger one, with those of all, if there are too many."""
        if FILTER_BITS * sum(map(len, tables)) > 1 << self.n_bits:
            return _Filter(tables)
        self._set(tables[-1])
        return self

    def may_have(self, hashes: Marks) -> NDArray[np.bool_]:
        byte, bit = self._at(hashes)
        found: NDArray[np.bool_] = self._bits[byte] & bit != 0
        return found

    def _set(self, hashes: Marks) -> None:
        byte, bit = self._at(hashes)
        np.bitwise_or.at(self._bits, byte, bit)

    def _at(self, hashes: Marks) -> tuple[Tokens, NDArray[np.uint8]]:
        at = hashes >> np.uint64(64 - self.n_bits)
        return (at >> np.uint64(3)).astype(np.int64), np.uint8(1) << (at & np.uint64(7)).astype(np.uint8)


def _first_places(places: Tokens, hashes: Marks) -> Tokens:
    """Leave out places of a window that also occurs less than APART tokens before."""
    order = np.argsort(hashes, kind="stable")
    is_again = (np.diff(hashes[order]) == 0) & (np.diff(places[order]) < APART)
    return np.sort(np.delete(places[order], np.flatnonzero(is_again) + 1))


def _look_up(tables: Sequence[Marks], hashes: Marks) -> tuple[Tokens, Tokens]:
    """Numbers of hashes, and of chunks that have them: of each table at most MOST for a hash."""
    found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    for table in tables:
        stops = np.searchsorted(table, hashes | _SLOT, side="right")
        starts = np.maximum(np.searchsorted(table, hashes & ~_SLOT), stops - MOST)
        counts = stops - starts
        at = np.repeat(np.arange(len(hashes)), counts)
        entries = (
            np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(starts, counts)
        )
        found.append((at, (table[entries] & _SLOT).astype(np.int64)))
    return np.concatenate([at for at, _ in found]), np.concatenate([slots for _, slots in found])


def _best(at: Tokens, slots: Tokens, most: int) -> tuple[Tokens, Tokens]:
    """Order by place, then latest chunk first: MOST for a place, and `most` in all, second hits after all first ones."""
    order = np.lexsort((-slots, at))
    at, slots = at[order], slots[order]
    is_new = np.ones(len(at), bool)
    is_new[1:] = (np.diff(at) != 0) | (np.diff(slots) != 0)
    at, slots = at[is_new], slots[is_new]
    numbers = np.arange(len(at))
    is_first = np.ones(len(at), bool)
    is_first[1:] = np.diff(at) != 0
    rank = numbers - np.maximum.accumulate(np.where(is_first, numbers, 0))
    kept = np.sort(np.lexsort((at, rank))[: min(most, int((rank < MOST).sum()))])
    return at[kept], slots[kept]
