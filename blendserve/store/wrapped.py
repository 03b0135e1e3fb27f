"""A store in front of another: what it does not say itself, the other one does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

from blendserve.core import TokenIds
from blendserve.store.base import ChunkInfo, KVStore, Progress, Snapshot, StoreStats, VerifyReport
from blendserve.store.key import ChunkKey
from blendserve.store.record import ChunkRecord
from blendserve.store.request_reads import Sample, TimeSaved


class WrappedStore(KVStore):
    """Everything but `reading`, which is what wrappers are for."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self.kind, self.location, self.read_only = store.kind, store.location, store.read_only
        self.cap_bytes, self.blobs = store.cap_bytes, store.blobs
        self.tells_ids = store.tells_ids

    def snapshot(self) -> AbstractContextManager[Snapshot]:
        return self._store.snapshot()

    def put(self, key: ChunkKey, record: ChunkRecord, pin: bool = False) -> bool:
        return self._store.put(key, record, pin)

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        return self._store.delete(keys)

    def pin(self, keys: Iterable[ChunkKey], pinned: bool = True) -> int:
        return self._store.pin(keys, pinned)

    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        return self._store.contains(keys)

    def describe(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        return self._store.describe(keys)

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        return self._store.keys(namespace)

    def admits(self, key: ChunkKey, n_bytes: int) -> bool:
        return self._store.admits(key, n_bytes)

    def lease(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        return self._store.lease(keys, seconds)

    def release(self, keys: Iterable[ChunkKey]) -> None:
        self._store.release(keys)

    def stats(self, namespace: str | None = None) -> StoreStats:
        return self._store.stats(namespace)

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        return self._store.verify(progress)

    def close(self) -> None:
        self._store.close()

    # request_reads.py

    def present(self, keys: Iterable[ChunkKey], remote: bool = True) -> set[ChunkKey]:
        return self._store.present(keys, remote)

    def hot(self) -> frozenset[ChunkKey]:
        return self._store.hot()

    def ids(self, keys: Iterable[ChunkKey]) -> Iterator[tuple[ChunkKey, TokenIds]]:
        return self._store.ids(keys)

    def donor_keys(self, namespace: str) -> Iterator[ChunkKey]:
        return self._store.donor_keys(namespace)

    def prefetch(self, keys: Iterable[ChunkKey], saved: TimeSaved | None = None) -> None:
        self._store.prefetch(keys, saved)

    @property
    def far(self) -> bool:
        return self._store.far

    def sample(self, keys: Sequence[ChunkKey], n_bytes: int) -> Sample | None:
        return self._store.sample(keys, n_bytes)

    @property
    def compares_cost(self) -> bool:
        return self._store.compares_cost
