"""Copies of chunk layers that several queued prompts share: each layer is read and checked once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable

from blendserve.store.codecs.base import Pair
from blendserve.store.key import ChunkKey
from blendserve.store.view import ChunkView


class Hold:
    """Keeps the copies of some chunks until it is closed. Closing is idempotent."""

    def __init__(self, copies: HeldCopies, keys: Iterable[ChunkKey]) -> None:
        self._copies, self._keys, self._closing = copies, frozenset(keys), threading.Lock()
        copies.retain(self._keys)

    def close(self) -> None:
        with self._closing:
            keys, self._keys = self._keys, frozenset()
        self._copies.release(keys)


class HeldCopies:
    """Decoded layers of chunks that at least two open holds name, at most `cap_bytes`. Thread-safe.

    A store's views end with its snapshot, so the layers are copies.
    """

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes, self.n_bytes = cap_bytes, 0
        self._holds: Counter[ChunkKey] = Counter()
        self._layers: dict[ChunkKey, dict[int, Pair]] = {}
        self._lock = threading.Lock()

    def retain(self, keys: frozenset[ChunkKey]) -> None:
        with self._lock:
            self._holds.update(keys)

    def release(self, keys: frozenset[ChunkKey]) -> None:
        """Drop the copies of those that no other hold names."""
        with self._lock:
            self._holds.subtract(keys)
            for key in [key for key in keys if self._holds[key] <= 0]:
                del self._holds[key]
                self.n_bytes -= sum(map(_n_bytes, self._layers.pop(key, {}).values()))

    def layer(self, key: ChunkKey, l: int, read: Callable[[int], Pair]) -> Pair:
        """The copy of a layer; else what `read` returns, copied if another hold names the chunk."""
        with self._lock:
            copy = self._layers.get(key, {}).get(l)
        if copy is not None:
            return copy
        pair = read(l)
        with self._lock:
            copies = self._layers.setdefault(key, {}) if self._holds[key] > 1 else {l: pair}
            if l not in copies and self.n_bytes + _n_bytes(pair) <= self.cap_bytes:
                copies[l] = pair = (pair[0].clone(), pair[1].clone())
                self.n_bytes += _n_bytes(pair)
        return pair


class HeldView:
    """A view that reads through held copies."""

    def __init__(self, key: ChunkKey, view: ChunkView, copies: HeldCopies) -> None:
        self._key, self._view, self._copies = key, view, copies
        self.n_layers, self.n_tokens = view.n_layers, view.n_tokens
        self.n_bytes, self.raw_bytes, self.version = view.n_bytes, view.raw_bytes, view.version

    def layer(self, l: int) -> Pair:
        return self._copies.layer(self._key, l, self._view.layer)


def _n_bytes(pair: Pair) -> int:
    return sum(part.numel() * part.element_size() for part in pair)
