"""The contract of a source of chunks on another machine, and any store as a source.

fetch/kdn/ has the source over HTTP, integrations/moq one over MoQ.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Protocol

from blendserve.errors import CorruptRecord, StoreError
from blendserve.fetch.incoming import ChunkRequest, IncomingChunk
from blendserve.fetch.link import LinkEstimator, TokenRate
from blendserve.store import ChunkKey, ChunkRecord, KVStore, Miss
from blendserve.store.base import ReadTime
from blendserve.store.blobs import BlobReader
from blendserve.store.bounded import Breaker
from blendserve.store.clock import TimeSource
from blendserve.store.codecs.base import UNREACHABLE

GUESS_BYTES = 16 << 20  # of a record, until one was read
WORKERS = 4
PROBED = 16  # chunks that a probe looks for, if none are named
ANY = ""  # the level of a chunk that comes as it is stored


class RemoteSource(Protocol):
    """Chunks on another machine. Its methods block; `transfer` is called from the fetcher's transfer threads."""

    name: str  # in messages
    deadline_s: float  # that a request waits in all
    wanted_s: float  # time in which all chunks of a request are to arrive; 0: as soon as possible
    workers: int  # transfers at a time
    batch_bytes: int  # of chunks that are asked for together, whole; 0: one by one
    max_parallel: int  # chunks that `transfer` can bring at a time, layer by layer; 0: chunks arrive whole
    in_flight_bytes: int  # of chunks in one transfer
    link: LinkEstimator
    blobs: BlobReader

    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """The chunks that are there; may take a round trip. Raises StoreError."""

    def sizes(self, requests: Sequence[ChunkRequest]) -> Mapping[ChunkKey, Mapping[str, int]]:
        """Bytes by level, the finest first, of chunks that may be there: known ones, or estimates. Raises StoreError."""

    def transfer(self, batch: Sequence[IncomingChunk]) -> None:
        """Read chunks, each at its `level`, and tell the link. Chunks that are left undone are asked for one by one."""

    def interrupt(self, late: bool) -> str:
        """Make every transfer fail at once, from any thread -> why, if late: it counts as a failure then."""

    def probe(self, keys: Sequence[ChunkKey], n_bytes: int) -> ReadTime | None:
        """Transfer about this number of bytes of one of these, or of any chunk if none is named; None if it is absent.

        Raises StoreError.
        """

    def close(self) -> None: ...


class StoreSource:
    """A store that other machines use, too. Chunks arrive whole, in batches."""

    wanted_s = 0.0
    workers = WORKERS
    max_parallel = 0

    def __init__(self, store: KVStore, breaker: Breaker | None = None, clock: TimeSource = time) -> None:
        self.store = store
        self.link = LinkEstimator(clock)
        self.name = store.name
        self.deadline_s = store.deadline_s
        self.blobs: BlobReader = store.blobs
        self.in_flight_bytes = store.in_flight_bytes
        self.batch_bytes = store.in_flight_bytes // WORKERS
        self._breaker = breaker
        self._token_bytes = TokenRate()

    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        with self._call():
            return self.store.contains(keys)

    def sizes(self, requests: Sequence[ChunkRequest]) -> Mapping[ChunkKey, Mapping[str, int]]:
        """Estimate the sizes of all chunks."""
        per_token = self._token_bytes.per_token or 0
        return {r.key: {ANY: round(per_token * r.n_tokens) or GUESS_BYTES} for r in requests}

    def transfer(self, batch: Sequence[IncomingChunk]) -> None:
        try:
            with self._call(), self.link.transfer():
                found = self.store.read([chunk.key for chunk in batch])
                self.link.arrived(sum(r.n_bytes for r in found.values() if isinstance(r, ChunkRecord)))
        except StoreError as error:
            for chunk in batch:
                chunk.end(Miss(UNREACHABLE, error.public_message))
            return
        for chunk in batch:
            record = found.get(chunk.key)
            if isinstance(record, ChunkRecord):
                self._token_bytes.record(record.n_bytes, record.n_tokens)
                chunk.report = record.report
                chunk.begin(record.header)
                for segment in record.segments():
                    chunk.add(segment)
            elif record:
                chunk.end(Miss("corrupt", record.what if isinstance(record, CorruptRecord) else str(record)))
            else:
                chunk.end(Miss("absent"))

    def interrupt(self, late: bool) -> str:
        return self.store.interrupt(late)

    def probe(self, keys: Sequence[ChunkKey], n_bytes: int) -> ReadTime | None:
        """Time the first of these chunks that is there."""
        with self._call():
            wanted = list(keys or islice(self.store.keys(), PROBED))
            found = self.store.time_read(wanted, n_bytes, self.link.clock.monotonic)
        if found and found.header:
            self._token_bytes.record(found.header.n_bytes, found.header.shape.n_tokens)
        return found

    def close(self) -> None:
        """The store is its opener's."""

    def _call(self) -> AbstractContextManager[None]:
        return self._breaker.call(reading=True) if self._breaker else nullcontext()
