"""Chunk KV in an LMDB file: the store of txn_store.py over LMDB's transactions. Segments are read out of the map.

The map is sized from the cap, with a margin for page rounding and fragmentation, so that the cap is reached first. If
fragmentation fills the map before, chunks are evicted early. The file never grows beyond the map.

LMDB forbids opening a file twice in one process, and unmapping it under a reader is a crash. So a process has one
environment per file: every store and every open transaction counts as a user, and the last one closes it.

What no check can prevent: when another program cuts the file short while a chunk is read, the system kills the process
(SIGBUS). A file that was cut short before is refused.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import filelock
import lmdb

from blendserve.config import StoreBackendConfig
from blendserve.errors import StoreUnavailable
from blendserve.forks import REMEDY, Home
from blendserve.machine import checked_cap, free_disk
from blendserve.registry import ADMISSIONS
from blendserve.store.blobs import ROOM
from blendserve.store.bounded import Breaker
from blendserve.store.clock import TimeSource
from blendserve.store.key import ChunkKey
from blendserve.store.lmdb_errors import NOT_PERMITTED, MapFull, code_of, explained, explaining, unavailable
from blendserve.store.lmdb_files import (
    FORMAT,
    FORMAT_KEY,
    check_format,
    format_record,
    identity,
    open_files,
    refuse_damaged,
)
from blendserve.store.policies import Admission
from blendserve.store.record import ChunkRecord
from blendserve.store.txn_store import TxnStore

MIB = 1 << 20
WRITER_WAIT_S = 10.0  # a put takes milliseconds to a second
# that a thread waits for another process at a time, while other threads of its own wait behind it
TURN_S = 0.1

log = logging.getLogger(__name__)


def map_bytes(cap_bytes: int) -> int:
    """Size of the map for a cap: twice that, 256 MiB, and room for blobs. The file grows with its content only."""
    return (2 * cap_bytes // MIB + 257) * MIB + ROOM


class LMDBStore(TxnStore):
    """A KVStore in the folder `path`, of at most `cap_bytes` of chunks as stored.

    `read_only` opens an existing store and changes nothing; it works on a read-only disk. Any number of processes
    may read while one writes; another writer waits up to WRITER_WAIT_S, then gets StoreUnavailable. A write of a request
    waits REQUEST_WAIT_S; after that none is tried for a pause. A store that was removed or replaced is opened anew.
    A process must open the store again to read chunks that another wrote under a much larger cap.
    Raises StoreUnavailable when `path` cannot be used, StoreVersion for another format.
    """

    kind = "lmdb"
    needs_folder = True

    def __init__(
        self,
        path: str | Path,
        cap_bytes: int,
        read_only: bool = False,
        admission: Admission | None = None,
        clock: TimeSource = time,
    ) -> None:
        super().__init__(cap_bytes, admission, clock)
        self.path = Path(path)
        self.location = str(path)
        self.read_only = read_only
        self._closed = False
        effect = "what requests compute is not stored until it can be written"
        self._breaker = Breaker(f"the KV store {path}", now=clock.monotonic, effect=effect)
        self._opening = threading.Lock()
        self._env = Environment.open(self.path, map_bytes(cap_bytes), read_only)

    @classmethod
    def from_config(cls, config: StoreBackendConfig, path: Path | None, read_only: bool) -> LMDBStore:
        """A store on a disk that can only be read is opened for reading, with a warning."""
        assert path is not None
        data = path / "data.mdb"
        cap_bytes = config.cap_bytes
        free = free_disk(path)
        if free is not None:
            free += data.stat().st_size if data.exists() else 0
            if config.cap_gb is None:
                cap_bytes = min(cap_bytes, free)
            else:
                cap_bytes = checked_cap(cap_bytes, "store.cap_gb", free, "the disk")
        admission = ADMISSIONS.load(config.admission)()
        try:
            return cls(path, cap_bytes, read_only, admission)
        except StoreUnavailable as error:
            cause = error.__cause__
            is_refused = isinstance(cause, (lmdb.Error, OSError)) and code_of(cause) in NOT_PERMITTED
            if read_only or not is_refused or not data.exists():
                raise
            log.warning("the KV store %s cannot be written (%s): nothing new is stored", path, cause)
            return cls(path, cap_bytes, True, admission)

    def close(self) -> None:
        if not self._closed:
            self._write_notes(wait_s=1.0)
            self._closed = True
            self._env.release()

    def admits(self, key: ChunkKey, n_bytes: int) -> bool:
        self._breaker.refuse_open()
        return super().admits(key, n_bytes)

    def _begin_read(self) -> AbstractContextManager[_LMDBTxn]:
        return self._current().reading()

    def _begin_write(self, wait_s: float | None) -> AbstractContextManager[_LMDBTxn]:
        if self.read_only:
            raise unavailable(self.path, "is open for reading only")
        if wait_s:
            return self._write_soon(wait_s)
        return self._write_in_time(WRITER_WAIT_S if wait_s is None else 0.0)

    @contextmanager
    def _write_soon(self, wait_s: float) -> Iterator[_LMDBTxn]:
        """Write for a request: a writer that was stopped holds up the first one alone."""
        with self._breaker.call(), self._current().writing(wait_s) as txn:
            yield txn

    @contextmanager
    def _write_in_time(self, wait_s: float) -> Iterator[_LMDBTxn]:
        with self._current().writing(wait_s) as txn:
            self._breaker.success()
            yield txn

    def _current(self) -> Environment:
        """The files at the path now. Raises StoreUnavailable, also where there are none and the folder is gone."""
        if self._closed:
            raise unavailable(self.path, "is closed: open it again")
        with self._opening:
            env = self._env
            if not env.is_current:
                if not self.path.parent.is_dir():
                    raise unavailable(
                        self.path, "was removed, with its folder: put it back, or stop this process"
                    )
                env.retire()
                self._env = Environment.open(self.path, map_bytes(self.cap_bytes), self.read_only)
                log.warning("the KV store %s was removed or replaced: opening it again", self.path)
            return self._env

    def _put(self, record: ChunkRecord, pin: bool) -> None:
        try:
            super()._put(record, pin)
        except MapFull:
            self._evict_ahead(record.key, 2 * record.n_bytes)
            super()._put(record, pin)

    def _evict_ahead(self, key: ChunkKey, n_bytes: int) -> None:
        """Evict that much. LMDB reuses the pages that a transaction freed only in the second one after it."""
        with self._write() as ledger:
            self._evict(ledger, self._victims(ledger, key, n_bytes, ledger.totals().n_bytes))
        with self._write() as ledger:
            ledger.txn.put(FORMAT_KEY, format_record(FORMAT))  # a transaction that writes nothing is none


class _LMDBTxn:
    """LMDB's transaction; its errors are the store's."""

    def __init__(self, txn: lmdb.Transaction[memoryview], path: Path) -> None:
        self._txn = txn
        self._path = path
        self.put = txn.put  # `Environment.writing` explains the errors of `put` and `delete`
        self.delete = txn.delete

    def get(self, name: bytes) -> memoryview | None:
        try:
            return self._txn.get(name)
        except lmdb.Error as error:
            raise explained(error, self._path) from error

    def scan(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, memoryview]]:
        with explaining(self._path):
            cursor = self._txn.cursor()
            found = cursor.set_range(max(prefix, start))
            while found and bytes(cursor.key()[: len(prefix)]) == prefix:
                yield bytes(cursor.key()), cursor.value()
                found = cursor.next()


_open: list[Environment] = []
_lock = threading.RLock()  # of `_open` and of every environment's users
_opening = threading.RLock()  # taken before `_lock`, and held while files are opened and checked


def _renew_lock() -> None:
    global _lock, _opening
    _lock = threading.RLock()
    _opening = threading.RLock()


if hasattr(os, "register_at_fork"):  # Unix alone has forks
    os.register_at_fork(after_in_child=_renew_lock)


class Environment:
    """The open files of one store. Threads may share it."""

    def __init__(self, path: Path, map_size: int, read_only: bool) -> None:
        self.path = path
        self._data = path / "data.mdb"
        self._home = Home()
        self._users = 0
        self._transactions = 0
        self._one_writer = threading.Lock()
        self._writer_file = filelock.FileLock(path / "writer.lock", thread_local=False, poll_interval=0.01)
        with explaining(path):
            self._lmdb = open_files(path, map_size, read_only)
            try:
                self.read_only = bool(self._lmdb.flags()["readonly"])
                self._identity = identity(self._data)
                self._refuse_truncated()
                refuse_damaged(self._lmdb, path)
                check_format(self._lmdb, path, self.read_only)
                if not self.read_only:
                    self._lmdb.reader_check()  # the slot of a killed reader keeps freed pages from being reused
            except BaseException:
                self._lmdb.close()
                raise

    @classmethod
    def open(cls, path: Path, map_size: int, read_only: bool) -> Environment:
        """The process's environment on the files at `path`, with one user more: call `release` once.

        Raises StoreUnavailable, StoreVersion.
        """
        with _opening:
            with _lock:
                env = next((env for env in _open if identity(path / "data.mdb") == env._identity), None)
                if env is not None:
                    if env.read_only and not read_only:
                        raise unavailable(
                            path,
                            "is open for reading only in this process: close that store before you open it for writing",
                        )
                    env.retain()
                    return env
            env = cls(path, map_size, read_only)
            with _lock:
                _open.append(env)
                env.retain()
            return env

    def retain(self, transactions: int = 0) -> None:
        """Count one more user, which has so many transactions.

        Raises StoreUnavailable when closed, or inherited by a fork.
        """
        if not self._home.is_here:  # closing what it inherited would end its parent's snapshots
            raise unavailable(
                self.path,
                f"was open when this process was forked, and cannot be used here: {REMEDY}",
            )
        with _lock:
            if self not in _open:
                raise unavailable(self.path, "is closed: open it again")
            self._users += 1
            self._transactions += transactions

    def release(self, transactions: int = 0) -> None:
        """Count one user less. The last one closes the files."""
        with _lock:
            self._users -= 1
            self._transactions -= transactions
            if self._users == 0 and self._home.is_here:
                self._close()

    def retire(self) -> None:
        """Close files that the path no longer names, so that it can be opened anew.

        Raises StoreUnavailable while a transaction is open: LMDB keeps its lock file open once in a process.
        """
        with _lock:
            if self._transactions:
                what = "was removed or replaced: it is opened again when its open snapshots end"
                raise unavailable(self.path, what)
            self._close()

    def _close(self) -> None:
        if self in _open:
            _open.remove(self)
            self._lmdb.close()

    @property
    def is_current(self) -> bool:
        """Whether the path still names these files. The number of a closed file may be another one's by now."""
        return not self._home.is_here or (self in _open and identity(self._data) == self._identity)

    @contextmanager
    def reading(self) -> Iterator[_LMDBTxn]:
        """A read transaction whose values are views into the map."""
        self.retain(transactions=1)
        try:
            with explaining(self.path):
                self._refuse_truncated()
                try:
                    txn = self._lmdb.begin(buffers=True)
                except lmdb.ReadersFullError:
                    self._lmdb.reader_check()  # killed readers leave their slots
                    txn = self._lmdb.begin(buffers=True)
            try:
                yield _LMDBTxn(txn, self.path)
            finally:
                txn.abort()
        finally:
            self.release(transactions=1)

    @contextmanager
    def writing(self, wait_s: float) -> Iterator[_LMDBTxn]:
        """A write transaction: committed at the end, aborted by any exception. wait_s: for other writers.

        Raises StoreUnavailable, also after `wait_s`; StoreFull when the disk is full.
        """
        self.retain(transactions=1)
        try:
            with explaining(self.path), self._alone(wait_s):
                self._lmdb.reader_check()
                with self._lmdb.begin(write=True, buffers=True) as txn:
                    yield _LMDBTxn(txn, self.path)
                # LMDB does not write a page at the end that the same transaction allocated and freed again: extend the
                # file, or it looks like one that was cut short.
                size, needed = self._sizes()
                if size < needed:
                    os.truncate(self._data, needed)
        finally:
            self.release(transactions=1)

    @contextmanager
    def _alone(self, wait_s: float) -> Iterator[None]:
        """Be the only writer of all threads and processes; LMDB's own lock has no timeout."""
        end = time.monotonic() + wait_s
        while not self._take_turn(min(wait_s, TURN_S)):
            if time.monotonic() >= end:
                raise unavailable(
                    self.path, f"has had another writer for {wait_s:g} s: wait for that process, or stop it"
                )
        try:
            if identity(self._data) != self._identity:
                raise unavailable(self.path, "was removed or replaced: open it again")
            yield
        finally:
            self._writer_file.release()
            self._one_writer.release()

    def _take_turn(self, wait_s: float) -> bool:
        """Take both locks. wait_s: for another process, which may have been stopped; threads of this one go on."""
        if not self._one_writer.acquire(timeout=WRITER_WAIT_S if wait_s else 0.0):
            return False
        try:
            self._writer_file.acquire(timeout=wait_s)
        except filelock.Timeout:
            self._one_writer.release()
            return False
        except BaseException:
            self._one_writer.release()
            raise
        return True

    def _refuse_truncated(self) -> None:
        """Raise StoreUnavailable for a file that was cut short: reading past its end would kill the process."""
        size, needed = self._sizes()
        if size < needed:
            raise unavailable(
                self.path,
                f"was cut short, {size} bytes of {needed} are left: delete its data.mdb and precompute again",
            )

    def _sizes(self) -> tuple[int, int]:
        """Bytes of the file, and up to its last page. Of a file that was removed or replaced, twice the latter: the map
        still has its content."""
        needed = (int(self._lmdb.info()["last_pgno"]) + 1) * int(self._lmdb.stat()["psize"])
        size = os.stat(self._data).st_size if identity(self._data) == self._identity else needed
        return size, needed  # in this order: another process extends the file before it commits
