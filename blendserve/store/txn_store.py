"""A store over transactions of an ordered map of bytes, which lmdb.py and memory.py provide.

    h KEY                            header        l KEY LAYER(2, big-endian)   segment      (record.py)
    t HASH                           blob          p HASH                       description | xxh3-64    (blobs.py)
    x KEY                            lease: begin and end, nanoseconds since 1970 8 each | owner 48 | xxh3-64
    u, o, n, c                       accounting    (ledger.py)

A put, its evictions and their accounting are one transaction, so the cap holds over processes and kills.
"""

from __future__ import annotations

import struct
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial

from blendserve.errors import CorruptRecord, StoreError, StoreFull, StoreUnavailable, StoreVersion
from blendserve.store.base import ChunkInfo, KVStore, Progress, StoreStats, VerifyReport, store_full
from blendserve.store.blobs import BlobInfo, BlobStore, check_blob, check_room
from blendserve.store.clock import TimeSource
from blendserve.store.codecs.base import Buffer, tables_hash
from blendserve.store.key import TAG_BYTES, ChunkKey, namespace_tag
from blendserve.store.ledger import (
    AHEAD_NS,
    ENTRY,
    Ledger,
    LedgerEntry,
    Notes,
    Txn,
    UsageLog,
    seal,
    unpack_sealed,
    unseal,
)
from blendserve.store.owner import SIZE as OWNER_BYTES
from blendserve.store.owner import Owner
from blendserve.store.policies import Admission, Always, Candidate, least_recent
from blendserve.store.record import ChunkRecord, decode_header, ignore

HEADER, LAYER, LEASE, BLOB, ABOUT = b"h", b"l", b"x", b"t", b"p"
REQUEST_WAIT_S = 0.1  # for other writers, while a request waits: not to store a chunk is better than to wait

_LAYER, _LEASE = struct.Struct(">H"), struct.Struct(f"<QQ{OWNER_BYTES}s")


def segment_name(key: ChunkKey, l: int) -> bytes:
    """The name of a layer's record."""
    return LAYER + key + _LAYER.pack(l)


class TxnSnapshot:
    """One read transaction. Threads may share it; its records end with it."""

    def __init__(self, txn: Txn, usage: UsageLog, trusted: bool) -> None:
        self.txn = txn
        self._usage = usage
        self._trusted = trusted
        self._using = threading.Lock()
        self._ended = False

    def get(self, key: ChunkKey, count: bool = True) -> ChunkRecord | None:
        raw = self.raw(HEADER + key)
        report = partial(self._usage.count, key) if count else ignore
        try:
            header = None if raw is None else decode_header(key, raw)
        except CorruptRecord:
            report("corrupt")
            raise
        if count:
            self._usage.look_up(key, header is not None)
        if header is None:
            return None
        return ChunkRecord(key, header, lambda l: self.raw(segment_name(key, l)), report, self._trusted)

    def raw(self, name: bytes) -> Buffer | None:
        with self._using:
            if self._ended:
                raise StoreUnavailable("a chunk's record was read outside its `with store.snapshot()`")
            return self.txn.get(name)

    def end(self) -> None:
        with self._using:
            self._ended = True


class TxnStore(KVStore):
    """A KVStore of at most `cap_bytes` of chunks, as stored. Subclasses define `_begin_read` and `_begin_write`."""

    trusted = False  # whether nothing outside this process can change the bytes

    def __init__(self, cap_bytes: int, admission: Admission | None, clock: TimeSource = time) -> None:
        self.cap_bytes = cap_bytes
        self._clock = clock
        self._admission = admission or Always()
        self._usage = UsageLog(self._admission, clock)
        self._owner = Owner.new()  # of leases
        self.blobs = TxnBlobs(self)

    @abstractmethod
    def _begin_read(self) -> AbstractContextManager[Txn]:
        """Raises StoreUnavailable."""

    @abstractmethod
    def _begin_write(self, wait_s: float | None) -> AbstractContextManager[Txn]:
        """Commits at the end; an exception undoes all. wait_s: for other writers. Raises StoreUnavailable, StoreFull."""

    # Chunks

    @contextmanager
    def snapshot(self) -> Iterator[TxnSnapshot]:
        with self._begin_read() as txn:
            snapshot = TxnSnapshot(txn, self._usage, self.trusted)
            try:
                yield snapshot
            finally:
                snapshot.end()
        if self._usage.is_due():
            self._write_notes(wait_s=0.0)

    def put(self, key: ChunkKey, record: ChunkRecord, pin: bool = False) -> bool:
        record = record.for_key(key)
        if not pin and not self._admitted(key, record.n_bytes):
            return False
        self._put(record, pin)
        return True

    def delete(self, keys: Iterable[ChunkKey], wait: bool = True) -> int:
        with self._write(None if wait else REQUEST_WAIT_S) as ledger:
            return sum(_drop(ledger, key) for key in keys)

    def pin(self, keys: Iterable[ChunkKey], pinned: bool = True) -> int:
        with self._write() as ledger:
            return sum(ledger.update(key, pinned=pinned) for key in keys)

    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        with self._begin_read() as txn:
            return {key for key in keys if txn.get(HEADER + key) is not None}

    def describe(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        found: dict[ChunkKey, ChunkInfo] = {}
        with self._begin_read() as txn:
            ledger = Ledger(txn)
            for key in keys:
                with suppress(CorruptRecord, StoreVersion):
                    if (raw := txn.get(HEADER + key)) is not None and (entry := ledger.entry(key)):
                        found[key] = ChunkInfo.of(decode_header(key, raw), bool(entry.pinned))
        return found

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        with self._begin_read() as txn:
            return iter([name[1:] for name, _ in txn.scan(HEADER + namespace_tag(namespace))])

    def admits(self, key: ChunkKey, n_bytes: int) -> bool:
        try:
            return self._admitted(key, n_bytes)
        except StoreFull:
            return False

    # Leases

    def lease(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        now = self._clock.time_ns()
        granted = set[ChunkKey]()
        lease = _LEASE.pack(now, now + round(seconds * 1e9), self._owner.to_bytes())
        try:
            with self._write(REQUEST_WAIT_S) as ledger:
                txn = ledger.txn
                for name, raw in list(txn.scan(LEASE)):
                    if not _is_held(name[1:], raw, now):
                        txn.delete(name)
                for key in keys:
                    if txn.get(LEASE + key) is None:
                        txn.put(LEASE + key, seal(key, lease))
                        granted.add(key)
        except StoreError:
            return set(keys)
        return granted

    def release(self, keys: Iterable[ChunkKey]) -> None:
        with suppress(StoreError):  # the leases expire
            with self._begin_read() as txn:
                mine = [key for key in keys if self._leases(txn, key)]
            if mine:  # a put has ended most of them
                with self._write(REQUEST_WAIT_S) as ledger:
                    for key in mine:
                        if self._leases(ledger.txn, key):
                            ledger.txn.delete(LEASE + key)

    def _leases(self, txn: Txn, key: ChunkKey) -> bool:
        """Whether this process has a lease on the chunk."""
        return unpack_sealed(_LEASE, key, txn.get(LEASE + key))[2:] == (self._owner.to_bytes(),)

    # The whole

    def stats(self, namespace: str | None = None) -> StoreStats:
        tag = namespace_tag(namespace)
        with self._begin_read() as txn:
            ledger = Ledger(txn)
            totals = ledger.totals(tag)
            counts = ledger.counts(tag)
        counts.update(self._usage.counts(tag))
        return self._make_stats(totals, counts, namespace)

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        with self.snapshot() as snapshot:
            txn = snapshot.txn
            names = {name[1:] for prefix in (HEADER, ENTRY) for name, _ in txn.scan(prefix)}
            names |= {name[1 : -_LAYER.size] for name, _ in txn.scan(LAYER)}
            return self._check_all(names, partial(_problem, snapshot, Ledger(txn)), progress)

    # Inside

    def _admitted(self, key: ChunkKey, n_bytes: int) -> bool:
        """Whether an unpinned chunk is worth its victims. Raises StoreFull if it does not fit without all others."""
        with self._begin_read() as txn:
            ledger = Ledger(txn)
            if ledger.entry(key):
                return True  # replaced, not added
            victims = self._victims(ledger, key, n_bytes)
            n_chunks = ledger.totals().chunks
        if not victims or self._admission.admits(key, n_bytes, victims, n_chunks):
            return True
        self._usage.count(key, "refused")
        return False

    def _victims(
        self, ledger: Ledger, key: ChunkKey, more: int, cap_bytes: int | None = None
    ) -> list[Candidate]:
        """The chunks to evict for `more` bytes of a chunk. cap_bytes: by default the store's. Raises StoreFull.

        Namespaces above their share of the cap lose chunks first, so one tenant's requests do not evict another's KV.
        """
        cap_bytes = self.cap_bytes if cap_bytes is None else cap_bytes
        stored = ledger.totals().n_bytes
        if stored + more <= cap_bytes:
            return []
        above = ledger.above_share(key[:TAG_BYTES], more, cap_bytes)
        oldest = ledger.oldest(key, self._usage.used(), above)
        victims = least_recent(oldest, stored + more - cap_bytes)
        if victims is None:
            raise store_full(f"the KV store {self.location or 'in memory'}", stored, more, cap_bytes)
        return victims

    def _put(self, record: ChunkRecord, pin: bool) -> None:
        key = record.key
        header = record.header_bytes()
        segments = record.segments()
        with self._write(None if pin else REQUEST_WAIT_S) as ledger:
            before = ledger.entry(key)
            more = record.n_bytes - (before.n_bytes if before else 0)
            self._evict(ledger, self._victims(ledger, key, more))
            _drop(ledger, key)
            ledger.txn.put(HEADER + key, header)
            for l, segment in enumerate(segments):
                ledger.txn.put(segment_name(key, l), segment)
            pinned = pin or bool(before and before.pinned)
            ledger.put(key, LedgerEntry.of(record, self._usage.now(), pinned))
            ledger.txn.delete(LEASE + key)

    def _evict(self, ledger: Ledger, victims: Sequence[Candidate]) -> None:
        for victim in victims:
            _drop(ledger, victim.key, is_known=True)
        ledger.write(Notes(counts=Counter((victim.key[:TAG_BYTES], "evictions") for victim in victims)))

    @contextmanager
    def _write(self, wait_s: float | None = None) -> Iterator[Ledger]:
        """A write transaction. It begins with the noted uses."""
        notes = Notes()
        try:
            with self._begin_write(wait_s) as txn:
                notes = self._usage.drain()
                ledger = Ledger(txn)
                ledger.pull_back(self._usage.now())
                ledger.write(notes)
                yield ledger
                ledger.flush()
        except BaseException:
            self._usage.restore(notes)
            raise

    def _write_notes(self, wait_s: float) -> None:
        """Write the noted uses. If that fails, they are kept."""
        if self.read_only:
            self._usage.drop_uses()
        elif self._usage.has_notes:
            with suppress(StoreError), self._write(wait_s):
                pass


class TxnBlobs(BlobStore):
    """The blobs of a TxnStore."""

    def __init__(self, store: TxnStore) -> None:
        self._store = store

    def put(self, kind: str, owner: str, raw: bytes, current: bool = True) -> bytes:
        hash = tables_hash(raw)
        with self._store._write() as ledger:
            infos = list_blobs(ledger.txn)
            check_room(infos, hash, len(raw))
            # Later than all others, also those that were stored while a clock was ahead.
            latest = max((i.created for i in infos if (i.kind, i.owner) == (kind, owner)), default=0)
            created = max(self._store._usage.now(), latest + 1) if current else 0
            info = BlobInfo(hash, kind, owner, len(raw), created)
            ledger.txn.put(BLOB + hash, raw)
            ledger.txn.put(ABOUT + hash, seal(hash, info.to_bytes()))
        return hash

    def get(self, hash: bytes, seconds: float | None = None) -> bytes | None:
        with self._store._begin_read() as txn:
            raw = txn.get(BLOB + hash)
            return None if raw is None else check_blob(hash, raw)

    def list(self) -> Sequence[BlobInfo]:
        with self._store._begin_read() as txn:
            return list_blobs(txn)

    def hashes(self) -> set[bytes]:
        with self._store._begin_read() as txn:
            return {name[1:] for prefix in (BLOB, ABOUT) for name, _ in txn.scan(prefix)}

    def delete(self, hash: bytes) -> bool:
        with self._store._write() as ledger:
            deleted = [ledger.txn.delete(prefix + hash) for prefix in (BLOB, ABOUT)]
        return any(deleted)


def _is_held(key: ChunkKey, raw: Buffer, now: int) -> bool:
    """Whether a lease has not ended: by its time, with its process, or as it began when a clock was ahead."""
    fields = unpack_sealed(_LEASE, key, raw)
    if not fields:
        return False
    begin, end, owner = fields
    return begin <= now + AHEAD_NS and now < end and not Owner.from_bytes(owner).is_dead


def list_blobs(txn: Txn) -> list[BlobInfo]:
    """The undamaged descriptions."""
    bodies = ((name[1:], unseal(name[1:], raw)) for name, raw in txn.scan(ABOUT))
    return [BlobInfo.from_bytes(hash, body) for hash, body in bodies if body is not None]


def _problem(snapshot: TxnSnapshot, ledger: Ledger, key: ChunkKey) -> str:
    """What is wrong with a chunk, "" for a whole one. Needs no codec. Raises StoreError for damage."""
    record = snapshot.get(key, count=False)
    if record is None:
        return "it has records, but no header"
    record.segments()
    if snapshot.raw(segment_name(key, record.n_layers)) is not None:
        return f"it has more layers than the {record.n_layers} of its header"
    return ledger.problem(record)


def _drop(ledger: Ledger, key: ChunkKey, is_known: bool = False) -> bool:
    """Delete all records of a chunk, damaged or not -> whether it had a header. is_known: the ledger named it."""
    had_header = ledger.txn.delete(HEADER + key)
    layers = [name for name, _ in ledger.txn.scan(LAYER + key)]
    for name in layers:
        ledger.txn.delete(name)
    ledger.remove(key, is_known or had_header or bool(layers))
    return had_header
