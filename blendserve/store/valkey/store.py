"""Chunk KV on a Valkey or Redis server, shared by any number of engines on any number of machines.

names.py says what lies where. Whatever the server does, or does not, costs a request at most the deadline: what cannot be
had in time is a miss (snapshot.py, connection.py), what cannot be stored is an error that callers expect of any store.

The cap is a quota of each namespace. The server's own `maxmemory` is its operator's: under `volatile-lru` or
`volatile-lfu` it evicts chunks, whole, and never pinned ones, as those do not expire.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from blendserve.config import PlaceConfig, ValkeyConfig
from blendserve.errors import CorruptRecord, StoreError, StoreFull, StoreUnavailable, StoreVersion
from blendserve.store import record
from blendserve.store.base import (
    ChunkInfo,
    KVStore,
    Progress,
    Snapshot,
    StoreStats,
    VerifyReport,
    make_stats,
    store_full,
)
from blendserve.store.clock import Clock
from blendserve.store.key import TAG_BYTES, ChunkKey, namespace_tag
from blendserve.store.ledger import Totals
from blendserve.store.network.connection import Connection
from blendserve.store.network.failed import Failed
from blendserve.store.network.snapshot import NetworkSnapshot, Sizes
from blendserve.store.policies import Admission, Always, Candidate, Eviction, Policies, Refuse
from blendserve.store.record import ChunkRecord
from blendserve.store.request_reads import REMOTE, Sample
from blendserve.store.usage import Notes, UsageLog
from blendserve.store.valkey import chunks
from blendserve.store.valkey.client import Client, ValkeyPeer
from blendserve.store.valkey.leases import Leases
from blendserve.store.valkey.ledger import SCAN_S, Entered, Entry, Ledger
from blendserve.store.valkey.names import CHUNK, chunk_key_of
from blendserve.store.valkey.source import Source
from blendserve.store.valkey.tables import ServerBlobs

NOTE_EVERY_S = 60.0
TRIES = 8  # at a quota that other processes fill at the same time


class ValkeyStore(KVStore):
    """A KVStore on the server that the settings name, of at most `cap_bytes` of chunks a namespace, as stored.

    It opens whether the server is there or not. `read_only` writes nothing, notes of use included. Raises
    StoreUnavailable where the client's package is missing.
    """

    persistent, needs_folder = True, False
    kind = "valkey"

    def __init__(
        self,
        config: ValkeyConfig,
        cap_bytes: int,
        read_only: bool = False,
        eviction: Eviction | None = None,
        admission: Admission | None = None,
        clock: Clock = time,
    ) -> None:
        self.config, self.cap_bytes, self.read_only = config, cap_bytes, read_only
        self._eviction = eviction or Refuse()
        self._admission = admission or Always()
        self._clock = clock
        self.location = config.url
        self._usage = UsageLog(self._admission, clock)
        self._connection = Connection(ValkeyPeer(config), clock=clock)
        self._ledger = Ledger(self._connection, clock)
        self._leases = Leases(self._connection)
        self.blobs: ServerBlobs = ServerBlobs(self._connection, self._usage, self._check)
        self._failed = Failed(now=clock.monotonic)
        self._sizes = Sizes(config.in_flight_mb * 1_000_000, self._connection.workers)
        self._noted, self._counted = clock.monotonic(), float("-inf")
        self._closed = False

    @classmethod
    def from_config(
        cls, config: PlaceConfig, path: Path | None, read_only: bool, policies: Policies
    ) -> ValkeyStore:
        """A server that cannot be reached is told, and no error: chunks count as missing until it answers."""
        store = cls(config.valkey, config.cap_bytes, read_only, *policies)
        with contextlib.suppress(StoreUnavailable):  # the breaker has said it
            store._connection.ask(lambda client: client.ping())
        return store

    @contextmanager
    def reading(self) -> Iterator[NetworkSnapshot]:
        self._refuse_closed()
        source = Source(self.blobs)
        snapshot = NetworkSnapshot(self._connection, source, self._usage, self._failed, self._sizes)
        try:
            yield snapshot
        finally:
            snapshot.end()
        if self._clock.monotonic() - self._noted > NOTE_EVERY_S:
            self._noted = self._clock.monotonic()
            threading.Thread(target=self._write_notes, daemon=True).start()  # no request waits for it

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        self._refuse_closed()
        yield _Records(self)

    def record(self, key: ChunkKey, count: bool) -> ChunkRecord | None:
        """A chunk, read whole now. Raises CorruptRecord, StoreVersion, StoreUnavailable."""
        self._refuse_closed()
        fields = self._connection.ask(lambda client: chunks.read(client, [key]))[0]
        try:
            found = chunks.checked_record(key, fields) if fields else None
        except CorruptRecord:
            if count:
                self._usage.count(key, "corrupt")
            raise
        if count:
            (self._usage.hit if found else self._usage.miss)(key)
        return found and replace(found, report=partial(self._usage.report, key))

    def put(self, key: ChunkKey, record: ChunkRecord, pin: bool = False) -> bool:
        self._refuse_writing()
        record = record.for_key(key)
        entered = self._enter(key, Entry.of(record.header), pin)
        if entered is None:
            return False
        self._write(record, entered)
        self._failed.forget(key)
        return True

    def admits(self, key: ChunkKey, n_bytes: int) -> bool:
        self._refuse_closed()
        expected = Entry(n_bytes, n_bytes, 0, 0)
        entered = self._ledger.enter(key, expected, 0, False, self.cap_bytes, dry=True)
        try:
            return entered.lacking <= 0 or self._victims(key, expected, entered, pin=False) is not None
        except StoreFull:
            return False

    @property
    def far(self) -> bool:
        return True

    def sample(self, keys: Sequence[ChunkKey], n_bytes: int) -> Sample | None:
        self._refuse_closed()
        return self._connection.ask(partial(chunks.sample, keys=keys, n_bytes=n_bytes))

    def lease(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        self._refuse_closed()
        return self._leases.take(keys, seconds)

    def release(self, keys: Iterable[ChunkKey]) -> None:
        self._leases.release(keys)

    def pin(self, keys: Iterable[ChunkKey], pinned: bool = True) -> int:
        self._refuse_writing()
        present = list(self.contains(keys))
        self._ledger.pin(present, pinned)
        self._connection.ask(lambda client: chunks.keep(client, present, pinned))
        return len(present)

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        self._refuse_writing()
        asked = list(keys)
        there = self._connection.ask(lambda client: chunks.drop(client, asked))
        self._ledger.strike(asked)
        return there

    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        self._refuse_closed()
        asked = list(keys)
        found = self._connection.ask(lambda client: chunks.there(client, asked)) if asked else []
        return {key for key, is_there in zip(asked, found, strict=True) if is_there}

    def present(self, keys: Iterable[ChunkKey], remote: bool = True) -> set[ChunkKey]:
        return self.contains(keys) if remote else set()

    def describe(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        self._refuse_closed()
        asked, found = list(keys), dict[ChunkKey, ChunkInfo]()
        told = self._connection.ask(partial(chunks.headers_and_pins, keys=asked)) if asked else []
        for key, (raw, pinned) in zip(asked, told, strict=True):
            with contextlib.suppress(CorruptRecord, StoreVersion):
                if raw is not None:
                    info = ChunkInfo.of(record.decode_header(key, raw), pinned)
                    found[key] = replace(info, tier=REMOTE)
        return found

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        return iter(sorted(key for tag in self._tags(namespace) for key in self._ledger.keys(tag)))

    def stats(self, namespace: str | None = None) -> StoreStats:
        """Of the entries. Those whose chunks the server has evicted are looked for once a minute, and by `verify`."""
        if self._clock.monotonic() - self._counted >= NOTE_EVERY_S:
            self._strike_lost()
        total, counts = Totals(), self._usage.counts(namespace_tag(namespace))
        for tag in self._tags(namespace):
            pins, entries = self._ledger.pins(tag), self._ledger.entries(tag)
            parts = ((1, e.n_tokens, e.n_bytes, e.raw_bytes, key in pins) for key, e in entries.items())
            total = Totals(*map(sum, zip(total, *parts, strict=True)))
            counts += self._ledger.counts(tag)
        return make_stats(self, total, counts, namespace, self.blobs.list())

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Every chunk on the server is looked at, entered or not; its entry is made what it should be.

        Two engines that write one chunk at once, coded in two ways, may leave one's bytes and the other's entry.
        """
        self._strike_lost()
        entries = {key: entry for tag in self._tags(None) for key, entry in self._ledger.entries(tag).items()}
        keys = sorted(entries.keys() | self._scan())
        good, bad = 0, []
        for done, key in enumerate(keys, start=1):
            problem = self._problem(key, entries.get(key))
            good += not problem
            bad += [(key.hex(), problem)] if problem else []
            if progress:
                progress(done, len(keys))
        return VerifyReport(good, tuple(bad), self.blobs.problems())

    def close(self) -> None:
        if not self._closed:
            with contextlib.suppress(StoreError):
                if not self.read_only and self._usage:
                    self._note(self._usage.drain())
            self._closed = True
            self._connection.close()

    def _enter(self, key: ChunkKey, entry: Entry, pin: bool) -> Entered | None:
        """Make room for a chunk and enter it; None where it is not worth its victims. Raises StoreFull."""
        for _ in range(TRIES):
            now = self._usage.now() // 1000
            entered = self._ledger.enter(key, entry, now, pin, self.cap_bytes)
            if entered.lacking <= 0:
                return entered
            victims = self._victims(key, entry, entered, pin)
            if victims is None:
                return None
            entered = self._ledger.enter(key, entry, now, pin, self.cap_bytes, victims)
            if entered.lacking <= 0:
                self._connection.ask(partial(chunks.drop, keys=[victim.key for victim in victims]))
                return entered
        raise StoreUnavailable(f"the quota on {self.config.server} is contended: other engines fill it, too")

    def _victims(self, key: ChunkKey, entry: Entry, entered: Entered, pin: bool) -> list[Candidate] | None:
        """What has to go for a chunk; None where it is not worth that. Raises StoreFull."""
        if self._usage and not self.read_only:
            self._note(self._usage.drain())  # uses in this process count
        oldest = (candidate for candidate in self._ledger.oldest(key[:TAG_BYTES]) if candidate.key != key)
        victims = self._eviction.victims(oldest, entered.lacking)
        if victims is None:
            raise store_full(
                f"the KV store at {self.config.where}", entered.others, entry.n_bytes, self.cap_bytes
            )
        known = pin or entered.layers_before >= 0
        if known or self._admission.admits(key, entry.n_bytes, victims, entered.n_chunks):
            return victims
        self._usage.count(key, "refused")
        return None

    def _write(self, chunk: ChunkRecord, entered: Entered) -> None:
        try:
            self._connection.ask(
                lambda client: chunks.write(
                    client, chunk, bool(entered.pinned), entered.layers_before, self._leases
                )
            )
        except StoreError:
            if entered.layers_before < 0:
                with contextlib.suppress(StoreError):
                    self._ledger.strike([chunk.key])
            raise

    def _problem(self, key: ChunkKey, entry: Entry | None) -> str:
        """What is wrong with a chunk, "" when nothing is. Needs no codec: what cannot be decoded here may be whole."""
        fields = self._connection.ask(lambda client: chunks.read(client, [key]))[0]
        try:
            header, _ = chunks.checked(key, fields)
        except StoreError as error:
            return str(error)
        if len(fields) > header.shape.n_layers + 1:
            return f"it has more layers than the {header.shape.n_layers} of its header"
        counted = entry == Entry.of(header)
        if not counted and not self.read_only:
            self._ledger.enter(key, Entry.of(header), self._usage.now() // 1000, False, 1 << 62)
        return "" if counted or entry is None or not self.read_only else "it is counted as of another size"

    def _scan(self) -> set[ChunkKey]:
        def job(client: Client) -> set[ChunkKey]:
            names = client.scan_iter(match=CHUNK + b"*", count=1000)
            return {key for name in names if (key := chunk_key_of(name))}

        return self._connection.ask(job, SCAN_S)

    def _tags(self, namespace: str | None) -> list[bytes]:
        self._refuse_closed()
        return self._ledger.namespaces() if namespace is None else [namespace_tag(namespace)]

    def _strike_lost(self) -> None:
        """Stop counting what the server has evicted."""
        if not self.read_only:
            for tag in self._tags(None):
                self._ledger.strike_lost(tag)
        self._counted = self._clock.monotonic()

    def _write_notes(self) -> None:
        """Write what was noted of reads. Nothing is lost but recency and counts if that cannot be done."""
        notes = self._usage.drain()
        if self.read_only:
            self._usage.restore(Notes(counts=notes.counts))  # those who write have uses of their own
            return
        with contextlib.suppress(StoreError):
            self._note(notes)

    def _note(self, notes: Notes) -> None:
        try:
            free = self._ledger.note(notes)
            self._connection.ask(lambda client: chunks.keep(client, free, pinned=False))
        except StoreError:
            self._usage.restore(notes)
            raise

    def _check(self, writing: bool) -> None:
        if writing:
            self._refuse_writing()
        else:
            self._refuse_closed()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"the KV store at {self.config.where} is closed: open it again")

    def _refuse_writing(self) -> None:
        self._refuse_closed()
        if self.read_only:
            raise StoreUnavailable(f"the KV store at {self.config.where} is open for reading only")


class _Records:
    """Chunks on the server as a Snapshot gives them."""

    def __init__(self, store: ValkeyStore) -> None:
        self._store = store

    def get(self, key: ChunkKey, count: bool = True) -> ChunkRecord | None:
        return self._store.record(key, count)
