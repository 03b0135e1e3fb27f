"""Chunk KV on a Valkey or Redis server, shared by any number of engines on any number of machines.

valkey_layout.py has the names. Its operator limits what the server holds: under `maxmemory` and `volatile-lru` it evicts
whole chunks, never pinned ones, as those do not expire. A chunk is written before its entry in the statistics; `stats`
removes the entries of evicted chunks, and `verify` adds missing ones. Whatever the server does costs a request at most
the deadline.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from blendserve.config import StoreBackendConfig, ValkeyConfig
from blendserve.errors import CorruptRecord, StoreError, StoreUnavailable, StoreVersion, unraised
from blendserve.store import valkey_layout as layout
from blendserve.store.base import REMOTE, ChunkInfo, KVStore, ReadTime, Snapshot, StoreStats, VerifyReport
from blendserve.store.blobs import BlobInfo, BlobStore, check_blob, check_room
from blendserve.store.bounded import BoundedClient
from blendserve.store.clock import TimeSource
from blendserve.store.codecs.base import Buffer, Progress, tables_hash
from blendserve.store.key import KEY_BYTES, TAG_BYTES, ChunkKey, namespace_tag
from blendserve.store.ledger import COUNTERS, LedgerEntry, Totals, UsageLog
from blendserve.store.policies import Always
from blendserve.store.record import ChunkRecord, decode_header
from blendserve.store.valkey_client import Client, ValkeyPeer
from blendserve.store.valkey_layout import BATCH, chunk_name, lease_name, namespace_name, on_chunk

T = TypeVar("T")
SCAN_S = 600.0  # deadline for the names of all chunks
EXPIRES_S = 30 * 86_400  # of an unpinned chunk, after its last use: volatile-lru evicts only keys that expire
NEVER, ABSENT = -1, -2  # replies to TTL: the chunk is pinned; there is none

log = logging.getLogger(__name__)


class ValkeyStore(KVStore):
    """A KVStore on the server that the settings name.

    Opening it needs no server. `cap_bytes` limits nothing that is stored; quotas of pins are shares of it. `read_only`
    writes nothing, notes of use included. Raises StoreUnavailable if the client's package is missing.
    """

    kind = "valkey"
    needs_folder = False
    is_remote = True

    def __init__(
        self,
        config: ValkeyConfig,
        cap_bytes: int,
        read_only: bool = False,
        clock: TimeSource = time,
    ) -> None:
        self.config = config
        self.cap_bytes = cap_bytes
        self.read_only = read_only
        self.location = config.url
        self.name = config.server
        self.deadline_s = config.deadline_s
        self.in_flight_bytes = config.in_flight_mb * 1_000_000
        self._usage = UsageLog(Always(), clock)
        self.client = BoundedClient(ValkeyPeer(config), clock=clock)
        self._owner = secrets.token_bytes(16)
        self._leased = set[ChunkKey]()
        self._lock = threading.Lock()
        self._closed = False
        self.blobs: ValkeyBlobs = ValkeyBlobs(self)

    @classmethod
    def from_config(cls, config: StoreBackendConfig, path: Path | None, read_only: bool) -> ValkeyStore:
        """An unreachable server is logged, and no error: chunks count as missing until it answers."""
        store = cls(config.valkey, config.cap_bytes, read_only)
        with suppress(StoreUnavailable):  # the breaker has logged it, or the user may not ask for INFO
            if not store._ask(lambda client: client.info("memory")).get("maxmemory"):
                log.warning(
                    "%s limits no memory: set its maxmemory, and its policy to volatile-lru",
                    store.config.server,
                )
        return store

    def close(self) -> None:
        if not self._closed:
            self._write_notes()
            self._closed = True
            self.client.close()

    # Reading

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        self._check()
        yield ValkeySnapshot(self)

    def read(self, keys: Sequence[ChunkKey], count: bool = True) -> dict[ChunkKey, ChunkRecord | StoreError]:
        """The stored ones, or why one cannot be read; one round trip. count: as uses. Raises StoreUnavailable."""
        found: dict[ChunkKey, ChunkRecord | StoreError] = {}
        hashes = self._ask(partial(layout.read_fields, keys=keys), reading=True) if keys else []
        for key, fields in zip(keys, hashes, strict=True):
            try:
                if fields:
                    found[key] = replace(layout.checked(key, fields), report=partial(self._usage.count, key))
                if count:
                    self._usage.look_up(key, bool(fields))
            except (CorruptRecord, StoreVersion) as error:
                found[key] = unraised(error)
                if count and isinstance(error, CorruptRecord):
                    self._usage.count(key, "corrupt")
        if count and self._usage.is_due():
            threading.Thread(target=self._write_notes, daemon=True).start()  # no request waits for it
        return found

    def time_read(self, keys: Sequence[ChunkKey], n_bytes: int, now: Callable[[], float]) -> ReadTime | None:
        """Time headers, which take a round trip, then the first layers of one chunk: a whole one may take too long."""

        def job(client: Client) -> ReadTime | None:
            client.ping()  # or connecting would be timed
            began = now()
            headers = layout.run_each(client, keys, on_chunk("hget", layout.HEADER))
            round_trip_s = now() - began
            for key, raw in zip(keys, headers, strict=True):
                if raw:
                    header = decode_header(key, raw)
                    n_layers = header.shape.n_layers
                    n = max(1, min(n_layers, n_bytes * n_layers // max(1, header.n_bytes)))
                    began = now()
                    segments = client.hmget(chunk_name(key), [layout.segment_name(l) for l in range(n)])
                    found = ReadTime(round_trip_s, now() - began, sum(header.lengths[:n]), header)
                    return None if None in segments else found
            return None

        return self.client.ask(job)

    def interrupt(self, late: bool) -> str:
        return self.client.interrupt(late, reading=True).public_message

    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        asked = list(keys)
        found = self._each(asked, on_chunk("exists"))
        return {key for key, is_stored in zip(asked, found, strict=True) if is_stored}

    def describe(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        asked = list(keys)
        found = dict[ChunkKey, ChunkInfo]()

        def ask(pipeline: Client, key: ChunkKey) -> None:
            pipeline.hget(chunk_name(key), layout.HEADER)
            pipeline.ttl(chunk_name(key))

        replies = self._each(asked, ask)
        for key, raw, expires_s in zip(asked, replies[::2], replies[1::2], strict=True):
            with suppress(CorruptRecord, StoreVersion):
                if isinstance(raw, bytes):
                    found[key] = ChunkInfo.of(decode_header(key, raw), expires_s == NEVER, REMOTE)
        return found

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        """List keys in pages: the server answers others between them."""
        tags = self._tags(namespace)

        def job(client: Client) -> list[ChunkKey]:
            scans = (client.hscan_iter(namespace_name(tag, "entries"), count=BATCH) for tag in tags)
            return sorted({key for scan in scans for key, _ in scan if len(key) == KEY_BYTES})

        return iter(self._ask(job, SCAN_S))

    # Writing

    def put(self, key: ChunkKey, record: ChunkRecord, pin: bool = False) -> bool:
        self._check(writing=True)
        record = record.for_key(key)
        name = chunk_name(key)
        expires_s, n_fields = self._each([key], lambda p, key: (p.ttl(name), p.hlen(name)))

        def write(client: Client) -> None:
            fields: dict[bytes, Buffer] = {layout.HEADER: record.header_bytes()}
            for l, raw in enumerate(record.segments()):
                fields[layout.segment_name(l)] = memoryview(raw).cast("B")
            pipeline = client.pipeline(transaction=False)
            pipeline.hset(name, mapping=fields)
            if pin:
                pipeline.persist(name)
            elif expires_s != NEVER:
                pipeline.expire(name, EXPIRES_S)
            if surplus := [layout.segment_name(l) for l in range(record.n_layers, n_fields - 1)]:
                pipeline.hdel(name, *surplus)
            _enter(pipeline, record)
            pipeline.unlink(lease_name(key))
            pipeline.execute()

        self._ask(write)
        with self._lock:
            self._leased.discard(key)
        return True

    def delete(self, keys: Iterable[ChunkKey], wait: bool = True) -> int:
        self._check(writing=True)

        def remove(pipeline: Client, key: ChunkKey) -> None:
            pipeline.unlink(chunk_name(key))
            pipeline.hdel(namespace_name(key[:TAG_BYTES], "entries"), key)

        return sum(map(int, self._each(list(keys), remove)[::2]))

    def pin(self, keys: Iterable[ChunkKey], pinned: bool = True) -> int:
        self._check(writing=True)
        change = on_chunk("persist") if pinned else on_chunk("expire", EXPIRES_S)
        replies = self._each(sorted(set(keys)), lambda p, key: (p.exists(chunk_name(key)), change(p, key)))
        return sum(map(int, replies[::2]))

    def admits(self, key: ChunkKey, n_bytes: int) -> bool:
        self._check(writing=True)
        return True

    def lease(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        self._check()
        options = {"nx": True, "px": max(1, round(seconds * 1000))}
        try:
            replies = self._each(keys, lambda p, key: p.set(lease_name(key), self._owner, **options))
        except StoreError:
            return set(keys)
        granted = {key for key, leased in zip(keys, replies, strict=True) if leased}
        with self._lock:
            self._leased |= granted
        return granted

    def release(self, keys: Iterable[ChunkKey]) -> None:
        """Delete leases that are still ours.

        One that ends in between, and that another process gets, is deleted, too: both then compute the chunk.
        """
        with self._lock:
            held = sorted(self._leased.intersection(keys))
            self._leased.difference_update(held)
        with suppress(StoreError):  # they expire
            owners = self._each(held, lambda p, key: p.get(lease_name(key)))
            ours = [key for key, owner in zip(held, owners, strict=True) if owner == self._owner]
            self._each(ours, lambda p, key: p.unlink(lease_name(key)))

    def stats(self, namespace: str | None = None) -> StoreStats:
        """Count the entries; those whose chunks the server has evicted are removed before."""
        totals = Totals()
        counts = self._usage.counts(namespace_tag(namespace))
        for tag in self._tags(namespace):
            for entry in self._entries(tag).values():
                totals = totals.add(entry)
            counts.update(self._counts(tag))
        return self._make_stats(totals, counts, namespace)

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Every chunk on the server is checked, entered or not; its entry is made what it should be."""
        keys = self._ask(layout.all_chunks, SCAN_S)
        for tag in self._tags(None):
            keys |= self._entries(tag).keys()
        return self._check_all(keys, self._problem, progress)

    # Inside

    def _check(self, writing: bool = False) -> None:
        """Raises StoreUnavailable for a closed store, and before writing to a read-only one."""
        if self._closed:
            raise StoreUnavailable(f"the KV store at {self.config.where} is closed: open it again")
        if writing and self.read_only:
            raise StoreUnavailable(f"the KV store at {self.config.where} is open for reading only")

    def _ask(self, job: Callable[[Client], T], seconds: float | None = None, reading: bool = False) -> T:
        """The result of a job within the seconds, by default the deadline. Raises StoreUnavailable, StoreFull."""
        self._check()
        return self.client.ask(job, seconds, reading)

    def _each(self, keys: Sequence[ChunkKey], command: layout.Command) -> list[Any]:
        """The replies to a command for each key, BATCH keys in a round trip."""
        replies = []
        for at in range(0, len(keys), BATCH):
            replies += self._ask(partial(layout.run_each, keys=keys[at : at + BATCH], command=command))
        return replies

    def _tags(self, namespace: str | None) -> list[bytes]:
        """The tag of a namespace, or of all that ever stored anything."""
        if namespace is not None:
            return [namespace_tag(namespace)]
        found = self._ask(lambda client: client.smembers(layout.NAMESPACES))
        return sorted(tag for tag in found if len(tag) == TAG_BYTES)

    def _entries(self, tag: bytes) -> dict[ChunkKey, LedgerEntry]:
        """The entries of a namespace's chunks. Those without a chunk, and what is no entry, are removed."""
        name = namespace_name(tag, "entries")
        raw = self._ask(lambda client: client.hgetall(name))
        entries = {
            k: value for k, value in raw.items() if len(k) == KEY_BYTES and layout.ENTRY.fullmatch(value)
        }
        found = dict[ChunkKey, LedgerEntry]()
        for key, expires_s in zip(entries, self._each([*entries], on_chunk("ttl")), strict=True):
            if expires_s != ABSENT:
                n_bytes, raw_bytes, n_tokens, _ = map(int, entries[key].split())
                found[key] = LedgerEntry(0, n_bytes, raw_bytes, n_tokens, int(expires_s == NEVER))
        if (lost := raw.keys() - found.keys()) and not self.read_only:
            self._ask(lambda client: client.hdel(name, *lost))
        return found

    def _counts(self, tag: bytes) -> Counter[str]:
        """A namespace's counters; what is no number counts as 0."""
        raw = self._ask(lambda client: client.hgetall(namespace_name(tag, "counts")))
        numbers = {name.decode(errors="replace"): n for name, n in raw.items() if n.isdigit() and len(n) < 19}
        return Counter({name: int(numbers[name]) for name in COUNTERS if name in numbers})

    def _write_notes(self) -> None:
        """Write the noted uses and counts. If that fails, they are kept."""
        if self.read_only:
            self._usage.drop_uses()
        elif self._usage.has_notes:
            notes = self._usage.drain()

            def count(client: Client) -> None:
                pipeline = client.pipeline(transaction=False)
                for (tag, counter), n in notes.counts.items():
                    pipeline.sadd(layout.NAMESPACES, tag)  # one whose look-ups all missed has stored nothing
                    pipeline.hincrby(namespace_name(tag, "counts"), counter, n)
                pipeline.execute()

            try:
                self._each([*notes.used], lambda p, key: p.expire(chunk_name(key), EXPIRES_S, xx=True))
                self._ask(count)
            except StoreError:
                self._usage.restore(notes)

    def _problem(self, key: ChunkKey) -> str:
        """What is wrong with a chunk, "" for a whole one, which is entered. Needs no codec."""
        fields = self._ask(partial(layout.read_fields, keys=[key]))[0]
        record = layout.checked(key, fields)
        if len(fields) > record.n_layers + 1:
            return f"it has more layers than the {record.n_layers} of its header"
        if not self.read_only:
            self._ask(lambda client: _enter(client, record))
        return ""


def _enter(client: Client, record: ChunkRecord) -> None:
    """Enter a stored chunk in the statistics of its namespace."""
    tag = record.key[:TAG_BYTES]
    client.sadd(layout.NAMESPACES, tag)
    client.hset(namespace_name(tag, "entries"), record.key, layout.entry_of(record))


class ValkeySnapshot:
    """Chunks on the server as a Snapshot gives them."""

    def __init__(self, store: ValkeyStore) -> None:
        self._store = store

    def get(self, key: ChunkKey, count: bool = True) -> ChunkRecord | None:
        found = self._store.read([key], count).get(key)
        if isinstance(found, StoreError):
            raise found
        return found


class ValkeyBlobs(BlobStore):
    """The blobs on the server."""

    def __init__(self, store: ValkeyStore) -> None:
        self._store = store

    def list(self) -> Sequence[BlobInfo]:
        infos = []
        for hash, raw in sorted(self._store._ask(lambda client: client.hgetall(layout.BLOBS)).items()):
            with suppress(ValueError):
                infos.append(BlobInfo.from_bytes(hash, raw))
        return infos

    def hashes(self) -> set[bytes]:
        return set(self._store._ask(lambda client: client.hkeys(layout.BLOBS)))

    def get(self, hash: bytes, seconds: float | None = None) -> bytes | None:
        raw: bytes | None = self._store._ask(lambda client: client.get(layout.blob_name(hash)), seconds)
        return None if raw is None else check_blob(hash, raw)

    def put(self, kind: str, owner: str, raw: bytes, current: bool = True) -> bytes:
        self._store._check(writing=True)
        hash = tables_hash(raw)
        check_room(self.list(), hash, len(raw))
        info = BlobInfo(hash, kind, owner, len(raw), self._store._usage.now() if current else 0)
        name = layout.blob_name(hash)
        about = info.to_bytes()
        self._store._ask(lambda client: (client.set(name, raw), client.hset(layout.BLOBS, hash, about)))
        return hash

    def delete(self, hash: bytes) -> bool:
        self._store._check(writing=True)
        names = layout.blob_name(hash), layout.BLOBS
        return bool(self._store._ask(lambda client: client.unlink(names[0]) + client.hdel(names[1], hash)))
