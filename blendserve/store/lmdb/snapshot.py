"""Reading chunks out of an LMDB map: one read transaction, and views that live as long as it.

"h" + key                                -> header
"l" + key + layer (2 bytes, big-endian)  -> payload       record.py has the bytes of both
"""

from __future__ import annotations

import struct
import threading
from pathlib import Path

import torch

from blendserve.errors import CorruptRecord, StoreError, StoreUnavailable
from blendserve.store import record
from blendserve.store.key import ChunkKey
from blendserve.store.lmdb.ledger import ENTRY, Ledger, Txn, starting
from blendserve.store.lmdb.opening import explaining
from blendserve.store.traffic import Traffic

HEADER, LAYER = b"h", b"l"
_LAYER = struct.Struct(">H")


def layer_name(key: ChunkKey, l: int) -> bytes:
    """Where a layer's payload is."""
    return LAYER + key + _LAYER.pack(l)


class LMDBSnapshot:
    """One read transaction. Threads may share it; what it gives ends with it."""

    def __init__(self, path: Path, txn: Txn, traffic: Traffic) -> None:
        self._path = path
        self._txn = txn
        self._traffic = traffic
        self._using = threading.Lock()
        self._ended = False

    def get(self, key: ChunkKey) -> LMDBChunk | None:
        header = self._raw(HEADER + key)
        if header is None:
            self._traffic.miss(key)
            return None
        try:
            chunk = LMDBChunk(self, key, record.decode_header(key, header))
        except CorruptRecord:
            self._traffic.count(key, "corrupt")
            raise
        self._traffic.hit(key)
        return chunk

    def layer(self, key: ChunkKey, header: record.Header, l: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer of a chunk with this header, checked."""
        try:
            return self._checked_layer(key, header, l)
        except CorruptRecord:
            self._traffic.count(key, "corrupt")
            raise

    def keys(self) -> list[ChunkKey]:
        """Every key that has any record."""
        with self._using, explaining(self._path):
            headers = {name[1:] for name, _ in starting(self._txn, HEADER)}
            layers = {name[1 : -_LAYER.size] for name, _ in starting(self._txn, LAYER)}
            entries = {name[1:] for name, _ in starting(self._txn, ENTRY)}
        return sorted(headers | layers | entries)

    def problem(self, key: ChunkKey) -> str:
        """What is wrong with a chunk, "" when nothing is."""
        raw = self._raw(HEADER + key)
        if raw is None:
            return "it has records, but no header"
        try:
            header = record.decode_header(key, raw)
            for l in range(header.n_layers):
                self._checked_layer(key, header, l)
        except StoreError as error:
            return str(error)
        if self._raw(layer_name(key, header.n_layers)) is not None:
            return f"it has more layers than the {header.n_layers} of its header"
        with self._using, explaining(self._path):
            return Ledger(self._txn).problem(key, header.n_bytes, header.n_tokens)

    def end(self) -> None:
        """Called when the `with` block is left."""
        with self._using:
            self._ended = True

    def _checked_layer(
        self, key: ChunkKey, header: record.Header, l: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raw = self._raw(layer_name(key, l))
        if raw is None:
            raise CorruptRecord(key, f"layer {l} is missing")
        return record.decode_layer(key, header, l, raw)

    def _raw(self, name: bytes) -> memoryview | None:
        with self._using, explaining(self._path):
            if self._ended:
                raise StoreUnavailable("a chunk's view was used outside its `with store.reading()`")
            return self._txn.get(name)


class LMDBChunk:
    """A chunk in the map."""

    def __init__(self, snapshot: LMDBSnapshot, key: ChunkKey, header: record.Header) -> None:
        self._snapshot = snapshot
        self._key = key
        self._header = header

    @property
    def n_layers(self) -> int:
        return self._header.n_layers

    @property
    def n_tokens(self) -> int:
        return self._header.n_tokens

    @property
    def n_bytes(self) -> int:
        return self._header.n_bytes

    @property
    def stamp(self) -> record.Header:
        """The checksums of all layers are in it."""
        return self._header

    def layer(self, l: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= l < self.n_layers:
            raise IndexError(f"a chunk of {self.n_layers} layers has no layer {l}")
        return self._snapshot.layer(self._key, self._header, l)
