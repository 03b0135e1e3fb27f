"""Where chunks of another machine come from: the contract, and any store as a source.

fetch/kdn/ has the source over HTTP, integrations/moq one over MoQ.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Protocol

from blendserve.errors import CorruptRecord, StoreError, StoreVersion, unraised
from blendserve.fetch.incoming import ChunkRequest, IncomingChunk
from blendserve.fetch.link import LinkEstimator, LinkSample, TokenRate
from blendserve.store import ChunkKey, ChunkRecord, KVStore, Miss
from blendserve.store.blobs import BlobReader
from blendserve.store.bounded import Breaker
from blendserve.store.clock import TimeSource
from blendserve.store.codecs.base import UNREACHABLE
from blendserve.store.record import decode_header
from blendserve.store.valkey import ValkeyStore
from blendserve.store.valkey_client import Client
from blendserve.store.valkey_layout import HEADER, chunk_name, on_chunk, run_each, segment_name

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
    max_interleaved: int  # chunks that one transfer can bring layer by layer; 0: chunks arrive whole
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

    def probe(self, keys: Sequence[ChunkKey], n_bytes: int) -> LinkSample | None:
        """Transfer about this number of bytes of one of these, or of any chunk if none is named; None if it is absent.

        Raises StoreError.
        """

    def close(self) -> None: ...


class StoreSource:
    """A store that other machines use, too. Chunks arrive whole, in batches."""

    name = "the remote KV store"
    deadline_s = float("inf")
    wanted_s, workers, max_interleaved = 0.0, WORKERS, 0

    def __init__(self, store: KVStore, breaker: Breaker | None = None, clock: TimeSource = time) -> None:
        self.store, self.link = store, LinkEstimator(clock)
        self.blobs: BlobReader = store.blobs
        self.batch_bytes = self.in_flight_bytes = 1 << 62
        self._breaker, self._token_bytes = breaker, TokenRate()

    @staticmethod
    def of(store: KVStore, breaker: Breaker | None = None, clock: TimeSource = time) -> StoreSource:
        """The source for this kind of store."""
        if isinstance(store, ValkeyStore):
            return ValkeySource(store, breaker, clock)
        return StoreSource(store, breaker, clock)

    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        with self._call():
            return self.store.contains(keys)

    def sizes(self, requests: Sequence[ChunkRequest]) -> Mapping[ChunkKey, Mapping[str, int]]:
        """Estimates, of all of them."""
        per_token = self._token_bytes.per_token or 0
        return {r.key: {ANY: round(per_token * r.n_tokens) or GUESS_BYTES} for r in requests}

    def transfer(self, batch: Sequence[IncomingChunk]) -> None:
        try:
            with self._call(), self.link.transfer():
                found = self.read([chunk.key for chunk in batch])
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

    def read(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, ChunkRecord | StoreError]:
        """Records of chunks that are there, checked, or why one cannot be read. Raises StoreError."""
        found: dict[ChunkKey, ChunkRecord | StoreError] = {}
        with self.store.snapshot() as snapshot:
            for key in keys:
                try:
                    if record := snapshot.get(key):
                        found[key] = record.copy()
                except (CorruptRecord, StoreVersion) as error:
                    found[key] = unraised(error)
        return found

    def interrupt(self, late: bool) -> str:
        return f"{self.name} does not answer"

    def probe(self, keys: Sequence[ChunkKey], n_bytes: int) -> LinkSample | None:
        """Time the first of these chunks that is there."""
        with self._call():
            return self._probe(list(keys or islice(self.store.keys(), PROBED)), n_bytes)

    def _probe(self, keys: Sequence[ChunkKey], n_bytes: int) -> LinkSample | None:
        """A whole chunk."""
        now = self.link.clock.monotonic
        for key in keys:
            start = now()
            if isinstance(record := self.read([key]).get(key), ChunkRecord):
                self._token_bytes.record(record.n_bytes, record.n_tokens)
                return LinkSample(0.0, now() - start, record.n_bytes)
        return None

    def close(self) -> None:
        """The store is its opener's."""

    def _call(self) -> AbstractContextManager[None]:
        return self._breaker.call(reading=True) if self._breaker else nullcontext()


class ValkeySource(StoreSource):
    """Chunks on a Valkey server: a batch takes one round trip."""

    store: ValkeyStore

    def __init__(self, store: ValkeyStore, breaker: Breaker | None = None, clock: TimeSource = time) -> None:
        super().__init__(store, breaker, clock)
        self.deadline_s, self.name = store.config.deadline_s, store.config.server
        self.in_flight_bytes = store.config.in_flight_mb * 1_000_000
        self.batch_bytes = self.in_flight_bytes // self.workers

    def read(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, ChunkRecord | StoreError]:
        return self.store.read(keys)

    def interrupt(self, late: bool) -> str:
        return self.store.client.interrupt(late, reading=True).public_message

    def _probe(self, keys: Sequence[ChunkKey], n_bytes: int) -> LinkSample | None:
        """Headers, which take a round trip, then the first layers of one chunk: a whole one may take too long."""

        def job(client: Client) -> LinkSample | None:
            client.ping()  # or connecting would be timed
            start = time.perf_counter()
            headers = run_each(client, keys, on_chunk("hget", HEADER))
            round_trip_s = time.perf_counter() - start
            for key, raw in zip(keys, headers, strict=True):
                if raw:
                    header = decode_header(key, raw)
                    self._token_bytes.record(header.n_bytes, header.shape.n_tokens)
                    n_layers = header.shape.n_layers
                    n = max(1, min(n_layers, n_bytes * n_layers // max(1, header.n_bytes)))
                    start = time.perf_counter()
                    segments = client.hmget(chunk_name(key), [segment_name(l) for l in range(n)])
                    seconds = time.perf_counter() - start
                    sample = LinkSample(round_trip_s, seconds, sum(header.lengths[:n]))
                    return None if None in segments else sample
            return None

        return self.store.client.ask(job)
