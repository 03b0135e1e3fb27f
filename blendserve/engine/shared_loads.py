"""Loads shared by waiting requests: what the next ones want, too, is read and checked once, and kept until they had it.

A view of the store's own memory ends with its snapshot, so what is kept is a copy. Chunks that only one request wants are
passed through as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager

import torch

from blendserve.store import ChunkKey, ChunkView, KVStore, Snapshot
from blendserve.store.base import Meanwhile, TimeSaved
from blendserve.store.codecs.base import Undecodable
from blendserve.store.wrapped import WrappedStore

Layer = tuple[torch.Tensor, torch.Tensor]


class SharedLoads(WrappedStore):
    """A store for the model's thread and the one that reads ahead of it, over the real one. Only reading differs."""

    def __init__(self, store: KVStore, cap_bytes: int) -> None:
        super().__init__(store)
        self._cap = cap_bytes
        self._wanted: Set[ChunkKey] = set()
        self._held: dict[ChunkKey, dict[int, Layer]] = {}
        self._bytes = 0
        self._using = threading.Lock()

    def expect(self, now: Set[ChunkKey], later: Set[ChunkKey]) -> None:
        """What the next request wants, and what those behind it want: the latter is kept when it is read.

        What is kept and wanted by none of them is dropped.
        """
        with self._using:
            self._wanted = later
            for key in self._held.keys() - now - later:
                self._bytes -= sum(_bytes(layer) for layer in self._held.pop(key).values())

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        with self._store.reading() as snapshot:
            yield _SharedSnapshot(snapshot, self)

    def layer(self, key: ChunkKey, l: int, read: Callable[[], Layer]) -> Layer:
        """A layer that is kept, or is read and perhaps kept."""
        with self._using:
            kept = self._held.get(key, {}).get(l)
        if kept is not None:
            return kept
        layer = read()
        with self._using:
            if key in self._wanted and self._bytes + _bytes(layer) <= self._cap:
                layer = (layer[0].clone(), layer[1].clone())
                self._held.setdefault(key, {})[l] = layer
                self._bytes += _bytes(layer)
        return layer

    @property
    def n_bytes(self) -> int:
        """Of what is kept now."""
        return self._bytes


class _SharedSnapshot:
    """A snapshot whose chunks may come out of what is kept."""

    def __init__(self, snapshot: Snapshot, shared: SharedLoads) -> None:
        self._snapshot, self._shared = snapshot, shared

    @property
    def undecodable(self) -> Mapping[ChunkKey, Undecodable]:
        return self._snapshot.undecodable

    def expect(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None = None, saved: TimeSaved | None = None
    ) -> None:
        self._snapshot.expect(keys, meanwhile, saved)

    def tier(self, key: ChunkKey) -> str:
        return self._snapshot.tier(key)

    def get(self, key: ChunkKey) -> ChunkView | None:
        view = self._snapshot.get(key)
        return None if view is None else _SharedView(key, view, self._shared)


class _SharedView:
    """A stored chunk, each layer from memory if it is kept there."""

    def __init__(self, key: ChunkKey, view: ChunkView, shared: SharedLoads) -> None:
        self._key, self._view, self._shared = key, view, shared
        self.n_layers, self.n_tokens = view.n_layers, view.n_tokens
        self.n_bytes, self.raw_bytes, self.version = view.n_bytes, view.raw_bytes, view.version

    def layer(self, l: int) -> Layer:
        return self._shared.layer(self._key, l, lambda: self._view.layer(l))


def _bytes(layer: Layer) -> int:
    return sum(part.numel() * part.element_size() for part in layer)
