"""A store on another machine, behind a link whose rate a test sets; fetching advances a manual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from blendserve.errors import StoreUnavailable
from blendserve.store import ChunkKey, ChunkView, KVStore, Reads, read_record
from blendserve.store.request_reads import REMOTE, Sample
from blendserve.store.wrapped import WrappedStore
from tests.support.waiting import ManualClock

SAMPLED = 0.01  # the share of a chunk in a sample


class FarStore(WrappedStore):
    """Fetching takes `latency_s` a request and `token_s` a token. A test sets the fields at any time."""

    def __init__(self, store: KVStore, clock: ManualClock | None = None) -> None:
        super().__init__(store)
        self.clock = clock or ManualClock()
        self.latency_s = self.token_s = 0.0
        self.down = False  # a sample fails
        self.is_far, self.tier = True, REMOTE
        self.expected = 0  # chunks that were asked for in advance
        self.fetched: Counter[ChunkKey] = Counter()
        self.sampled: list[int] = []  # bytes asked for by each sample

    @property
    def far(self) -> bool:
        return self.is_far

    @contextmanager
    def reading(self) -> Iterator[Reads]:
        with self._store.reading() as snapshot:
            yield cast(Reads, _FarSnapshot(snapshot, self))

    def sample(self, keys: Sequence[ChunkKey], n_bytes: int) -> Sample | None:
        self.sampled.append(n_bytes)
        found = next((record for key in keys if (record := read_record(self._store, key))), None)
        n_tokens = found.n_tokens if found else 0
        seconds = self.latency_s + SAMPLED * self.token_s * n_tokens
        self.clock.advance(seconds)
        if self.down:
            raise StoreUnavailable("the network is down")
        return Sample(self.latency_s, seconds, SAMPLED, n_tokens) if found else None

    def present(self, keys: Iterable[ChunkKey], remote: bool = True) -> set[ChunkKey]:
        return self._store.present(keys) if remote or not self.is_far else set()


class _FarSnapshot:
    def __init__(self, snapshot: Reads, store: FarStore) -> None:
        self._snapshot, self._store = snapshot, store

    def expect(self, keys: Sequence[ChunkKey], meanwhile: Any = None, saved: Any = None) -> None:
        far = self._store
        far.expected += len(keys)
        n_tokens = sum(view.n_tokens for key in keys if (view := self._snapshot.get(key)))
        far.clock.advance((far.latency_s + far.token_s * n_tokens) if keys else 0.0)

    def get(self, key: ChunkKey) -> ChunkView | None:
        self._store.fetched[key] += 1
        return self._snapshot.get(key)

    def tier(self, key: ChunkKey) -> str:
        return self._store.tier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._snapshot, name)
