"""A store that tells how long requests wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from blendserve.store import ChunkKey, ChunkView, KVStore, Snapshot
from blendserve.store.base import Meanwhile, TimeSaved
from blendserve.store.wrapped import WrappedStore


class Watched(WrappedStore):
    """A store, and how long its look-ups take."""

    def __init__(self, store: KVStore) -> None:
        super().__init__(store)
        self.seconds = 0.0

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        with self._store.reading() as snapshot:
            yield cast(Snapshot, _Watched(snapshot, self))


class _Watched:
    def __init__(self, snapshot: Snapshot, store: Watched) -> None:
        self._snapshot, self._store = snapshot, store

    def expect(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None = None, saved: TimeSaved | None = None
    ) -> None:
        with self._watching():
            self._snapshot.expect(keys, meanwhile, saved)

    def get(self, key: ChunkKey) -> ChunkView | None:
        with self._watching():
            return self._snapshot.get(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._snapshot, name)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._store.seconds += time.perf_counter() - start
