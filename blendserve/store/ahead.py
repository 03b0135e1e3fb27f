"""A store on another machine, alone: read ahead of requests, as their passages are known before their turn comes.

    prefetch -> reading in a thread (fetching.py)
    look-up  -> what is here by then; the store is asked for the rest

What could not be read ahead counts as missing, for the reason that it has: waiting twice would take longer than a request
may wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from blendserve.core import ChunkKV
from blendserve.errors import StoreError, unraised
from blendserve.store.base import REMOTE, ChunkView, KVStore, Meanwhile, Snapshot, TimeSaved
from blendserve.store.chunk import StoredChunk
from blendserve.store.clock import Clock
from blendserve.store.codecs.base import Undecodable
from blendserve.store.fetching import Fetched, Fetcher, was_left
from blendserve.store.key import ChunkKey
from blendserve.store.record import Coded, seal
from blendserve.store.wrapped import WrappedStore


class ReadAhead(WrappedStore):
    """Reading differs, and what is stored or deleted is read anew."""

    def __init__(self, store: KVStore, prefetch_bytes: int, clock: Clock = time) -> None:
        super().__init__(store)
        self._fetcher = Fetcher(store, prefetch_bytes, clock)

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        with self._store.reading() as snapshot:
            yield _Ahead(snapshot, self._fetcher, self._store)

    def prefetch(self, keys: Iterable[ChunkKey], saved: TimeSaved | None = None) -> None:
        self._fetcher.start(keys, saved)

    def put(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        stored = self._store.put(key, kv, pin)
        self._fetcher.forget(key)  # it may have been missing when it was read ahead
        return stored

    def put_coded(self, key: ChunkKey, coded: Coded, pin: bool = False) -> bool:
        stored = self._store.put_coded(key, coded, pin)
        self._fetcher.forget(key)
        return stored

    def put_uncoded(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        stored = self._store.put_uncoded(key, kv, pin)
        self._fetcher.forget(key)
        return stored

    def delete(self, key: ChunkKey) -> bool:
        self._fetcher.forget(key)
        return self._store.delete(key)

    def close(self) -> None:
        self._fetcher.close()
        self._store.close()


class _Ahead:
    """The store's snapshot, and what was read ahead of it."""

    def __init__(self, snapshot: Snapshot, fetcher: Fetcher, store: KVStore) -> None:
        self._snapshot, self._fetcher, self._store = snapshot, fetcher, store
        self._ahead: dict[ChunkKey, Fetched | None] = {}  # None = it was not there
        self._lacking: dict[ChunkKey, Undecodable] = {}

    @property
    def undecodable(self) -> Mapping[ChunkKey, Undecodable]:
        return {**self._snapshot.undecodable, **self._lacking}

    def expect(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None = None, saved: TimeSaved | None = None
    ) -> None:
        new = [key for key in keys if key not in self._ahead]
        ahead = self._fetcher.begun(new, shared=True)
        left = [key for key in new if key not in ahead]
        self._snapshot.expect(left, meanwhile, saved)  # under way while those are waited for
        came = {key: fetched() for key, fetched in ahead.items()}
        self._ahead |= {key: fetched for key, fetched in came.items() if not was_left(fetched)}
        if again := [key for key, fetched in came.items() if was_left(fetched)]:
            self._snapshot.expect(again, None if left else meanwhile, saved)

    def tier(self, key: ChunkKey) -> str:
        return REMOTE

    def get(self, key: ChunkKey) -> ChunkView | None:
        if key not in self._ahead:
            return self._snapshot.get(key)
        fetched = self._ahead[key]
        if isinstance(fetched, StoreError):
            raise unraised(fetched)
        try:
            if isinstance(fetched, Coded):
                read = fetched.segments.__getitem__
                return StoredChunk(key, seal(key, fetched), read, self._store.tables)
        except Undecodable as error:
            fetched = unraised(error)
        if fetched is not None:
            self._lacking[key] = fetched
        return None
