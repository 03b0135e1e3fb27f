"""A store that stands for one on another machine: it counts what it is asked for, and fails when told to."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from blendserve.errors import StoreUnavailable
from blendserve.store import KVStore, Lease, Snapshot
from blendserve.store.base import Meanwhile, TimeSaved
from blendserve.store.key import ChunkKey
from blendserve.store.record import Coded
from blendserve.store.wrapped import WrappedStore


class RemoteStore(WrappedStore):
    """down: everything fails. gate: reading and writing wait for it. trips: look-ups, each of so many chunks."""

    def __init__(self, store: KVStore) -> None:
        super().__init__(store)
        self.down = False
        self.gate = threading.Event()
        self.gate.set()
        self.trips: list[int] = []
        self.leased: set[ChunkKey] = set()
        self.refused = 0  # leases
        self.puts = 0

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        self._trip()
        with self._store.reading() as snapshot:
            yield _Counted(snapshot, self)

    def put_coded(self, key: ChunkKey, coded: Coded, pin: bool = False) -> bool:
        self._trip()
        self.puts += 1
        return self._store.put_coded(key, coded, pin)

    def tables(self, hash: bytes) -> bytes | None:
        self._trip()
        return self._store.tables(hash)

    def all_tables(self) -> list[Any]:
        self._trip()
        return self._store.all_tables()

    def present(self, keys: Iterable[ChunkKey], remote: bool = True) -> set[ChunkKey]:
        self._trip()
        return self._store.present(keys) if remote else set()

    def delete(self, key: ChunkKey) -> bool:
        self._trip()
        return self._store.delete(key)

    def lease(self, key: ChunkKey, seconds: float) -> Lease | None:
        self._trip()
        if key in self.leased:
            self.refused += 1
            return None
        self.leased.add(key)
        return _Lease(self, key)

    def leases(self, keys: Sequence[ChunkKey], seconds: float) -> dict[ChunkKey, Lease]:
        return KVStore.leases(self, keys, seconds)

    def _trip(self) -> None:
        assert self.gate.wait(60)
        if self.down:
            raise StoreUnavailable("the network is down")


class _Counted:
    def __init__(self, snapshot: Snapshot, store: RemoteStore) -> None:
        self._snapshot, self._store = snapshot, store

    def expect(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None = None, saved: TimeSaved | None = None
    ) -> None:
        self._store.trips.append(len(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._snapshot, name)


class _Lease(Lease):
    def __init__(self, store: RemoteStore, key: ChunkKey) -> None:
        self._store, self._key = store, key

    def release(self) -> None:
        self._store.leased.discard(self._key)
