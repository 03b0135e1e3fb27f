"""Chunk KV of one collection, delivered by a service over HTTP: a store to read from, behind or instead of one's own.

What it knows of the collection (its description and directory) is read when it opens and now and then anew, so that what
the collection lacks costs no request. As with any store on another machine, whatever the service does, or does not,
costs a request at most the deadline: what cannot be had in time is a miss. Nothing is written to it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from blendserve.config import KdnConfig, PlaceConfig
from blendserve.errors import CorruptRecord, StoreError, StoreUnavailable, StoreVersion
from blendserve.registry import DELIVERED
from blendserve.store.base import (
    ChunkInfo,
    KVStore,
    Progress,
    Snapshot,
    StoreStats,
    VerifyReport,
    make_stats,
    read_record,
)
from blendserve.store.blobs import BlobInfo, BlobStore, check_blob
from blendserve.store.clock import Clock
from blendserve.store.codecs.base import Tables, Undecodable
from blendserve.store.kdn.adapt import Rule, fixed, quickest
from blendserve.store.kdn.client import Client, KdnPeer, NotThere, WrongReply, fill
from blendserve.store.kdn.collection import Collection, Directory, Entry, read_directory
from blendserve.store.kdn.fetch import Fetch
from blendserve.store.kdn.moq_reader import MoqReader
from blendserve.store.kdn.pace import Pace
from blendserve.store.key import ChunkKey, namespace_tag
from blendserve.store.ledger import Totals
from blendserve.store.network.connection import Connection
from blendserve.store.network.failed import Failed
from blendserve.store.network.snapshot import NetworkSnapshot
from blendserve.store.policies import Always, Policies
from blendserve.store.record import ChunkRecord
from blendserve.store.request_reads import REMOTE, Sample, TimeSaved
from blendserve.store.usage import UsageLog

AUTO = "auto"
FRESH_S = 10.0  # a description is believed for so long
MOST_DESCRIPTION = 16 << 20  # bytes
TELLING_S = 0.02  # of transfer, behind the round trip
ROUND_TRIPS = 3  # the least counts: a service may have to fetch what it is asked for first
WORKERS = (
    2  # chunks under way at a time: with more, less is left to choose anew, to compute, and to decode ahead
)

T = TypeVar("T")


class KdnStore(KVStore):
    """A KVStore of what a service delivers of one collection; it opens whether the service is there or not."""

    persistent, needs_folder = False, False
    kind, read_only, tells_ids = DELIVERED, True, False

    def __init__(
        self,
        config: KdnConfig,
        rule: Rule | None = None,
        workers: int = WORKERS,
        pace: Pace | None = None,
        early: bool = True,
        saved: TimeSaved | None = None,
        clock: Clock = time,
    ) -> None:
        """rule: chooses levels, in place of the settings'. pace: what another store has learnt of the link. early: let
        a prefill begin before all chunks are here. saved: of requests that do not say what stored KV saves them.
        clock: of pauses, of the deadline and of the link's rate."""
        self.config = config
        self.location, self.cap_bytes = f"{config.url}/{config.collection}", 0
        self.blobs = _Blobs(self)
        self._rule = rule or (quickest if config.level == AUTO else fixed(config.level))
        self._early, self._saved = early, saved
        self._connection = Connection(KdnPeer(config), workers, clock)
        self._usage = UsageLog(Always(), clock)
        self._failed = Failed(now=clock.monotonic)
        self.pace = pace or Pace(clock)
        self._clock = clock
        self._relay = MoqReader(config.relay, config.relay_fingerprint) if config.relay else None
        self._known: tuple[Collection, Directory] | None = None
        self._looked = float("-inf")
        self._looking = threading.Lock()
        self._closed = False

    @classmethod
    def from_config(
        cls, config: PlaceConfig, path: Path | None, read_only: bool, policies: Policies
    ) -> KdnStore:
        """A service that cannot be reached is told, and no error: chunks count as missing until it answers."""
        store = cls(config.kdn)
        with contextlib.suppress(StoreUnavailable):  # the breaker has said it
            store._connection.ask(store._look)
        return store

    @contextmanager
    def reading(self) -> Iterator[NetworkSnapshot]:
        self._refuse_closed()
        fetch = Fetch(
            self.config,
            self._rule,
            self.pace,
            self._look,
            self.read_tables,
            self._relay,
            self._early,
            # Other rules choose for one chunk after the other.
            self._fresh if self.compares_cost else lambda: None,
            self._saved,
        )
        snapshot = NetworkSnapshot(
            self._connection, fetch, self._usage, self._failed, OneByOne(), self._clock
        )
        try:
            yield snapshot
        finally:
            snapshot.end()

    @property
    def far(self) -> bool:
        return True

    @property
    def collection(self) -> Collection:
        """As it is now. Raises StoreUnavailable."""
        return self._ask(self._look)[0]

    @property
    def compares_cost(self) -> bool:
        return self._rule is quickest

    def sample(self, keys: Sequence[ChunkKey], n_bytes: int) -> Sample | None:
        """Of a typical chunk of the collection. Learns what decoding takes as well, the first time."""

        def job(client: Client) -> Sample | None:
            collection, directory = self._look(client)
            if not directory:
                return None
            typical = sorted(directory, key=lambda key: directory[key].n_tokens)[len(directory) // 2]
            sample = self._sample(client, typical, directory[typical], n_bytes)
            if self.compares_cost:
                with contextlib.suppress(CorruptRecord, StoreVersion, Undecodable):  # a request will say it
                    self._learn_decoding(client, typical, collection, directory[typical])
            return sample if any(key in directory for key in keys) else None

        return self._ask(job)

    def _learn_decoding(self, client: Client, key: ChunkKey, collection: Collection, entry: Entry) -> None:
        """At every level but the first."""
        sizes = dict(zip(collection.levels[1:], entry.bodies[1:], strict=True))
        most, deadline = self.config.in_flight_mb * 1e6, self.config.deadline_s
        self.pace.learn_decoding(client, key, sizes, most, deadline, self._tables_by(client))

    def _sample(self, client: Client, key: ChunkKey, entry: Entry, n_bytes: int) -> Sample:
        """At least so many bytes, and more where they come too quickly to tell a rate."""
        path, body = client.path("chunks", key.hex()), entry.bodies[0]
        round_trips = []
        for _ in range(ROUND_TRIPS):
            start = self._clock.monotonic()
            client.get(path, body, {"Range": "bytes=0-0"})
            round_trips.append(self._clock.monotonic() - start)
        round_trip = self.pace.round_trip = min(round_trips)
        while True:
            got = bytearray(max(1, min(n_bytes, body)))
            some = {"Range": f"bytes=0-{len(got) - 1}"}
            start = self._clock.monotonic()
            with self.pace.transfer(), client.asked(path, some) as reply:
                fill(reply, memoryview(got))
                self.pace.arrived(len(got))
            seconds = self._clock.monotonic() - start
            if seconds - round_trip >= TELLING_S or len(got) == body:
                return Sample(round_trip, seconds, len(got) / body, entry.n_tokens)
            n_bytes *= 2

    def present(self, keys: Iterable[ChunkKey], remote: bool = True) -> set[ChunkKey]:
        """By the directory, without a round trip unless that is to be read anew."""
        asked = list(keys) if remote else []
        return set(asked) & self._ask(self._look)[1].keys() if asked else set()

    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        return self.present(keys)

    def describe(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        """Of the first level; what it takes uncoded is not told."""
        collection, directory = self._ask(self._look)
        return {
            key: ChunkInfo(found.n_tokens, found.bodies[0], found.bodies[0], collection.pinned, tier=REMOTE)
            for key in keys
            if (found := directory.get(key))
        }

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        self._refuse_closed()
        yield _Records(self)

    def record(self, key: ChunkKey) -> ChunkRecord | None:
        """A chunk, read whole now. Raises CorruptRecord, StoreVersion, StoreUnavailable."""
        fetch = Fetch(self.config, self._rule, self.pace, self._look, self.read_tables, self._relay)
        reply = self._connection.ask(lambda client: fetch.read(client, [key]))[0]
        if reply is None:
            return None
        try:
            header, segments = fetch.checked(key, reply)
        except Undecodable as error:
            raise StoreUnavailable(str(error)) from None
        return ChunkRecord(key, header, segments.__getitem__, trusted=True)

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        tag = namespace_tag(namespace)
        return iter(sorted(key for key in self._ask(self._look)[1] if key.startswith(tag)))

    def stats(self, namespace: str | None = None) -> StoreStats:
        """Of the collection, without a call while what is known is fresh; look-ups are those of this process."""
        collection, directory = self.known()
        tag = namespace_tag(namespace)
        entries = [entry for key, entry in directory.items() if key.startswith(tag)]
        n, n_bytes = len(entries), sum(entry.bodies[0] for entry in entries)
        n_tokens, n_pins = sum(entry.n_tokens for entry in entries), n * collection.pinned
        self.cap_bytes = collection.n_bytes
        totals = Totals(n, n_tokens, n_bytes, n_bytes, n_pins)
        return make_stats(self, totals, self._usage.counts(tag), namespace, self.blobs.list())

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        keys, good, bad = list(self.keys()), 0, []
        for done, key in enumerate(keys, start=1):
            try:
                good += read_record(self, key) is not None
            except StoreError as error:
                bad.append((key.hex(), str(error)))
            if progress:
                progress(done, len(keys))
        return VerifyReport(good, tuple(bad))

    # Nothing is written

    def put(self, key: ChunkKey, record: ChunkRecord, pin: bool = False) -> bool:
        return False

    def admits(self, key: ChunkKey, n_bytes: int) -> bool:
        return False

    def pin(self, keys: Iterable[ChunkKey], pinned: bool = True) -> int:
        return 0

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        raise self.only_read()

    def lease(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        return set(keys)

    def release(self, keys: Iterable[ChunkKey]) -> None:
        """No lease is kept."""

    def close(self) -> None:
        self._closed = True
        self._connection.close()
        if self._relay:
            self._relay.close()

    # What is known of the collection

    def known(self) -> tuple[Collection, Directory]:
        """Without a call while it is fresh: a prefill asks, and all workers may be busy with its chunks."""
        self._refuse_closed()
        return self._fresh() or self._ask(self._look)

    def _fresh(self) -> tuple[Collection, Directory] | None:
        """What is known and not old."""
        return self._known if self._clock.monotonic() - self._looked < FRESH_S else None

    def _look(self, client: Client) -> tuple[Collection, Directory]:
        """Description and directory, read anew when they are old. Raises what the client does."""
        with self._looking:
            known = self._fresh()
            if known is None:
                known = self._known = _read(client, self._known)
                self._looked = self._clock.monotonic()
            return known

    def read_tables(self, hash: bytes, seconds: float) -> bytes | None:
        """Raises CorruptBlob, StoreUnavailable."""
        raw = self._connection.ask(partial(self._tables_of, hash=hash), seconds)
        return None if raw is None else check_blob(hash, raw)

    def _tables_by(self, client: Client) -> Tables:
        def read(hash: bytes) -> bytes | None:
            raw = self._tables_of(client, hash)
            return None if raw is None else check_blob(hash, raw)

        return read

    def _tables_of(self, client: Client, hash: bytes) -> bytes | None:
        """As they come. Raises what the client does."""
        known = next((t for t in self._look(client)[0].tables if t.hash == hash.hex()), None)
        return client.get(client.path("tables", known.hash), known.n_bytes) if known else None

    def _ask(self, job: Callable[[Client], T]) -> T:
        self._refuse_closed()
        return self._connection.ask(job)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"the store at {self.config.where} is closed: open it again")

    def only_read(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self.config.server} is for reading: publish anew with `blendserve kdn publish`, or retire the collection"
        )


class _Records:
    """Chunks of a collection as a Snapshot gives them."""

    def __init__(self, store: KdnStore) -> None:
        self._store = store

    def get(self, key: ChunkKey, count: bool = True) -> ChunkRecord | None:
        return self._store.record(key)


class _Blobs(BlobStore):
    """The tables of a collection."""

    def __init__(self, store: KdnStore) -> None:
        self._store = store

    def get(self, hash: bytes) -> bytes | None:
        return self._store.read_tables(hash, self._store.config.deadline_s)

    def list(self) -> Sequence[BlobInfo]:
        tables = self._store.known()[0].tables
        return [BlobInfo(bytes.fromhex(t.hash), t.codec, t.fingerprint, t.n_bytes, 0) for t in tables]

    def put(self, kind: str, owner: str, raw: bytes, current: bool = True) -> bytes:
        raise self._store.only_read()

    def delete(self, hash: bytes) -> bool:
        raise self._store.only_read()


class OneByOne:
    """Chunks to ask for at a time: each has its own answer, and its own choice of a level."""

    batch = 1

    def saw(self, n_bytes: int) -> None:
        """Nothing depends on it."""


def _read(client: Client, known: tuple[Collection, Directory] | None) -> tuple[Collection, Directory]:
    """The description, and the directory where it has changed. Raises what the client does."""
    try:
        collection = Collection.from_json(client.get(client.path(), MOST_DESCRIPTION))
        if known and known[0].directory == collection.directory:
            return collection, known[1]
        raw = client.get(client.path("directory"), collection.directory.n_bytes)
        return collection, read_directory(raw, len(collection.levels))
    except (NotThere, OSError):  # one of TLS is a ValueError as well
        raise
    except ValueError as error:
        raise WrongReply(str(error)) from error
