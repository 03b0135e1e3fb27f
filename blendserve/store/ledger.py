"""The accounting of a store: notes of uses in memory, and in a transactional store sizes, pins, totals and counters.

A read must not cost a write, so uses are noted. A store writes the notes with its next transaction, when it closes, and
otherwise once a minute. A killed process loses at most a minute of them. Times are of the wall clock, because processes
compare them; within a process they only rise. A time of a clock that was
ahead counts as now when the store is next written.

    u KEY              last used 8 | bytes 8 | raw bytes 8 | tokens 4 | pinned 1 | xxh3-64 with the key 8
    o LAST_USED KEY    empty: unpinned chunks in order of use (big-endian time: a scan gives the oldest first)
    n TAG              totals of a namespace, or of all: chunks 4 | tokens, bytes, raw bytes 8 each | pins 4 |
                       pinned bytes 8 | xxh3-64 with TOTALS_FORMAT and the tag 8
    c TAG              COUNTERS 8 each | xxh3-64 with the tag 8

Bytes are as stored. A damaged entry counts as an unpinned chunk of unknown size that was never used. Missing or damaged
totals are counted again.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import xxhash

from blendserve.store.clock import TimeSource
from blendserve.store.codecs.base import Buffer
from blendserve.store.key import TAG_BYTES, ChunkKey
from blendserve.store.last_messages import LastMessages
from blendserve.store.policies import Admission, Candidate
from blendserve.store.record import ChunkRecord

log = logging.getLogger(__name__)

NOTE_EVERY_S = 60.0  # the notes of a store that only reads
AHEAD_NS = 60 * 10**9  # a use later than now by this was noted when a clock was ahead
COUNTERS = "hits", "misses", "corrupt", "evictions", "refused", "undecodable"  # in the order of a record
TOTALS_FORMAT = b"2"  # others are counted again
ENTRY, ORDER, TOTALS, COUNTS = b"u", b"o", b"n", b"c"

_ENTRY, _TOTALS = struct.Struct("<QQQIB"), struct.Struct("<IQQQIQ")
_COUNTS = struct.Struct(f"<{len(COUNTERS)}q")
_TIME, _SUM = struct.Struct(">Q"), struct.Struct("<Q")


@dataclass(slots=True)
class Notes:
    """Uses and counts that are not written yet."""

    used: dict[ChunkKey, int] = field(default_factory=dict)
    counts: Counter[tuple[bytes, str]] = field(default_factory=Counter)  # by (namespace tag, counter)


class UsageLog:
    """Notes of one store's uses. Threads may share it."""

    def __init__(self, admission: Admission, clock: TimeSource = time) -> None:
        self._admission = admission
        self._clock = clock
        self._notes = Notes()
        self._logged = LastMessages()
        self._last = 0
        self._written = clock.monotonic()
        self._lock = threading.Lock()

    def now(self) -> int:
        """Nanoseconds since 1970, later than at every call before, unless the clock was ahead then."""
        with self._lock:
            return self._tick()

    def is_due(self) -> bool:
        """Whether the last call that returned True, or the opening, is a minute ago: write the notes now."""
        is_due = self._clock.monotonic() - self._written > NOTE_EVERY_S
        if is_due:
            self._written = self._clock.monotonic()
        return is_due

    def look_up(self, key: ChunkKey, found: bool) -> None:
        """Note a hit or a miss."""
        self._admission.record_access(key)
        with self._lock:
            if found:
                self._notes.used[key] = self._tick()
            self._notes.counts[key[:TAG_BYTES], "hits" if found else "misses"] += 1

    def count(self, key: ChunkKey, counter: str, why: str = "") -> None:
        """Add 1 to a counter. "undecodable" turns the chunk's hit into a miss; `why` is logged once."""
        with self._lock:
            tag = key[:TAG_BYTES]
            self._notes.counts[tag, counter] += 1
            if counter == "undecodable":
                self._notes.counts.update({(tag, "hits"): -1, (tag, "misses"): 1})
        if why and self._logged.is_new(why):
            log.warning("some stored chunks cannot be read and count as missing: %s", why)

    def used(self) -> dict[ChunkKey, int]:
        """Last uses that are not written yet."""
        with self._lock:
            return dict(self._notes.used)

    @property
    def has_notes(self) -> bool:
        return bool(self._notes.used or self._notes.counts)

    def drain(self) -> Notes:
        """Remove the notes, for the caller to write; `restore` them if that fails."""
        with self._lock:
            notes = self._notes
            self._notes = Notes()
            return notes

    def drop_uses(self) -> None:
        """A store that is open for reading writes none; it keeps its counts for `stats`."""
        with self._lock:
            self._notes.used = {}

    def restore(self, notes: Notes) -> None:
        """Undo `drain`."""
        with self._lock:
            self._notes.used = {**notes.used, **self._notes.used}
            self._notes.counts.update(notes.counts)

    def counts(self, tag: bytes = b"") -> Counter[str]:
        """Counts that are not written yet, of one namespace or of all."""
        total: Counter[str] = Counter()
        with self._lock:
            for (owner, counter), n in self._notes.counts.items():
                total[counter] += n if owner.startswith(tag) else 0
        return total

    def _tick(self) -> int:
        now = self._clock.time_ns()
        self._last = now if self._last > now + AHEAD_NS else max(self._last + 1, now)
        return self._last


class Txn(Protocol):
    """A transaction over an ordered map of bytes."""

    def get(self, name: bytes) -> Buffer | None:
        """None for an absent name."""

    def put(self, name: bytes, value: Buffer) -> object:
        """Write a value in place of the one before."""

    def delete(self, name: bytes) -> bool:
        """False for an absent name."""

    def scan(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, Buffer]]:
        """The names with this prefix, in order, from `start` on. The map must not change during a scan."""


class LedgerEntry(NamedTuple):
    """The accounting of one chunk."""

    used: int  # nanoseconds since 1970
    n_bytes: int  # as stored
    raw_bytes: int
    n_tokens: int
    pinned: int

    @classmethod
    def of(cls, record: ChunkRecord, used: int, pinned: bool) -> LedgerEntry:
        return cls(used, record.n_bytes, record.raw_bytes, record.n_tokens, int(pinned))


class Totals(NamedTuple):
    """Sums over chunks."""

    chunks: int = 0
    tokens: int = 0
    n_bytes: int = 0
    raw_bytes: int = 0
    pins: int = 0
    pinned_bytes: int = 0

    def add(self, entry: LedgerEntry | None, sign: int = 1) -> Totals:
        """The totals with one entry more, or with sign -1 one less."""
        if entry is None:
            return self
        pinned_bytes = entry.n_bytes if entry.pinned else 0
        parts = 1, entry.n_tokens, entry.n_bytes, entry.raw_bytes, entry.pinned, pinned_bytes
        return Totals(*(max(0, total + sign * part) for total, part in zip(self, parts, strict=True)))


class Ledger:
    """The accounting as one transaction sees it. `flush` writes the totals before the transaction commits."""

    def __init__(self, txn: Txn) -> None:
        self.txn = txn
        self._totals: dict[bytes, Totals] = {}  # by tag, as of now

    def entry(self, key: ChunkKey) -> LedgerEntry | None:
        """None for an absent chunk or a damaged entry."""
        return _decode_entry(key, self.txn.get(ENTRY + key))

    def totals(self, tag: bytes = b"") -> Totals:
        """The totals of one namespace, or of all."""
        if tag not in self._totals:
            written = unpack_sealed(_TOTALS, TOTALS_FORMAT + tag, self.txn.get(TOTALS + tag))
            self._totals[tag] = Totals(*written) if written else self._count(tag)
        return self._totals[tag]

    def above_share(self, tag: bytes, more: int, cap_bytes: int) -> set[bytes]:
        """The namespaces that hold more than an equal share of the cap, once `tag` has `more` bytes."""
        tags = {name[1:] for name, _ in self.txn.scan(TOTALS) if len(name) > 1} | {tag}
        n_bytes = {each: self.totals(each).n_bytes + (more if each == tag else 0) for each in tags}
        n_namespaces = sum(map(bool, n_bytes.values()))
        return {each for each, n in n_bytes.items() if n * n_namespaces > cap_bytes}

    def oldest(
        self, spare: ChunkKey, used: Mapping[ChunkKey, int], first: Set[bytes] = frozenset()
    ) -> Iterator[Candidate]:
        """Unpinned chunks except `spare`: those of the namespaces `first`, then the others; least recently used first.

        used: uses later than all written ones.
        """
        for is_first in (True, False):
            for name, _ in self.txn.scan(ORDER):
                key = name[1 + _TIME.size :]
                if key != spare and key not in used and (key[:TAG_BYTES] in first) == is_first:
                    entry = self.entry(key)
                    yield Candidate(key, entry.n_bytes if entry else 0)
            for key in sorted(used, key=used.__getitem__):
                if key != spare and (key[:TAG_BYTES] in first) == is_first:
                    entry = self.entry(key)
                    if entry and not entry.pinned:
                        yield Candidate(key, entry.n_bytes)

    def put(self, key: ChunkKey, entry: LedgerEntry | None) -> None:
        """Write a chunk's entry in place of the one before; None removes that."""
        before = self.entry(key)
        if before is None or entry is None or before[1:] != entry[1:]:
            for tag in (b"", key[:TAG_BYTES]):
                self._totals[tag] = self.totals(tag).add(before, -1).add(entry)
        if before:
            self.txn.delete(_order_name(key, before))
        if entry is None:
            self.txn.delete(ENTRY + key)
        else:
            self.txn.put(ENTRY + key, seal(key, _ENTRY.pack(*entry)))
            if not entry.pinned:
                self.txn.put(_order_name(key, entry), b"")

    def remove(self, key: ChunkKey, has_records: bool = False) -> None:
        """Remove a chunk's entry. has_records: the chunk has records, so a missing entry is damage."""
        if self.entry(key):
            self.put(key, None)
        elif self.txn.delete(ENTRY + key) or has_records:
            for name in [name for name, _ in self.txn.scan(ORDER) if name.endswith(key)]:
                self.txn.delete(name)
            for tag in (b"", key[:TAG_BYTES]):
                self._totals[tag] = self._count(tag)

    def update(self, key: ChunkKey, used: int = 0, pinned: bool | None = None) -> bool:
        """Note a use or a pin; False when the chunk has no entry. A later use that is written stays."""
        entry = self.entry(key)
        if entry is not None:
            pins = entry.pinned if pinned is None else int(pinned)
            self.put(key, entry._replace(used=max(used, entry.used), pinned=pins))
        return entry is not None

    def pull_back(self, now: int) -> None:
        """Let uses that are later than now count as now: a clock was ahead, and they would never be evicted."""
        late = [name for name, _ in self.txn.scan(ORDER, ORDER + _TIME.pack(now + AHEAD_NS))]
        for n, name in enumerate(late):
            key = name[1 + _TIME.size :]
            if entry := self.entry(key):
                self.put(key, entry._replace(used=now - len(late) + n))

    def write(self, notes: Notes) -> None:
        """Write the uses and counts that were noted."""
        for key, used in notes.used.items():
            self.update(key, used)
        for tag in {tag for tag, _ in notes.counts}:
            total = self.counts(tag)
            total.update({name: notes.counts[tag, name] for name in COUNTERS})
            self.txn.put(COUNTS + tag, seal(tag, _COUNTS.pack(*(total[name] for name in COUNTERS))))

    def counts(self, tag: bytes = b"") -> Counter[str]:
        """Counters of one namespace, or the sums over all."""
        total: Counter[str] = Counter()
        for name, raw in self.txn.scan(COUNTS + tag):
            total.update(dict(zip(COUNTERS, unpack_sealed(_COUNTS, name[1:], raw), strict=False)))
        return total

    def problem(self, record: ChunkRecord) -> str:
        """How the ledger differs from a stored chunk; "" when it agrees."""
        entry = self.entry(record.key)
        if entry is None:
            return "its entry in the ledger is missing or damaged"
        stored = LedgerEntry.of(record, entry.used, bool(entry.pinned))
        if entry != stored:
            return f"the ledger has {entry}, the chunk {stored}"
        if (self.txn.get(_order_name(record.key, entry)) is None) != bool(entry.pinned):
            return "its place in the order of eviction is wrong"
        return ""

    def flush(self) -> None:
        """Write the totals."""
        for tag, totals in self._totals.items():
            self.txn.put(TOTALS + tag, seal(TOTALS_FORMAT + tag, _TOTALS.pack(*totals)))

    def _count(self, tag: bytes) -> Totals:
        totals = Totals()
        for name, raw in self.txn.scan(ENTRY + tag):
            totals = totals.add(_decode_entry(name[1:], raw))
        return totals


def seal(name: bytes, body: bytes) -> bytes:
    """A record under this name, with a checksum of both."""
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(name + body))


def unseal(name: bytes, raw: Buffer | None) -> bytes | None:
    """The body that `seal` sealed; None for a missing or damaged record."""
    body = bytes(raw or b"")[: -_SUM.size]
    return body if raw is not None and bytes(raw) == seal(name, body) else None


def unpack_sealed(layout: struct.Struct, name: bytes, raw: Buffer | None) -> tuple[Any, ...]:
    """The fields of a sealed record; () for a missing or damaged one."""
    body = unseal(name, raw)
    return layout.unpack(body) if body is not None and len(body) == layout.size else ()


def _order_name(key: ChunkKey, entry: LedgerEntry) -> bytes:
    return ORDER + _TIME.pack(entry.used) + key


def _decode_entry(key: ChunkKey, raw: Buffer | None) -> LedgerEntry | None:
    fields = unpack_sealed(_ENTRY, key, raw)
    return LedgerEntry(*fields) if fields else None
