"""Chunk KV in an LMDB file: written whole in one transaction, read zero-copy out of the map.

snapshot.py has the records that hold chunks, ledger.py those that count them. The byte cap is kept in the same
transaction as what it counts, evictions included, so that it holds over processes and kills.

The map is sized from the cap, with a margin for page rounding and fragmentation, so that the cap is reached first; the
file never grows beyond it. Where fragmentation wins all the same, chunks are evicted ahead. Tables of codecs have room of
their own in it, and do not count against the cap.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from blendserve.config import PlaceConfig
from blendserve.core import ChunkKV, TokenIds
from blendserve.errors import CorruptRecord, StoreError, StoreFull, StoreUnavailable, StoreVersion
from blendserve.store import record
from blendserve.store.base import LOCAL, ChunkInfo, KVStore, Lease, StoreStats, VerifyReport, full, stats_of
from blendserve.store.clock import Clock
from blendserve.store.codecs.base import Buffer, ChunkShape, Codec, tables_hash
from blendserve.store.codecs.raw import Raw
from blendserve.store.key import ChunkKey, namespace_tag
from blendserve.store.lmdb import leases, tables
from blendserve.store.lmdb.environment import acquire, release
from blendserve.store.lmdb.ledger import Entry, Ledger, Txn, starting
from blendserve.store.lmdb.opening import MapFull, explaining
from blendserve.store.lmdb.snapshot import HEADER, LAYER, LMDBSnapshot, layer_name
from blendserve.store.policies import Admission, Always, Candidate, Eviction, Policies, Refuse
from blendserve.store.record import Coded
from blendserve.store.tables import ROOM, TablesInfo, check_room
from blendserve.store.traffic import Notes, Traffic

MIB = 1 << 20
WRITER_WAIT_S = 10.0  # a put takes milliseconds to a second
LEASE_WAIT_S = 1.0  # rather computed twice than later
NOTE_EVERY_S = 60.0


def map_bytes(cap_bytes: int) -> int:
    """Size of the map for a cap: twice that, 256 MiB, and room for tables. The file only grows to what is used of it."""
    return (2 * cap_bytes // MIB + 257) * MIB + ROOM


class LMDBStore(KVStore):
    """A KVStore in the folder `path`, holding at most `cap_bytes` of chunks as stored.

    `read_only` opens an existing store and changes nothing; it works on a read-only disk. Any number of processes
    may read while one writes; another writer waits up to `writer_wait_s`, then gets StoreUnavailable.
    A process that is to use what another wrote under a much larger cap has to open the store again.
    Raises StoreUnavailable when `path` cannot be used, StoreVersion when a newer blendserve wrote it.
    """

    persistent = needs_folder = True
    tells_ids = True

    def __init__(
        self,
        path: str | Path,
        cap_bytes: int,
        read_only: bool = False,
        writer_wait_s: float = WRITER_WAIT_S,
        eviction: Eviction | None = None,
        admission: Admission | None = None,
        codec: Codec | None = None,
        clock: Clock = time,
    ) -> None:
        """codec: of what is written; whatever is there is read by its own."""
        self.path = Path(path)
        self.cap_bytes = cap_bytes
        self.read_only = read_only
        self._wait = writer_wait_s
        self._eviction = eviction or Refuse()
        self._admission = admission or Always()
        self._codec = codec or Raw()
        self._clock = clock
        self._traffic = Traffic(self._admission, clock)
        self._noted = clock.monotonic()
        self._closed = False
        self._env = acquire(self.path, map_bytes(cap_bytes), read_only)

    @classmethod
    def from_config(
        cls, config: PlaceConfig, path: Path | None, read_only: bool, policies: Policies
    ) -> LMDBStore:
        assert path is not None
        return cls(path, config.cap_bytes, read_only, WRITER_WAIT_S, *policies)

    @contextmanager
    def reading(self) -> Iterator[LMDBSnapshot]:
        with self._read() as txn:
            snapshot = LMDBSnapshot(self.path, txn, self._traffic)
            try:
                yield snapshot
            finally:
                snapshot.end()
        if self._clock.monotonic() - self._noted > NOTE_EVERY_S:
            self._write_notes(wait_s=0.0)

    def put(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        record.validate_kv(kv)
        codec = self._codec
        return self.put_coded(key, Coded(ChunkShape.of(kv), codec.coding, codec.encode(kv), kv.ids), pin)

    def put_coded(self, key: ChunkKey, coded: Coded, pin: bool = False) -> bool:
        header = record.seal(key, coded)
        if not pin and not self._admitted(key, header.n_bytes):
            return False
        shape = header.shape
        entry = Entry(self._traffic.now(), header.n_bytes, shape.n_bytes, shape.n_tokens, pin)
        try:
            self._put(key, header, coded.segments, entry)
        except MapFull:
            self._evict_ahead(2 * header.n_bytes)
            self._put(key, header, coded.segments, entry)
        return True

    def write_by(self, codec: Codec) -> None:
        self._codec = codec

    def coded(self, key: ChunkKey) -> Coded | None:
        with self.reading() as snapshot:
            return snapshot.coded(key)

    def put_tables(self, codec: str, fingerprint: str, raw: bytes, current: bool = True) -> bytes:
        hash = tables_hash(raw)
        with self._write() as txn:
            check_room(tables.infos(txn), hash, len(raw))
            info = TablesInfo(hash, codec, fingerprint, len(raw), self._traffic.now() if current else 0)
            tables.write(txn, info, raw)
        return hash

    def tables(self, hash: bytes) -> bytes | None:
        with self.reading() as snapshot:
            return snapshot.tables(hash)

    def all_tables(self) -> list[TablesInfo]:
        with self._read() as txn, explaining(self.path):
            return tables.infos(txn)

    def delete_tables(self, hash: bytes) -> bool:
        with self._write() as txn:
            return tables.drop(txn, hash)

    def wants(self, key: ChunkKey, raw_bytes: int) -> bool:
        try:
            return self._admitted(key, self._codec.expected_bytes(raw_bytes))
        except StoreFull:
            return False

    def lease(self, key: ChunkKey, seconds: float) -> Lease | None:
        """Of all processes on the file. `put` ends it in its own transaction."""
        now, owner = self._clock.time_ns(), secrets.token_bytes(leases.OWNER_BYTES)
        try:
            with self._write(min(self._wait, LEASE_WAIT_S)) as txn:
                taken = leases.take(txn, key, owner, now, now + round(seconds * 1e9))
        except StoreError:
            return Lease()
        return _FileLease(self, key, owner) if taken else None

    def end_lease(self, key: ChunkKey, owner: bytes) -> None:
        """Let others have a chunk. Raises StoreUnavailable."""
        with self._read() as txn, explaining(self.path):
            if not leases.is_of(txn, key, owner):
                return
        with self._write() as txn:
            if leases.is_of(txn, key, owner):
                leases.end(txn, key)

    def pin(self, keys: Iterable[ChunkKey]) -> int:
        return self._set_pins(keys, True)

    def unpin(self, keys: Iterable[ChunkKey]) -> int:
        return self._set_pins(keys, False)

    def delete(self, key: ChunkKey) -> bool:
        with self._write() as txn:
            there = txn.get(HEADER + key) is not None
            _drop(txn, key)
            return there

    def __contains__(self, key: ChunkKey) -> bool:
        with self._read() as txn, explaining(self.path):
            return txn.get(HEADER + key) is not None

    def info(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        with self._read() as txn, explaining(self.path):
            ledger = Ledger(txn)
            found = {key: entry for key in keys if (entry := ledger.entry(key))}
        return {
            key: ChunkInfo(entry.n_tokens, entry.n_bytes, entry.raw_bytes, entry.pinned, LOCAL)
            for key, entry in found.items()
        }

    def ids(self, keys: Iterable[ChunkKey]) -> Iterator[tuple[ChunkKey, TokenIds]]:
        with self._read() as txn, explaining(self.path):
            for key in keys:
                with contextlib.suppress(CorruptRecord, StoreVersion):
                    if (raw := txn.get(HEADER + key)) and (ids := record.decode_header(key, raw).ids):
                        yield key, ids

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        with self._read() as txn, explaining(self.path):
            return iter([name[1:] for name, _ in starting(txn, HEADER + namespace_tag(namespace))])

    def stats(self, namespace: str | None = None) -> StoreStats:
        tag = namespace_tag(namespace)
        with self._read() as txn, explaining(self.path):
            ledger = Ledger(txn)
            entries = [entry for _, entry in ledger.entries(tag) if entry]
            counts = ledger.counts(tag) + self._traffic.counts(tag)
            infos = tables.infos(txn)
        sizes = [(entry.n_tokens, entry.n_bytes, entry.raw_bytes, entry.pinned) for entry in entries]
        return stats_of("lmdb", str(self.path), self.cap_bytes, sizes, counts, namespace, infos)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        good, bad = 0, []
        with self.reading() as snapshot:
            keys = snapshot.keys()
            for done, key in enumerate(keys, start=1):
                problem = snapshot.problem(key)
                good += not problem
                bad += [(key.hex(), problem)] if problem else []
                if progress:
                    progress(done, len(keys))
            bad_tables = snapshot.bad_tables()
        return VerifyReport(good, tuple(bad), tuple(bad_tables))

    def close(self) -> None:
        if not self._closed:
            self._write_notes(wait_s=1.0)
            self._closed = True
            release(self._env)

    def _admitted(self, key: ChunkKey, n_bytes: int) -> bool:
        """Whether a chunk on demand is worth its victims. Raises StoreFull when it cannot be had at any price."""
        with self._read() as txn, explaining(self.path):
            ledger = Ledger(txn)
            if ledger.entry(key):
                return True  # replaced, not added
            victims = self._victims(ledger, key, n_bytes)
            n_chunks = ledger.n_chunks if victims else 0
        if not victims or self._admission.admits(key, n_bytes, victims, n_chunks):
            return True
        self._traffic.count(key, "refused")
        return False

    def _victims(self, ledger: Ledger, key: ChunkKey, more: int) -> list[Candidate]:
        """What has to go for `more` bytes of a chunk."""
        stored = ledger.n_bytes
        oldest = ledger.oldest(key, self._traffic.used())
        victims = self._eviction.victims(oldest, stored + more - self.cap_bytes)
        if victims is None:
            raise full(f"the KV store {self.path}", stored, more, self.cap_bytes)
        return victims

    def _put(self, key: ChunkKey, header: record.Header, segments: Sequence[Buffer], entry: Entry) -> None:
        with self._write() as txn:
            ledger = Ledger(txn)
            before = ledger.entry(key)
            if before:
                entry = replace(entry, pinned=entry.pinned or before.pinned)
            for victim in self._victims(ledger, key, entry.n_bytes - (before.n_bytes if before else 0)):
                _drop(txn, victim.key, traces=True)
                ledger.count(victim.key, "evictions")
            _drop(txn, key)
            txn.put(HEADER + key, record.encode_header(key, header))
            for l, segment in enumerate(segments):
                txn.put(layer_name(key, l), segment)
            ledger.add(key, entry)
            leases.end(txn, key)

    def _evict_ahead(self, n_bytes: int) -> None:
        """Evict that much ahead. LMDB uses the pages that a transaction freed only in the second one after it."""
        with self._write() as txn:
            ledger = Ledger(txn)
            victims = self._eviction.victims(ledger.oldest(), n_bytes)
            if victims is None:
                raise full(f"the file of the KV store {self.path}", ledger.n_bytes, n_bytes, self.cap_bytes)
            for victim in victims:
                _drop(txn, victim.key, traces=True)
                ledger.count(victim.key, "evictions")
        with self._write() as txn:
            Ledger(txn).touch()

    def _set_pins(self, keys: Iterable[ChunkKey], pinned: bool) -> int:
        with self._write() as txn:
            ledger = Ledger(txn)
            return sum(ledger.change(key, pinned=pinned) for key in keys)

    def _write_notes(self, wait_s: float) -> None:
        """Write what was noted of reads. Nothing is lost but recency and counts if that cannot be done."""
        self._noted = self._clock.monotonic()
        if self.read_only:
            self._traffic.put_back(
                Notes(counts=self._traffic.take().counts)
            )  # those who write have uses of their own
        elif self._traffic:
            with contextlib.suppress(StoreError), self._write(wait_s):
                pass

    @contextmanager
    def _read(self) -> Iterator[Txn]:
        self._refuse_closed()
        with self._env.reading() as txn:
            yield txn

    @contextmanager
    def _write(self, wait_s: float | None = None) -> Iterator[Txn]:
        """A write transaction, which begins with what was noted of reads."""
        self._refuse_closed()
        if self.read_only:
            raise StoreUnavailable(f"the KV store {self.path} is open for reading only")
        notes = Notes()
        try:
            with self._env.writing(self._wait if wait_s is None else wait_s) as txn:
                notes = self._traffic.take()
                Ledger(txn).write(notes)
                yield txn
        except BaseException:
            self._traffic.put_back(notes)
            raise

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"the KV store {self.path} is closed: open it again")


class _FileLease(Lease):
    """A lease that stands in the file."""

    def __init__(self, store: LMDBStore, key: ChunkKey, owner: bytes) -> None:
        self._store, self._key, self._owner = store, key, owner

    def release(self) -> None:
        with contextlib.suppress(StoreError):
            self._store.end_lease(self._key, self._owner)


def _drop(txn: Txn, key: ChunkKey, traces: bool = False) -> None:
    """Delete all records of a chunk, whole or not; `traces` when the ledger itself named it."""
    traces |= txn.delete(HEADER + key)
    for name in [name for name, _ in starting(txn, LAYER + key)]:
        traces |= txn.delete(name)
    Ledger(txn).remove(key, traces)
