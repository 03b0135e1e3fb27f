"""Chunk KV on a Valkey or Redis server, shared by any number of engines on any number of machines.

valkey_layout.py has the names and scripts. A chunk is entered before it is written and removed before it is deleted, so
the quota holds. The server evicts too, and processes may end half-way: `stats`, once a minute, and `verify` remove the
entries without chunks.

The cap is a quota of each namespace. The server's `maxmemory` is its operator's: under `volatile-lru` it evicts whole
chunks, never pinned ones, as those do not expire. Whatever the server does costs a request at most the deadline.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from blendserve.config import StoreBackendConfig, ValkeyConfig
from blendserve.errors import CorruptRecord, StoreError, StoreFull, StoreUnavailable, StoreVersion, unraised
from blendserve.store import valkey_layout as layout
from blendserve.store.base import REMOTE, ChunkInfo, KVStore, Snapshot, StoreStats, VerifyReport, store_full
from blendserve.store.blobs import BlobInfo, BlobStore, check_blob, check_room
from blendserve.store.bounded import BoundedClient
from blendserve.store.clock import TimeSource
from blendserve.store.codecs.base import Buffer, Progress, tables_hash
from blendserve.store.key import KEY_BYTES, TAG_BYTES, ChunkKey, namespace_tag
from blendserve.store.ledger import NOTE_EVERY_S, Totals, UsageLog
from blendserve.store.policies import Admission, Always, Eviction, Policies, Refuse
from blendserve.store.record import ChunkRecord, decode_header
from blendserve.store.valkey_client import Client, ValkeyPeer
from blendserve.store.valkey_layout import Accounts, ChunkEntry, Reservation

T = TypeVar("T")
SCAN_S = 600.0  # deadline for the names of all chunks
GRACE_S = 60.0  # a younger entry may be of a chunk that is still being written
NO_QUOTA = 1 << 62
EXPIRES = layout.on_chunk("expire", layout.EXPIRES_S)
NEVER_EXPIRES = layout.on_chunk("persist")


class ValkeyStore(KVStore):
    """A KVStore on the server that the settings name, of at most `cap_bytes` of chunks a namespace, as stored.

    Opening it needs no server. `read_only` writes nothing, notes of use included. Raises StoreUnavailable if the client's
    package is missing.
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
        clock: TimeSource = time,
    ) -> None:
        self.config, self.cap_bytes, self.read_only, self.location = config, cap_bytes, read_only, config.url
        self._eviction = eviction or Refuse()
        self._admission = admission or Always()
        self._clock, self._usage = clock, UsageLog(self._admission, clock)
        self.client = BoundedClient(ValkeyPeer(config), clock=clock)
        self._owner, self._leased, self._lock = secrets.token_bytes(16), set[ChunkKey](), threading.Lock()
        self._reconciled, self._closed = float("-inf"), False
        self._accounts = Accounts(self._ask)
        self.blobs: ValkeyBlobs = ValkeyBlobs(self)

    @classmethod
    def from_config(
        cls, config: StoreBackendConfig, path: Path | None, read_only: bool, policies: Policies
    ) -> ValkeyStore:
        """An unreachable server is logged, and no error: chunks count as missing until it answers."""
        store = cls(config.valkey, config.cap_bytes, read_only, *policies)
        with suppress(StoreUnavailable):  # the breaker has logged it
            store._ask(lambda client: client.ping())
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

    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        asked = list(keys)
        found = self._each(asked, layout.on_chunk("exists"))
        return {key for key, is_stored in zip(asked, found, strict=True) if is_stored}

    def describe(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        asked, found = list(keys), dict[ChunkKey, ChunkInfo]()

        def ask(pipeline: Client, key: ChunkKey) -> None:
            pipeline.hget(layout.chunk_name(key), layout.HEADER)
            pipeline.sismember(layout.namespace_name(key[:TAG_BYTES], "pins"), key)

        replies = self._each(asked, ask)
        for key, raw, pinned in zip(asked, replies[::2], replies[1::2], strict=True):
            with suppress(CorruptRecord, StoreVersion):
                if isinstance(raw, bytes):
                    found[key] = ChunkInfo.of(decode_header(key, raw), bool(pinned), REMOTE)
        return found

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        """List keys in pages: the server answers others between them."""
        tags = self._accounts.tags(namespace)

        def job(client: Client) -> list[ChunkKey]:
            scans = (client.hscan_iter(layout.namespace_name(tag, "entries"), count=1000) for tag in tags)
            return sorted({key for scan in scans for key, _ in scan if len(key) == KEY_BYTES})

        return iter(self._ask(job, SCAN_S))

    # Writing

    def put(self, key: ChunkKey, record: ChunkRecord, pin: bool = False) -> bool:
        self._check(writing=True)
        record = record.for_key(key)
        reserved = self._reserve(key, ChunkEntry.of(record), pin)
        if reserved is None:
            return False
        try:
            self._ask(partial(self._write, record=record, reserved=reserved))
        except StoreError:
            if reserved.layers_before < 0:
                with suppress(StoreError):
                    self._accounts.remove([key])
            raise
        return True

    def delete(self, keys: Iterable[ChunkKey], wait: bool = True) -> int:
        self._check(writing=True)
        asked = list(keys)
        deleted = sum(map(int, self._each(asked, layout.on_chunk("unlink"))))
        self._accounts.remove(asked)
        return deleted

    def pin(self, keys: Iterable[ChunkKey], pinned: bool = True) -> int:
        self._check(writing=True)
        present = sorted(self.contains(keys))
        self._accounts.touch("pin" if pinned else "unpin", dict.fromkeys(present, 0))
        self._each(present, NEVER_EXPIRES if pinned else EXPIRES)
        return len(present)

    def admits(self, key: ChunkKey, n_bytes: int) -> bool:
        try:
            return self._is_worth_room(key, n_bytes, self._accounts.reserve(key, n_bytes, self.cap_bytes))
        except StoreFull:
            return False

    def lease(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        self._check()
        options = {"nx": True, "px": max(1, round(seconds * 1000))}
        try:
            replies = self._each(keys, lambda p, key: p.set(layout.lease_name(key), self._owner, **options))
        except StoreError:
            return set(keys)
        granted = {key for key, leased in zip(keys, replies, strict=True) if leased}
        with self._lock:
            self._leased |= granted
        return granted

    def release(self, keys: Iterable[ChunkKey]) -> None:
        with self._lock:
            held = sorted(self._leased.intersection(keys))
            self._leased.difference_update(held)
        with suppress(StoreError):  # they expire
            script = "EVAL", layout.RELEASE, 1
            self._each(held, lambda p, key: p.execute_command(*script, layout.lease_name(key), self._owner))

    # The whole

    def stats(self, namespace: str | None = None) -> StoreStats:
        """Count the entries. Once a minute, those whose chunks the server has evicted are removed before."""
        if self._clock.monotonic() - self._reconciled >= NOTE_EVERY_S:
            self._remove_lost()
        totals, counts = Totals(), self._usage.counts(namespace_tag(namespace))
        for tag in self._accounts.tags(namespace):
            totals = Totals(*map(sum, zip(totals, self._accounts.totals(tag), strict=True)))
            counts.update(self._accounts.counts(tag))
        return self._make_stats(totals, counts, namespace)

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Every chunk on the server is checked, entered or not; its entry is made what it should be.

        Two engines that write one chunk at once, in two codings, may leave one's bytes and the other's entry.
        """
        self._remove_lost()
        entries: dict[ChunkKey, ChunkEntry] = {}
        for tag in self._accounts.tags(None):
            entries |= self._accounts.entries(tag)
        keys = entries.keys() | self._ask(layout.all_chunks, SCAN_S)
        return self._check_all(keys, lambda key: self._problem(key, entries.get(key)), progress)

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
        return self._ask(partial(layout.run_each, keys=keys, command=command)) if keys else []

    def _reserve(self, key: ChunkKey, entry: ChunkEntry, pin: bool) -> Reservation | None:
        """Make room for a chunk and enter it; None if it is not worth its victims. Raises StoreFull."""
        now = self._usage.now() // 1000
        reserve = partial(self._accounts.reserve, key, entry.n_bytes, self.cap_bytes, entry, now, pin)
        found = reserve()
        if not found.is_entered:
            if not self._is_worth_room(key, entry.n_bytes, found, pin):
                return None
            found = reserve(evict=True)
        if not found.is_entered:  # another engine has pinned the victims
            raise self._full(found, entry.n_bytes)
        self._each([victim.key for victim in found.victims], layout.on_chunk("unlink"))
        return found

    def _is_worth_room(self, key: ChunkKey, n_bytes: int, room: Reservation, pin: bool = False) -> bool:
        """Whether a chunk may be stored in place of its victims. Raises StoreFull."""
        if room.victims:
            self._write_notes()  # uses in this process count
            room = self._accounts.reserve(key, n_bytes, self.cap_bytes)
        victims = self._eviction.victims(room.victims, room.others + n_bytes - self.cap_bytes)
        if victims is None:
            raise self._full(room, n_bytes)
        if not victims or pin or room.layers_before >= 0:
            return True
        if self._admission.admits(key, n_bytes, victims, room.n_chunks):
            return True
        self._usage.count(key, "refused")
        return False

    def _full(self, room: Reservation, n_bytes: int) -> StoreFull:
        return store_full(f"the KV store at {self.config.where}", room.others, n_bytes, self.cap_bytes)

    def _write(self, client: Client, record: ChunkRecord, reserved: Reservation) -> None:
        """Write a chunk in place of the one before; the lease on it ends."""
        name, key = layout.chunk_name(record.key), record.key
        fields: dict[bytes, Buffer] = {layout.HEADER: record.header_bytes()}
        fields |= {
            layout.segment_name(l): memoryview(raw).cast("B") for l, raw in enumerate(record.segments())
        }
        pipeline = client.pipeline(transaction=False)
        pipeline.hset(name, mapping=fields)
        (NEVER_EXPIRES if reserved.is_pinned else EXPIRES)(pipeline, key)
        if surplus := [layout.segment_name(l) for l in range(record.n_layers, reserved.layers_before)]:
            pipeline.hdel(name, *surplus)
        pipeline.unlink(layout.lease_name(key))
        pipeline.execute()
        with self._lock:
            self._leased.discard(key)

    def _remove_lost(self) -> None:
        """Remove garbage, and the entries whose chunks the server has evicted, or that no process ever wrote."""
        self._reconciled = self._clock.monotonic()
        if self.read_only:
            return
        settled = self._clock.time_ns() // 1000 - round(GRACE_S * 1e6)
        for tag in self._accounts.tags(None):
            self._accounts.repair(tag)
            for _, some in layout.by_namespace(self._accounts.entries(tag)):
                self._accounts.remove(set(some) - self.contains(some), settled)

    def _write_notes(self) -> None:
        """Write the noted uses. If that fails, they are kept."""
        if self.read_only:
            self._usage.drop_uses()
        elif self._usage.has_notes:
            notes = self._usage.drain()
            try:
                free = self._accounts.touch("use", {key: used // 1000 for key, used in notes.used.items()})
                self._accounts.count(notes.counts)
                self._each(free, EXPIRES)
            except StoreError:
                self._usage.restore(notes)

    def _problem(self, key: ChunkKey, entry: ChunkEntry | None) -> str:
        """What is wrong with a chunk, "" for a whole one. Needs no codec. Corrects a wrong entry."""
        fields = self._ask(partial(layout.read_fields, keys=[key]))[0]
        record = layout.checked(key, fields)
        if len(fields) > record.n_layers + 1:
            return f"it has more layers than the {record.n_layers} of its header"
        stored = ChunkEntry.of(record)
        if entry != stored and not self.read_only:
            self._accounts.reserve(key, stored.n_bytes, NO_QUOTA, stored, self._usage.now() // 1000)
        return "its entry is of another size" if self.read_only and entry not in (None, stored) else ""


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
        name, about = layout.blob_name(hash), info.to_bytes()
        self._store._ask(lambda client: (client.set(name, raw), client.hset(layout.BLOBS, hash, about)))
        return hash

    def delete(self, hash: bytes) -> bool:
        self._store._check(writing=True)
        names = layout.blob_name(hash), layout.BLOBS
        return bool(self._store._ask(lambda client: client.unlink(names[0]) + client.hdel(names[1], hash)))
