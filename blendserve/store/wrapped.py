"""A store in front of another: what it does not say itself, the other one does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from blendserve.core import ChunkKV
from blendserve.store.base import KVStore, StoreStats, VerifyReport
from blendserve.store.key import ChunkKey


class WrappedStore(KVStore):
    """Everything but `reading`, which is what wrappers are for."""

    def __init__(self, store: KVStore) -> None:
        self._store = store

    def put(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        return self._store.put(key, kv, pin)

    def wants(self, key: ChunkKey, raw_bytes: int) -> bool:
        return self._store.wants(key, raw_bytes)

    def pin(self, keys: Iterable[ChunkKey]) -> int:
        return self._store.pin(keys)

    def unpin(self, keys: Iterable[ChunkKey]) -> int:
        return self._store.unpin(keys)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._store

    def delete(self, key: ChunkKey) -> bool:
        return self._store.delete(key)

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        return self._store.keys(namespace)

    def stats(self, namespace: str | None = None) -> StoreStats:
        return self._store.stats(namespace)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        return self._store.verify(progress)

    def close(self) -> None:
        self._store.close()
