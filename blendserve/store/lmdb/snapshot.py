"""Reading chunks out of an LMDB map: one read transaction, and views that live as long as it.

"h" + key                                -> header
"l" + key + layer (2 bytes, big-endian)  -> segment       record.py has the bytes of both; tables.py has codecs' tables
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from blendserve.errors import CorruptRecord, StoreError, StoreUnavailable, unraised
from blendserve.store import record
from blendserve.store.base import LOCAL, Meanwhile, TimeSaved
from blendserve.store.chunk import StoredChunk
from blendserve.store.codecs.base import Undecodable
from blendserve.store.key import ChunkKey
from blendserve.store.lmdb import tables
from blendserve.store.lmdb.ledger import ENTRY, Ledger, Txn, starting
from blendserve.store.lmdb.opening import explaining
from blendserve.store.record import Coded
from blendserve.store.traffic import Traffic

HEADER, LAYER = b"h", b"l"
_LAYER = struct.Struct(">H")


def layer_name(key: ChunkKey, l: int) -> bytes:
    """Where a layer's segment is."""
    return LAYER + key + _LAYER.pack(l)


class LMDBSnapshot:
    """One read transaction. Threads may share it; what it gives ends with it."""

    def __init__(self, path: Path, txn: Txn, traffic: Traffic) -> None:
        self._path = path
        self._txn = txn
        self._traffic = traffic
        self._using = threading.Lock()
        self._ended = False
        self.undecodable: dict[ChunkKey, Undecodable] = {}

    def expect(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None = None, saved: TimeSaved | None = None
    ) -> None:
        """Nothing to do: it is all here."""

    def tier(self, key: ChunkKey) -> str:
        return LOCAL

    def get(self, key: ChunkKey) -> StoredChunk | None:
        raw = self._raw(HEADER + key)
        if raw is None:
            self._traffic.miss(key)
            return None
        try:
            header = record.decode_header(key, raw)
            count = partial(self._count_damage, key)
            chunk = StoredChunk(key, header, partial(self._segment, key), self.tables, count)
        except Undecodable as error:
            self._traffic.miss(key, undecodable=str(error))
            self.undecodable[key] = unraised(error)
            return None
        except CorruptRecord:
            self._count_damage(key)
            raise
        self._traffic.hit(key)
        return chunk

    def coded(self, key: ChunkKey) -> Coded | None:
        """A copy of the chunk as it is coded. Raises CorruptRecord, StoreVersion."""
        raw = self._raw(HEADER + key)
        if raw is None:
            return None
        header = record.decode_header(key, raw)
        layers = range(header.shape.n_layers)
        segments = [bytes(record.check_segment(key, header, l, self._segment(key, l))) for l in layers]
        return Coded(header.shape, header.coding, [*segments], header.ids)

    def tables(self, hash: bytes) -> bytes | None:
        """Raises Undecodable when they are damaged."""
        with self._using, explaining(self._path):
            self._refuse_ended()
            return tables.read(self._txn, hash)

    def bad_tables(self) -> list[tuple[str, str]]:
        """(hash in hex, what is wrong) of tables with which something is."""
        found = []
        with self._using, explaining(self._path):
            for hash in tables.hashes(self._txn):
                try:
                    problem = tables.problem(self._txn, hash)
                except Undecodable as error:
                    problem = str(error)
                found += [(hash.hex(), problem)] if problem else []
        return found

    def keys(self) -> list[ChunkKey]:
        """Every key that has any record."""
        with self._using, explaining(self._path):
            headers = {name[1:] for name, _ in starting(self._txn, HEADER)}
            layers = {name[1 : -_LAYER.size] for name, _ in starting(self._txn, LAYER)}
            entries = {name[1:] for name, _ in starting(self._txn, ENTRY)}
        return sorted(headers | layers | entries)

    def problem(self, key: ChunkKey) -> str:
        """What is wrong with a chunk, "" when nothing is. Needs no codec: what cannot be decoded here may be whole."""
        raw = self._raw(HEADER + key)
        if raw is None:
            return "it has records, but no header"
        try:
            header = record.decode_header(key, raw)
            for l in range(header.shape.n_layers):
                record.check_segment(key, header, l, self._segment(key, l))
        except StoreError as error:
            return str(error)
        if self._segment(key, header.shape.n_layers) is not None:
            return f"it has more layers than the {header.shape.n_layers} of its header"
        with self._using, explaining(self._path):
            return Ledger(self._txn).problem(key, header.n_bytes, header.shape.n_bytes, header.shape.n_tokens)

    def end(self) -> None:
        """Called when the `with` block is left."""
        with self._using:
            self._ended = True

    def _segment(self, key: ChunkKey, l: int) -> memoryview | None:
        """Layer l's bytes in the map, unchecked; None when there are none."""
        return self._raw(layer_name(key, l))

    def _count_damage(self, key: ChunkKey) -> None:
        self._traffic.count(key, "corrupt")

    def _raw(self, name: bytes) -> memoryview | None:
        with self._using, explaining(self._path):
            self._refuse_ended()
            return self._txn.get(name)

    def _refuse_ended(self) -> None:
        if self._ended:
            raise StoreUnavailable("a chunk's view was used outside its `with store.reading()`")
