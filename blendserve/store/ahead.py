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

from blendserve.errors import StoreError, unraised
from blendserve.store.base import KVStore
from blendserve.store.clock import Clock
from blendserve.store.codecs.base import Undecodable
from blendserve.store.fetching import Fetched, Fetcher, was_left
from blendserve.store.key import ChunkKey
from blendserve.store.record import ChunkRecord
from blendserve.store.request_reads import REMOTE, Meanwhile, Reads, TimeSaved
from blendserve.store.view import ChunkView, RecordView
from blendserve.store.wrapped import WrappedStore


class ReadAhead(WrappedStore):
    """Reading differs, and what is stored or deleted is read anew."""

    def __init__(self, store: KVStore, prefetch_bytes: int, clock: Clock = time) -> None:
        super().__init__(store)
        self._fetcher = Fetcher(store, prefetch_bytes, clock)

    @contextmanager
    def reading(self) -> Iterator[Reads]:
        with self._store.reading() as snapshot:
            yield _Ahead(snapshot, self._fetcher, self._store)

    def prefetch(self, keys: Iterable[ChunkKey], saved: TimeSaved | None = None) -> None:
        self._fetcher.start(keys, saved)

    def put(self, key: ChunkKey, record: ChunkRecord, pin: bool = False) -> bool:
        stored = self._store.put(key, record, pin)
        self._fetcher.forget(key)  # it may have been missing when it was read ahead
        return stored

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        asked = list(keys)
        for key in asked:
            self._fetcher.forget(key)
        return self._store.delete(asked)

    def close(self) -> None:
        self._fetcher.close()
        self._store.close()


class _Ahead:
    """The store's snapshot, and what was read ahead of it."""

    def __init__(self, snapshot: Reads, fetcher: Fetcher, store: KVStore) -> None:
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
            if isinstance(fetched, ChunkRecord):
                return RecordView(fetched, self._store.blobs.get)
        except Undecodable as error:
            fetched = unraised(error)
        if fetched is not None:
            self._lacking[key] = fetched
        return None
