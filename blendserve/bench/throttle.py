"""A store as slow as asked for: what is read from it takes as long as from a disk or a network of that rate."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from blendserve.store import ChunkKey, ChunkView, KVStore, Snapshot
from blendserve.store.base import Meanwhile, TimeSaved
from blendserve.store.codecs.base import Undecodable


def throttled(store: KVStore, bytes_per_second: float) -> KVStore:
    """The same store, from which no more is read in a second."""
    return cast(KVStore, _Store(store, bytes_per_second))


class _Store:
    def __init__(self, store: KVStore, rate: float) -> None:
        self._store, self._rate = store, rate

    @contextmanager
    def reading(self) -> Iterator[_Snapshot]:
        with self._store.reading() as snapshot:
            yield _Snapshot(snapshot, self._rate)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    snapshot: Snapshot
    rate: float

    @property
    def undecodable(self) -> Mapping[ChunkKey, Undecodable]:
        return self.snapshot.undecodable

    def expect(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None = None, saved: TimeSaved | None = None
    ) -> None:
        self.snapshot.expect(keys, meanwhile, saved)

    def tier(self, key: ChunkKey) -> str:
        return self.snapshot.tier(key)

    def get(self, key: ChunkKey) -> _Chunk | None:
        view = self.snapshot.get(key)
        return None if view is None else _Chunk(view, self.rate)


@dataclass(frozen=True, slots=True)
class _Chunk:
    view: ChunkView
    rate: float

    @property
    def n_layers(self) -> int:
        return self.view.n_layers

    @property
    def n_tokens(self) -> int:
        return self.view.n_tokens

    @property
    def n_bytes(self) -> int:
        return self.view.n_bytes

    @property
    def raw_bytes(self) -> int:
        return self.view.raw_bytes

    @property
    def version(self) -> Hashable:
        return self.view.version

    def layer(self, l: int) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        keys, values = self.view.layer(l)
        due = start + self.view.n_bytes / self.view.n_layers / self.rate
        time.sleep(max(0.0, due - time.perf_counter()))
        return keys, values
