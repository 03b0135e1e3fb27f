"""Chunk KV on a Valkey or Redis server, shared by any number of engines on any number of machines.

valkey_layout.py says what lies where. A chunk is entered before it is written and removed before it is deleted, so the
quota holds. The server evicts by itself, too, and processes end: entries without chunks are removed by `stats`, once a
minute, and by `verify`.

The cap is a quota of each namespace. The server's `maxmemory` is its operator's: under `volatile-lru` it evicts whole
chunks, never pinned ones, as those do not expire. Whatever the server does costs a request at most the deadline.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from blendserve.config import PlaceConfig, ValkeyConfig
from blendserve.errors import CorruptRecord, StoreError, StoreFull, StoreUnavailable, StoreVersion, unraised
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
from blendserve.store.codecs.base import Buffer
from blendserve.store.key import TAG_BYTES, ChunkKey, namespace_tag
from blendserve.store.ledger import Totals
from blendserve.store.network.connection import Connection
from blendserve.store.network.failed import Failed
from blendserve.store.network.snapshot import NetworkSnapshot, Sizes
from blendserve.store.network.valkey import ValkeySource
from blendserve.store.policies import Admission, Always, Candidate, Eviction, Policies, Refuse
from blendserve.store.record import ChunkRecord, decode_header
from blendserve.store.request_reads import REMOTE, Sample
from blendserve.store.usage import Notes, UsageLog
from blendserve.store.valkey_accounts import ServerAccounts
from blendserve.store.valkey_client import Client, ValkeyPeer
from blendserve.store.valkey_layout import (
    HEADER,
    RELEASE,
    Entry,
    Reserved,
    ServerBlobs,
    checked,
    chunk_name,
    expire,
    lease_name,
    namespace_name,
    persist,
    pins_and_counts,
    read_fields,
    sample,
    scan,
    segment_name,
)

NOTE_EVERY_S = 60.0
TRIES = 8  # at a quota that other processes fill at the same time
SCAN_S = 600.0  # for the names of all chunks


class ValkeyStore(KVStore):
    """A KVStore on the server that the settings name, of at most `cap_bytes` of chunks a namespace, as stored.

    It opens whether the server is there or not. `read_only` writes nothing, notes of use included. Raises
    StoreUnavailable where the client's package is missing.
    """

    kind = "valkey"
    persistent, needs_folder = True, False

    def __init__(
        self,
        config: ValkeyConfig,
        cap_bytes: int,
        read_only: bool = False,
        eviction: Eviction | None = None,
        admission: Admission | None = None,
        clock: Clock = time,
    ) -> None:
        self.config, self.cap_bytes, self.read_only, self.location = config, cap_bytes, read_only, config.url
        self._eviction, self._admission = eviction or Refuse(), admission or Always()
        self._clock, self._usage = clock, UsageLog(self._admission, clock)
        self._connection = Connection(ValkeyPeer(config), clock=clock)
        self._accounts = ServerAccounts(self._connection, cap_bytes, clock)
        self._failed = Failed(now=clock.monotonic)
        self._sizes = Sizes(config.in_flight_mb * 1_000_000, self._connection.workers)
        self._owner, self._leased, self._lock = secrets.token_bytes(16), set[ChunkKey](), threading.Lock()
        self._noted, self._counted = clock.monotonic(), float("-inf")
        self._closed = False
        self.blobs: ServerBlobs = ServerBlobs(self._connection, self._usage, self._check)

    @classmethod
    def from_config(
        cls, config: PlaceConfig, path: Path | None, read_only: bool, policies: Policies
    ) -> ValkeyStore:
        """A server that cannot be reached is told, and no error: chunks count as missing until it answers."""
        store = cls(config.valkey, config.cap_bytes, read_only, *policies)
        with contextlib.suppress(StoreUnavailable):  # the breaker has said it
            store._connection.ask(lambda client: client.ping())
        return store

    def close(self) -> None:
        if not self._closed:
            with contextlib.suppress(StoreError):
                if not self.read_only and self._usage:
                    self._accounts.note(self._usage)
            self._closed = True
            self._connection.close()

    # Reading

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        self._check()
        yield _Records(self)

    def read(self, keys: Sequence[ChunkKey], count: bool = True) -> dict[ChunkKey, ChunkRecord | StoreError]:
        """Those that are there, or why one cannot be read; one round trip. count: as uses. Raises StoreUnavailable."""
        self._check()
        found: dict[ChunkKey, ChunkRecord | StoreError] = {}
        hashes = self._connection.ask(partial(read_fields, keys=keys)) if keys else []
        for key, fields in zip(keys, hashes, strict=True):
            try:
                if fields:
                    found[key] = replace(checked(key, fields), report=partial(self._usage.report, key))
                if count:
                    (self._usage.hit if fields else self._usage.miss)(key)
            except (CorruptRecord, StoreVersion) as error:
                found[key] = unraised(error)
                if count and isinstance(error, CorruptRecord):
                    self._usage.count(key, "corrupt")
        return found

    @contextmanager
    def reading(self) -> Iterator[NetworkSnapshot]:
        self._check()
        source = ValkeySource(self.blobs.read, read_fields, checked)
        snapshot = NetworkSnapshot(self._connection, source, self._usage, self._failed, self._sizes)
        try:
            yield snapshot
        finally:
            snapshot.end()
        if self._clock.monotonic() - self._noted > NOTE_EVERY_S:
            self._noted = self._clock.monotonic()
            threading.Thread(target=self._write_notes, daemon=True).start()  # no request waits for it

    @property
    def far(self) -> bool:
        return True

    def sample(self, keys: Sequence[ChunkKey], n_bytes: int) -> Sample | None:
        self._check()
        return self._connection.ask(partial(sample, keys=keys, n_bytes=n_bytes))

    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        self._check()
        return self._accounts.stored(keys)

    def present(self, keys: Iterable[ChunkKey], remote: bool = True) -> set[ChunkKey]:
        return self.contains(keys) if remote else set()

    def describe(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        self._check()
        asked, found = list(keys), dict[ChunkKey, ChunkInfo]()

        def ask(pipeline: Client, key: ChunkKey) -> None:
            pipeline.hget(chunk_name(key), HEADER)
            pipeline.sismember(namespace_name(key[:TAG_BYTES], "pins"), key)

        told = self._accounts.each(asked, ask)
        for key, raw, pinned in zip(asked, told[::2], told[1::2], strict=True):
            with contextlib.suppress(CorruptRecord, StoreVersion):
                if isinstance(raw, bytes):
                    found[key] = replace(ChunkInfo.of(decode_header(key, raw), bool(pinned)), tier=REMOTE)
        return found

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        """In pages: the server answers others between them."""
        self._check()
        tags = self._accounts.tags(namespace)

        def job(client: Client) -> list[ChunkKey]:
            scans = (client.hscan_iter(namespace_name(tag, "entries"), count=1000) for tag in tags)
            return sorted({key for scan in scans for key, _ in scan})

        return iter(self._connection.ask(job, SCAN_S))

    # Writing

    def put(self, key: ChunkKey, record: ChunkRecord, pin: bool = False) -> bool:
        self._check(writing=True)
        record = record.for_key(key)
        reserved = self._reserve(key, Entry.of(record), pin)
        if reserved is None:
            return False
        try:
            self._connection.ask(partial(self._write, record=record, reserved=reserved))
        except StoreError:
            if reserved.layers_before < 0:
                with contextlib.suppress(StoreError):
                    self._accounts.remove([key])
            raise
        self._failed.forget(key)
        return True

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        self._check(writing=True)
        asked = list(keys)
        there = sum(map(int, self._accounts.each(asked, lambda p, key: p.unlink(chunk_name(key)))))
        self._accounts.remove(asked)
        return there

    def pin(self, keys: Iterable[ChunkKey], pinned: bool = True) -> int:
        self._check(writing=True)
        present = sorted(self.contains(keys))
        self._accounts.touch("pin" if pinned else "unpin", dict.fromkeys(present, 0))
        self._accounts.each(present, persist if pinned else expire)
        return len(present)

    def admits(self, key: ChunkKey, n_bytes: int) -> bool:
        self._check()
        entry = Entry(n_bytes, n_bytes, 0, 0)
        try:
            room = self._accounts.enter(key, entry, 0, pin=False, dry=True).lacking <= 0
            return room or self._victims(key, entry, pin=False) is not None
        except StoreFull:
            return False

    def lease(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        self._check()
        milliseconds = max(1, round(seconds * 1000))
        try:
            replies = self._accounts.each(
                keys, lambda p, key: p.set(lease_name(key), self._owner, nx=True, px=milliseconds)
            )
        except StoreError:
            return set(keys)
        granted = {key for key, leased in zip(keys, replies, strict=True) if leased}
        with self._lock:
            self._leased |= granted
        return granted

    def release(self, keys: Iterable[ChunkKey]) -> None:
        with self._lock:
            held = [key for key in keys if key in self._leased]
            self._leased.difference_update(held)
        with contextlib.suppress(StoreError):  # they expire
            self._accounts.each(held, self._end_lease)

    # The whole

    def stats(self, namespace: str | None = None) -> StoreStats:
        """Of the entries. Those whose chunks the server has evicted are looked for once a minute, and by `verify`."""
        self._check()
        if self._clock.monotonic() - self._counted >= NOTE_EVERY_S:
            self._remove_lost()
        total, counts = Totals(), self._usage.counts(namespace_tag(namespace))
        for tag in self._accounts.tags(namespace):
            pins, told = self._connection.ask(partial(pins_and_counts, tag=tag))
            parts = [
                (1, e.n_tokens, e.n_bytes, e.raw_bytes, k in pins)
                for k, e in self._accounts.entries(tag).items()
            ]
            total = Totals(*map(sum, zip(total, *parts, strict=True)))
            counts.update({name.decode(): int(n) for name, n in told.items()})
        return make_stats(self, total, counts, namespace, self.blobs.list())

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Every chunk on the server is looked at, entered or not; its entry is made what it should be.

        Two engines that write one chunk at once, coded in two ways, may leave one's bytes and the other's entry.
        """
        self._check()
        self._remove_lost()
        entries = {
            key: entry
            for tag in self._accounts.tags(None)
            for key, entry in self._accounts.entries(tag).items()
        }
        keys, bad = sorted(entries.keys() | self._connection.ask(scan, SCAN_S)), list[tuple[str, str]]()
        for done, key in enumerate(keys, start=1):
            if problem := self._problem(key, entries.get(key)):
                bad.append((key.hex(), problem))
            if progress:
                progress(done, len(keys))
        return VerifyReport(len(keys) - len(bad), tuple(bad), self.blobs.problems())

    # Inside

    def _reserve(self, key: ChunkKey, entry: Entry, pin: bool) -> Reserved | None:
        """Make room for a chunk and enter it; None where it is not worth its victims. Raises StoreFull."""
        victims: Sequence[Candidate] | None = ()
        for _ in range(TRIES):
            reserved = self._accounts.enter(key, entry, self._usage.now() // 1000, pin, victims or ())
            if reserved.lacking <= 0:
                self._accounts.each(
                    [victim.key for victim in victims or ()], lambda p, k: p.unlink(chunk_name(k))
                )
                return reserved
            victims = self._victims(key, entry, pin)
            if victims is None:
                return None
        raise StoreUnavailable(f"the quota on {self.config.server} is contended: other engines fill it, too")

    def _victims(self, key: ChunkKey, entry: Entry, pin: bool) -> Sequence[Candidate] | None:
        """The chunks to evict; None where the new one is not worth them. Raises StoreFull."""
        if self._usage and not self.read_only:
            self._accounts.note(self._usage)  # uses in this process count
        reserved = self._accounts.enter(key, entry, 0, pin, dry=True)
        victims = self._eviction.victims(reserved.oldest, reserved.lacking)
        if victims is None:
            raise store_full(
                f"the KV store at {self.config.where}", reserved.others, entry.n_bytes, self.cap_bytes
            )
        known = pin or reserved.layers_before >= 0
        if known or self._admission.admits(key, entry.n_bytes, victims, reserved.n_chunks):
            return victims
        self._usage.count(key, "refused")
        return None

    def _write(self, client: Client, record: ChunkRecord, reserved: Reserved) -> None:
        """In place of what was there; a lease on it ends."""
        name, key = chunk_name(record.key), record.key
        fields: dict[bytes, Buffer] = {HEADER: record.header_bytes()}
        fields |= {segment_name(l): memoryview(raw).cast("B") for l, raw in enumerate(record.segments())}
        pipeline = client.pipeline(transaction=False)
        pipeline.hset(name, mapping=fields)
        (persist if reserved.pinned else expire)(pipeline, key)
        if surplus := [segment_name(l) for l in range(record.n_layers, reserved.layers_before)]:
            pipeline.hdel(name, *surplus)
        if key in self._leased:
            self._end_lease(pipeline, key)
        pipeline.execute()
        with self._lock:
            self._leased.discard(key)

    def _end_lease(self, pipeline: Client, key: ChunkKey) -> None:
        pipeline.execute_command("EVAL", RELEASE, 1, lease_name(key), self._owner)

    def _problem(self, key: ChunkKey, entry: Entry | None) -> str:
        """What is wrong with a chunk, "" when nothing is. Needs no codec."""
        fields = self._connection.ask(partial(read_fields, keys=[key]))[0]
        try:
            record = checked(key, fields)
        except StoreError as error:
            return str(error)
        if len(fields) > record.n_layers + 1:
            return f"it has more layers than the {record.n_layers} of its header"
        counted = entry == Entry.of(record)
        if not counted and not self.read_only:
            self._accounts.enter(key, Entry.of(record), self._usage.now() // 1000, pin=False, quota=1 << 62)
        return "" if counted or entry is None or not self.read_only else "it is counted as of another size"

    def _write_notes(self) -> None:
        """Write what was noted of uses. Nothing but recency and counts is lost if that fails."""
        if self.read_only:
            self._usage.restore(Notes(counts=self._usage.drain().counts))  # writers have uses of their own
            return
        with contextlib.suppress(StoreError):
            self._accounts.note(self._usage)

    def _remove_lost(self) -> None:
        if not self.read_only:
            self._accounts.remove_lost()
        self._counted = self._clock.monotonic()

    def _check(self, writing: bool = False) -> None:
        """Raises StoreUnavailable."""
        if self._closed:
            raise StoreUnavailable(f"the KV store at {self.config.where} is closed: open it again")
        if writing and self.read_only:
            raise StoreUnavailable(f"the KV store at {self.config.where} is open for reading only")


class _Records:
    """Chunks on the server as a Snapshot gives them."""

    def __init__(self, store: ValkeyStore) -> None:
        self._store = store

    def get(self, key: ChunkKey, count: bool = True) -> ChunkRecord | None:
        found = self._store.read([key], count).get(key)
        if isinstance(found, StoreError):
            raise found
        return found
