"""A store in front of another: what it does not say itself, the other one does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from blendserve.core import ChunkKV, TokenIds
from blendserve.store.base import ChunkInfo, KVStore, Lease, Sample, StoreStats, TimeSaved, VerifyReport
from blendserve.store.codecs.base import Codec
from blendserve.store.key import ChunkKey
from blendserve.store.record import Coded
from blendserve.store.tables import TablesInfo


class WrappedStore(KVStore):
    """Everything but `reading`, which is what wrappers are for."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self.tells_ids = store.tells_ids

    def put(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        return self._store.put(key, kv, pin)

    def write_by(self, codec: Codec) -> None:
        self._store.write_by(codec)

    def coded(self, key: ChunkKey) -> Coded | None:
        return self._store.coded(key)

    def put_coded(self, key: ChunkKey, coded: Coded, pin: bool = False) -> bool:
        return self._store.put_coded(key, coded, pin)

    def put_uncoded(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        return self._store.put_uncoded(key, kv, pin)

    def put_tables(self, codec: str, fingerprint: str, raw: bytes, current: bool = True) -> bytes:
        return self._store.put_tables(codec, fingerprint, raw, current)

    def tables(self, hash: bytes) -> bytes | None:
        return self._store.tables(hash)

    def all_tables(self) -> list[TablesInfo]:
        return self._store.all_tables()

    def delete_tables(self, hash: bytes) -> bool:
        return self._store.delete_tables(hash)

    def wants(self, key: ChunkKey, raw_bytes: int) -> bool:
        return self._store.wants(key, raw_bytes)

    def lease(self, key: ChunkKey, seconds: float) -> Lease | None:
        return self._store.lease(key, seconds)

    def leases(self, keys: Sequence[ChunkKey], seconds: float) -> dict[ChunkKey, Lease]:
        return self._store.leases(keys, seconds)

    def pin(self, keys: Iterable[ChunkKey]) -> int:
        return self._store.pin(keys)

    def unpin(self, keys: Iterable[ChunkKey]) -> int:
        return self._store.unpin(keys)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._store

    def present(self, keys: Iterable[ChunkKey], remote: bool = True) -> set[ChunkKey]:
        return self._store.present(keys, remote)

    def info(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        return self._store.info(keys)

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
