"""What an LMDB store counts of its chunks, kept in the transaction that changes it.

    "u" + key                       -> last used 8 | bytes 8 | uncoded 8 | tokens 4 | pinned 1 | xxh3-64 with the key 8
    "o" + last used (8, big-endian) + key -> nothing: the chunks that may be evicted, oldest first
    "c" + namespace tag             -> the counters of traffic.py 8 each | xxh3-64 with the tag 8
    "m:bytes"                       -> bytes of all entries 8 | xxh3-64 8

Bytes are as stored. Entries that do not say what they are uncoded, and fewer counters, come from a store of format 1.
A damaged entry is taken for an unpinned chunk of unknown size that was never used; the sum is then counted anew.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

import lmdb
import xxhash

from blendserve.store.key import TAG_BYTES, ChunkKey
from blendserve.store.policies import Candidate
from blendserve.store.traffic import COUNTERS, Notes

Txn: TypeAlias = "lmdb.Transaction[memoryview]"

ENTRY, ORDER, COUNTS = b"u", b"o", b"c"
BYTES_KEY = b"m:bytes"

_ENTRY = struct.Struct("<QQQIB")
_ENTRY_1 = struct.Struct("<QQIB")
_TIME = struct.Struct(">Q")
_SUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Entry:
    """What is counted of one chunk."""

    used: int  # nanoseconds since 1970
    n_bytes: int  # as stored
    raw_bytes: int  # uncoded
    n_tokens: int
    pinned: bool


class Ledger:
    """The ledger as one transaction sees it."""

    def __init__(self, txn: Txn) -> None:
        self._txn = txn

    def entry(self, key: ChunkKey) -> Entry | None:
        """What is known of a chunk; None when it is not there or its entry is damaged."""
        return _decode_entry(key, self._txn.get(ENTRY + key))

    def entries(self, tag: bytes = b"") -> Iterator[tuple[ChunkKey, Entry | None]]:
        """All entries, or those of one namespace, in order of their keys."""
        for name, raw in starting(self._txn, ENTRY + tag):
            yield name[1:], _decode_entry(name[1:], raw)

    def oldest(
        self, spare: ChunkKey = b"", used: Mapping[ChunkKey, int] = MappingProxyType({})
    ) -> Iterator[Candidate]:
        """The chunks that may be dropped, least recently used first, without the one to spare.

        `used` holds uses that are not written yet; all of them are later than those that are.
        """
        for name, _ in starting(self._txn, ORDER):
            key = name[1 + _TIME.size :]
            entry = self.entry(key)
            if key != spare and key not in used:
                yield Candidate(key, entry.n_bytes if entry else 0)
        for key in sorted(used, key=used.__getitem__):
            entry = self.entry(key)
            if key != spare and entry and not entry.pinned:
                yield Candidate(key, entry.n_bytes)

    @property
    def n_chunks(self) -> int:
        """Chunks that have an entry."""
        return sum(1 for _ in starting(self._txn, ENTRY))

    @property
    def n_bytes(self) -> int:
        """Stored bytes of all chunks."""
        body = opened(b"", self._txn.get(BYTES_KEY))
        if body is not None and len(body) == _SUM.size:
            return int(_SUM.unpack(body)[0])
        return self._counted()

    def add(self, key: ChunkKey, entry: Entry) -> None:
        """Write a new chunk's entry. Its old one must have been removed."""
        total = self.n_bytes
        self._write(key, entry)
        self._set_bytes(total + entry.n_bytes)

    def remove(self, key: ChunkKey, traces: bool) -> None:
        """Remove a chunk's entry. `traces` says whether anything of the chunk was found outside the ledger."""
        entry = self.entry(key)
        if entry:
            self._set_bytes(self.n_bytes - entry.n_bytes)
            self._txn.delete(ENTRY + key)
            self._txn.delete(_order_name(key, entry))
        elif self._txn.delete(ENTRY + key) or traces:  # damaged, so search and count all
            for name in [name for name, _ in starting(self._txn, ORDER) if name.endswith(key)]:
                self._txn.delete(name)
            self._set_bytes(self._counted())

    def change(self, key: ChunkKey, *, used: int | None = None, pinned: bool | None = None) -> bool:
        """Note a use or a pin; False when the chunk has no entry."""
        entry = self.entry(key)
        if entry is None:
            return False
        self._txn.delete(_order_name(key, entry))
        used = (
            entry.used if used is None else max(used, entry.used)
        )  # another process may have written a later use
        self._write(key, replace(entry, used=used, pinned=entry.pinned if pinned is None else pinned))
        return True

    def write(self, notes: Notes) -> None:
        """Write what was noted since the last time."""
        for key, used in notes.used.items():
            self.change(key, used=used)
        for tag in {tag for tag, _ in notes.counts}:
            total = self.counts(tag)
            total.update({name: notes.counts[tag, name] for name in COUNTERS})
            body = struct.pack(f"<{len(COUNTERS)}Q", *(total[name] for name in COUNTERS))
            self._txn.put(COUNTS + tag, sealed(tag, body))

    def count(self, key: ChunkKey, counter: str) -> None:
        """Raise one counter of the chunk's namespace."""
        self.write(Notes(counts=Counter({(key[:TAG_BYTES], counter): 1})))

    def touch(self) -> None:
        """Write something, so that this transaction counts as one."""
        self._set_bytes(self.n_bytes)

    def counts(self, tag: bytes = b"") -> Counter[str]:
        """Counters of one namespace, or the sums over all."""
        total: Counter[str] = Counter()
        for name, raw in starting(self._txn, COUNTS + tag):
            body = opened(name[1:], raw)
            if body is not None and len(body) % _SUM.size == 0:
                numbers = struct.unpack(f"<{len(body) // _SUM.size}Q", body)
                total.update(dict(zip(COUNTERS, numbers, strict=False)))
        return total

    def problem(self, key: ChunkKey, n_bytes: int, raw_bytes: int, n_tokens: int) -> str:
        """Where the ledger differs from the chunk that is really there; "" when it does not."""
        entry = self.entry(key)
        if entry is None:
            return "its entry in the ledger is missing or damaged"
        there, said = (n_bytes, raw_bytes, n_tokens), (entry.n_bytes, entry.raw_bytes, entry.n_tokens)
        if said != there:
            return f"the ledger has bytes, uncoded bytes and tokens of it as {said}, they are {there}"
        if (self._txn.get(_order_name(key, entry)) is None) != entry.pinned:
            return "the order of eviction does not have it right"
        return ""

    def _write(self, key: ChunkKey, entry: Entry) -> None:
        body = _ENTRY.pack(entry.used, entry.n_bytes, entry.raw_bytes, entry.n_tokens, entry.pinned)
        self._txn.put(ENTRY + key, sealed(key, body))
        if not entry.pinned:
            self._txn.put(_order_name(key, entry), b"")

    def _counted(self) -> int:
        return sum(entry.n_bytes for _, entry in self.entries() if entry)

    def _set_bytes(self, total: int) -> None:
        self._txn.put(BYTES_KEY, sealed(b"", _SUM.pack(total)))


def starting(txn: Txn, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """The records whose names start with `prefix`, in order. The transaction must not write meanwhile."""
    cursor = txn.cursor()
    found = cursor.set_range(prefix)
    while found and bytes(cursor.key()[: len(prefix)]) == prefix:
        yield bytes(cursor.key()), cursor.value()
        found = cursor.next()


def _order_name(key: ChunkKey, entry: Entry) -> bytes:
    return ORDER + _TIME.pack(entry.used) + key


def sealed(name: bytes, body: bytes) -> bytes:
    """A record under this name, with a checksum of both."""
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(name + body))


def opened(name: bytes, raw: memoryview | None) -> bytes | None:
    """What `sealed` sealed; None when it is missing or damaged."""
    body = bytes(raw or b"")[: -_SUM.size]
    return body if raw is not None and bytes(raw) == sealed(name, body) else None


def _decode_entry(key: ChunkKey, raw: memoryview | None) -> Entry | None:
    body = opened(key, raw)
    if body is None or len(body) not in (_ENTRY.size, _ENTRY_1.size):
        return None
    if len(body) == _ENTRY_1.size:
        used, n_bytes, n_tokens, pinned = _ENTRY_1.unpack(body)
        return Entry(used, n_bytes, n_bytes, n_tokens, bool(pinned))
    used, n_bytes, raw_bytes, n_tokens, pinned = _ENTRY.unpack(body)
    return Entry(used, n_bytes, raw_bytes, n_tokens, bool(pinned))
