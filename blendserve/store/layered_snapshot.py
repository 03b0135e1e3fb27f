"""A look into the own store and, for what it lacks, into what the remote one gave: layered.py's view of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from blendserve.errors import CorruptRecord, StoreError, StoreVersion, unraised
from blendserve.store.codecs.base import Undecodable
from blendserve.store.fetching import Fetched
from blendserve.store.key import ChunkKey
from blendserve.store.record import ChunkRecord
from blendserve.store.request_reads import REMOTE, Meanwhile, Reads, TimeSaved
from blendserve.store.view import ChunkView


class Source(Protocol):
    """Where chunks come from that the own store lacks."""

    def arriving(self, key: ChunkKey) -> ChunkRecord | None:
        """A chunk that was fetched, and is not in the own store yet."""
        ...

    def fetch(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None, saved: TimeSaved | None
    ) -> dict[ChunkKey, Fetched]:
        """Chunks of the remote store, in one go; those that were read ahead at once."""
        ...

    def view(self, record: ChunkRecord) -> ChunkView:
        """A fetched chunk. Raises codecs.base.Undecodable."""
        ...

    def count(self, what: str) -> None:
        """One of the figures of RemoteStats."""
        ...


class LayeredSnapshot:
    """The own store as it was when this was opened, and what the remote one gives for what it lacks."""

    def __init__(self, source: Source, near: Reads | None, deletions: int) -> None:
        """near: None where it cannot be read. deletions: how many there had been."""
        self._source, self._near, self.deletions = source, near, deletions
        self.fetched: dict[ChunkKey, ChunkRecord] = {}  # that were found there
        self._expected: list[ChunkKey] = []
        self._meanwhile: Meanwhile | None = None
        self._saved: TimeSaved | None = None
        self._looked: dict[ChunkKey, ChunkView | None] = {}  # up here: once, also for who asks again
        self._answers: dict[ChunkKey, Fetched] = {}  # of the remote store
        self._asked: set[ChunkKey] = set()  # of it
        self._damage: dict[ChunkKey, StoreError] = {}  # here
        self._lacking: dict[ChunkKey, Undecodable] = {}  # there
        self._from: dict[ChunkKey, str] = {}

    @property
    def undecodable(self) -> Mapping[ChunkKey, Undecodable]:
        here = self._near.undecodable if self._near else {}
        return {key: why for key, why in {**here, **self._lacking}.items() if key not in self._from}

    def expect(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None = None, saved: TimeSaved | None = None
    ) -> None:
        self._expected, self._meanwhile, self._saved = list(keys), meanwhile, saved or self._saved
        if self._near:
            self._near.expect(keys)

    def tier(self, key: ChunkKey) -> str:
        return self._from.get(key) or (self._near.tier(key) if self._near else REMOTE)

    def get(self, key: ChunkKey) -> ChunkView | None:
        view = self._here(key)
        if view is None and (view := self._there(key)) is None and key in self._damage:
            raise unraised(self._damage[key])
        return view

    def _here(self, key: ChunkKey) -> ChunkView | None:
        """In the own store, or on its way to it."""
        if key not in self._looked:
            self._looked[key] = self._near_view(key) or self._kept_view(key)
        return self._looked[key]

    def _near_view(self, key: ChunkKey) -> ChunkView | None:
        try:
            return self._near.get(key) if self._near else None
        except StoreError as error:  # damaged or unreadable: the remote store may have it whole
            if isinstance(error, CorruptRecord | StoreVersion):
                self._damage[key] = unraised(error)
            return None

    def _kept_view(self, key: ChunkKey) -> ChunkView | None:
        record = self._source.arriving(key)
        fetched = self._view(key, record) if record else None
        if fetched:
            self._from[key] = "memory"
        return fetched

    def _there(self, key: ChunkKey) -> ChunkView | None:
        """In the remote store, which is asked for all that is expected and lacking at once."""
        if key not in self._asked:
            keys = [k for k in dict.fromkeys((*self._expected, key)) if k not in self._asked]
            lacking = [k for k in keys if k == key or self._here(k) is None]
            self._asked.update(lacking)
            self._answers |= self._source.fetch(lacking, self._meanwhile, self._saved)
        answer = self._answers.get(key)
        view = self._view(key, answer) if isinstance(answer, ChunkRecord) else None
        self._source.count("hits" if view else "misses")
        if view and isinstance(answer, ChunkRecord):
            self.fetched[key], self._from[key] = answer, REMOTE
        elif isinstance(answer, Undecodable):
            self._lacking[key] = answer
        elif isinstance(answer, StoreError):
            raise unraised(answer)
        return view

    def _view(self, key: ChunkKey, record: ChunkRecord) -> ChunkView | None:
        try:
            return self._source.view(record)
        except Undecodable as error:
            self._lacking[key] = unraised(error)
            return None
