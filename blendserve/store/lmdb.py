"""Chunk KV in an LMDB file: the store of txn_store.py over LMDB's transactions. Segments are read out of the map.

The map is sized from the cap, with a margin for page rounding and fragmentation, so that the cap is reached first. If
fragmentation fills the map before, chunks are evicted early. The file never grows beyond the map.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from blendserve.config import PlaceConfig
from blendserve.errors import StoreUnavailable
from blendserve.store.base import store_full
from blendserve.store.blobs import ROOM
from blendserve.store.clock import Clock
from blendserve.store.lmdb_files import (
    FORMAT,
    FORMAT_KEY,
    Environment,
    LMDBTransaction,
    MapFull,
    explained,
    explaining,
    format_record,
)
from blendserve.store.policies import Admission, Eviction, Policies
from blendserve.store.record import ChunkRecord
from blendserve.store.txn_store import TxnStore

MIB = 1 << 20
WRITER_WAIT_S = 10.0  # a put takes milliseconds to a second


def map_bytes(cap_bytes: int) -> int:
    """Size of the map for a cap: twice that, 256 MiB, and room for blobs. The file grows with its content only."""
    return (2 * cap_bytes // MIB + 257) * MIB + ROOM


class LMDBStore(TxnStore):
    """A KVStore in the folder `path`, of at most `cap_bytes` of chunks as stored.

    `read_only` opens an existing store and changes nothing; it works on a read-only disk. Any number of processes
    may read while one writes; another writer waits up to `writer_wait_s`, then gets StoreUnavailable.
    A process must open the store again to read chunks that another wrote under a much larger cap.
    Raises StoreUnavailable when `path` cannot be used, StoreVersion for another format.
    """

    kind = "lmdb"
    persistent = needs_folder = True

    def __init__(
        self,
        path: str | Path,
        cap_bytes: int,
        read_only: bool = False,
        writer_wait_s: float = WRITER_WAIT_S,
        eviction: Eviction | None = None,
        admission: Admission | None = None,
        clock: Clock = time,
    ) -> None:
        super().__init__(cap_bytes, eviction, admission, clock)
        self.path, self.location, self.read_only = Path(path), str(path), read_only
        self._wait_s = writer_wait_s
        self._closed = False
        self._env = Environment.open(self.path, map_bytes(cap_bytes), read_only)

    @classmethod
    def from_config(
        cls, config: PlaceConfig, path: Path | None, read_only: bool, policies: Policies
    ) -> LMDBStore:
        assert path is not None
        return cls(path, config.cap_bytes, read_only, WRITER_WAIT_S, *policies)

    def close(self) -> None:
        if not self._closed:
            self._write_notes(wait_s=1.0)
            self._closed = True
            self._env.release()

    @contextmanager
    def _begin_read(self) -> Iterator[_LMDBTxn]:
        self._refuse(self._closed, "is closed: open it again")
        with self._env.reading() as txn:
            yield _LMDBTxn(txn, self.path)

    @contextmanager
    def _begin_write(self, wait_s: float | None) -> Iterator[_LMDBTxn]:
        self._refuse(self._closed, "is closed: open it again")
        self._refuse(self.read_only, "is open for reading only")
        with self._env.writing(self._wait_s if wait_s is None else min(wait_s, self._wait_s)) as txn:
            yield _LMDBTxn(txn, self.path)

    def _put(self, record: ChunkRecord, pin: bool) -> None:
        try:
            super()._put(record, pin)
        except MapFull:
            self._evict_ahead(2 * record.n_bytes)
            super()._put(record, pin)

    def _evict_ahead(self, n_bytes: int) -> None:
        """Evict that much. LMDB reuses the pages that a transaction freed only in the second one after it."""
        with self._write() as ledger:
            victims = self._eviction.victims(ledger.oldest(b"", {}), n_bytes)
            if victims is None:
                stored = ledger.totals().n_bytes
                raise store_full(f"the file of the KV store {self.path}", stored, n_bytes, self.cap_bytes)
            self._evict(ledger, victims)
        with self._write() as ledger:
            ledger.txn.put(FORMAT_KEY, format_record(FORMAT))  # a transaction that writes nothing is none

    def _refuse(self, is_refused: bool, why: str) -> None:
        if is_refused:
            raise StoreUnavailable(f"the KV store {self.path} {why}", path=self.path)


class _LMDBTxn:
    """LMDB's transaction; its errors are the store's."""

    def __init__(self, txn: LMDBTransaction, path: Path) -> None:
        self._txn, self._path = txn, path
        self.put, self.delete = txn.put, txn.delete  # their errors are explained by `Environment.writing`

    def get(self, name: bytes) -> memoryview | None:
        try:
            return self._txn.get(name)
        except lmdb.Error as error:
            raise explained(error, self._path) from error

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
        with explaining(self._path):
            cursor = self._txn.cursor()
            found = cursor.set_range(prefix)
            while found and bytes(cursor.key()[: len(prefix)]) == prefix:
                yield bytes(cursor.key()), cursor.value()
                found = cursor.next()
