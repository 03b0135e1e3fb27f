"""Chunk KV in an LMDB file: the store of txn_store.py over LMDB's transactions. Segments are read out of the map.

The map is sized from the cap, with a margin for page rounding and fragmentation, so that the cap is reached first. If
fragmentation fills the map before, chunks are evicted early. The file never grows beyond the map.

LMDB forbids opening a file twice in one process, and unmapping it under a reader is a crash. So a process has one
environment per file: every store and every open transaction counts as a user, and the last one closes it.

What no check can prevent: when another program cuts the file short while a chunk is read, the system kills the process
(SIGBUS). A file that was cut short before is refused.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import filelock
import lmdb
import xxhash

from blendserve.config import StoreBackendConfig
from blendserve.errors import StoreError, StoreFull, StoreUnavailable, StoreVersion
from blendserve.store.base import store_full
from blendserve.store.blobs import ROOM
from blendserve.store.clock import Clock
from blendserve.store.policies import Admission, Eviction, Policies
from blendserve.store.record import ChunkRecord
from blendserve.store.txn_store import TxnStore

MIB = 1 << 20
WRITER_WAIT_S = 10.0  # a put takes milliseconds to a second
FORMAT = 4
OLDEST_FORMAT = 3  # without totals, which are counted when the store is first written
FORMAT_KEY = b"m:format"
MAX_READERS = 1024  # simultaneous snapshots, over all processes

_MAGIC = b"BLKV"
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}  # LMDB reports a short write as EIO
_NOT_PERMITTED = {errno.EACCES, errno.EPERM, errno.EROFS}


def map_bytes(cap_bytes: int) -> int:
    """Size of the map for a cap: twice that, 256 MiB, and room for blobs. The file grows with its content only."""
    return (2 * cap_bytes // MIB + 257) * MIB + ROOM


class LMDBStore(TxnStore):
    """A KVStore in the folder `path`, of at most `cap_bytes` of chunks as stored.

    `read_only` opens an existing store and changes nothing; it works on a read-only disk. Any number of processes
    may read while one writes; another writer waits up to WRITER_WAIT_S, then gets StoreUnavailable.
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
        eviction: Eviction | None = None,
        admission: Admission | None = None,
        clock: Clock = time,
    ) -> None:
        super().__init__(cap_bytes, eviction, admission, clock)
        self.path, self.location, self.read_only = Path(path), str(path), read_only
        self._closed = False
        self._env = Environment.open(self.path, map_bytes(cap_bytes), read_only)

    @classmethod
    def from_config(
        cls, config: StoreBackendConfig, path: Path | None, read_only: bool, policies: Policies
    ) -> LMDBStore:
        assert path is not None
        return cls(path, config.cap_bytes, read_only, *policies)

    def close(self) -> None:
        if not self._closed:
            self._write_notes(wait_s=1.0)
            self._closed = True
            self._env.release()

    def _begin_read(self) -> AbstractContextManager[_LMDBTxn]:
        if self._closed:
            raise _unavailable(self.path, "is closed: open it again")
        return self._env.reading()

    def _begin_write(self, wait_s: float | None) -> AbstractContextManager[_LMDBTxn]:
        if self._closed or self.read_only:
            raise _unavailable(
                self.path, "is closed: open it again" if self._closed else "is open for reading only"
            )
        return self._env.writing(WRITER_WAIT_S if wait_s is None else min(wait_s, WRITER_WAIT_S))

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


class _LMDBTxn:
    """LMDB's transaction; its errors are the store's."""

    def __init__(self, txn: lmdb.Transaction[memoryview], path: Path) -> None:
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


_open: list[Environment] = []
_lock = threading.RLock()  # of `_open` and of every environment's users


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class MapFull(StoreFull):
    """The file has reached the fixed size of its map, mostly through fragmentation."""


class Environment:
    """The open files of one store. Threads may share it."""

    def __init__(self, path: Path, map_size: int, read_only: bool) -> None:
        self.path, self._data = path, path / "data.mdb"
        self._pid, self._users = os.getpid(), 0
        self._one_writer = threading.Lock()
        self._writer_file = filelock.FileLock(path / "writer.lock", thread_local=False, poll_interval=0.01)
        with explaining(path):
            self._lmdb = _open_lmdb(path, map_size, read_only)
            try:
                self.read_only = bool(self._lmdb.flags()["readonly"])
                self._identity = _identity(self._data)
                self._refuse_truncated()
                _check_format(self._lmdb, path, self.read_only)
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
        with _lock:
            env = next((env for env in _open if _identity(path / "data.mdb") == env._identity), None)
            if env is None:
                env = cls(path, map_size, read_only)
                _open.append(env)
            elif env.read_only and not read_only:
                raise _unavailable(
                    path,
                    "is open for reading only in this process: close that store before you open it for writing",
                )
            env.retain()
            return env

    def retain(self) -> None:
        """Count one more user. Raises StoreUnavailable when closed, or inherited by a fork."""
        if os.getpid() != self._pid:  # closing what it inherited would end its parent's snapshots
            raise _unavailable(
                self.path,
                "was open when this process was forked, and cannot be used here: open it after the fork only, or start "
                "processes by spawn",
            )
        with _lock:
            if self not in _open:
                raise _unavailable(self.path, "is closed: open it again")
            self._users += 1

    def release(self) -> None:
        """Count one user less. The last one closes the files."""
        with _lock:
            self._users -= 1
            if self._users == 0 and os.getpid() == self._pid:
                _open.remove(self)
                self._lmdb.close()

    @contextmanager
    def reading(self) -> Iterator[_LMDBTxn]:
        """A read transaction whose values are views into the map."""
        self.retain()
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
            self.release()

    @contextmanager
    def writing(self, wait_s: float) -> Iterator[_LMDBTxn]:
        """A write transaction: committed at the end, aborted by any exception. wait_s: for other writers.

        Raises StoreUnavailable, also after `wait_s`; StoreFull when the disk is full.
        """
        self.retain()
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
            self.release()

    @contextmanager
    def _alone(self, wait_s: float) -> Iterator[None]:
        """Be the only writer of all threads and processes; LMDB's own lock has no timeout."""
        busy = _unavailable(
            self.path, f"has had another writer for {wait_s:g} s: wait for that process, or stop it"
        )
        if not self._one_writer.acquire(timeout=wait_s):
            raise busy
        try:
            if _identity(self._data) != self._identity:
                raise _unavailable(self.path, "was removed or replaced: open it again")
            with self._writer_file.acquire(timeout=wait_s):
                yield
        except filelock.Timeout:
            raise busy from None
        finally:
            self._one_writer.release()

    def _refuse_truncated(self) -> None:
        """Raise StoreUnavailable for a file that was cut short: reading past its end would kill the process."""
        size, needed = self._sizes()
        if size < needed:
            raise _unavailable(
                self.path,
                f"was cut short, {size} bytes of {needed} are left: delete its data.mdb and precompute again",
            )

    def _sizes(self) -> tuple[int, int]:
        """Bytes of the file, and up to its last page. Of a file that was removed or replaced, twice the latter: the map
        still has its content."""
        needed = (int(self._lmdb.info()["last_pgno"]) + 1) * int(self._lmdb.stat()["psize"])
        size = os.stat(self._data).st_size if _identity(self._data) == self._identity else needed
        return size, needed  # in this order: another process extends the file before it commits


def _identity(data: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(data)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _unavailable(path: Path, what: str) -> StoreUnavailable:
    return StoreUnavailable(f"the KV store {path} {what}", path=path)


_DAMAGED = "has a damaged file: move its data.mdb away, and precompute again"
_REASONS: dict[type[Exception], str] = {
    lmdb.InvalidError: "has a data.mdb that is no LMDB file of a known version: move it, or set store.location",
    lmdb.VersionMismatchError: "has a data.mdb of another LMDB version: move it, or set store.location",
    **dict.fromkeys((lmdb.CorruptedError, lmdb.PageNotFoundError), _DAMAGED),
    lmdb.MapResizedError: "was enlarged by another process: open it again",
    lmdb.ReadersFullError: f"has {MAX_READERS} open readers already: close some",
}


def explained(error: lmdb.Error | OSError, path: Path) -> StoreError:
    """The store's error for one of LMDB or of the system."""
    if isinstance(error, lmdb.MapFullError):
        what = f"the file of the KV store {path} has no space left: raise store.cap_gb and open it again"
        return MapFull(what, setting="store.cap_gb", path=path)
    if _code(error) in _DISK_FULL:
        what = f"the KV store {path} could not be written in full ({error}): free some disk space"
        return StoreFull(what, path=path)
    usual = f"cannot be used: {error}. Check that store.location is a writable folder"
    return _unavailable(path, _REASONS.get(type(error), usual))


def _code(error: lmdb.Error | OSError) -> int | None:
    return error.errno if isinstance(error, OSError) else getattr(error, "code", 0)


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Turn errors of LMDB and of the system into StoreErrors."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise explained(error, path) from error


def _open_lmdb(path: Path, map_size: int, read_only: bool) -> lmdb.Environment:
    """Open or create the files, with the largest map ever asked for; it is never resized while open.

    Opening for reading changes nothing. Where the lock file may not be written it takes no lock: then no writer
    elsewhere knows of this reader, so its snapshot may change underneath it (and fail checksums).
    """
    exists = (path / "data.mdb").exists()
    if read_only:
        if not exists:
            raise _unavailable(path, "does not exist: precompute one, or set store.location")
        readable = partial(lmdb.open, str(path), map_size=0, readonly=True, create=False)
        try:
            return readable(max_readers=MAX_READERS)
        except (lmdb.Error, OSError) as error:
            if _code(error) not in _NOT_PERMITTED:
                raise
            return readable(lock=False)
    path.mkdir(parents=True, exist_ok=True)
    # Without metasync a power cut may undo the last chunk, never damage the others; a kill undoes nothing.
    env = lmdb.open(str(path), map_size=0 if exists else map_size, max_readers=MAX_READERS, metasync=False)
    if env.info()["map_size"] < map_size:  # 0: as large as the file says
        env.set_mapsize(map_size)
    return env


def _check_format(env: lmdb.Environment, path: Path, read_only: bool) -> None:
    """Write the format into a new store, or an older one's; refuse others, damaged ones and other programs' files."""
    empty = env.stat()["entries"] == 0
    with env.begin() as txn:
        record = format_record(FORMAT) if empty and not read_only else txn.get(FORMAT_KEY)
    if record is None:
        what = "is empty: precompute it" if empty else "is an LMDB file of another program"
        raise _unavailable(path, f"{what}, or set store.location to another folder")
    version = int.from_bytes(record[len(_MAGIC) :][:2], "little")
    if record != format_record(version):
        raise _unavailable(path, "has a damaged format record: delete it, precompute again")
    if not OLDEST_FORMAT <= version <= FORMAT:
        newer = "upgrade blendserve, or set store.location to another folder"
        remedy = newer if version > FORMAT else "delete it, and run `blendserve precompute`"
        raise StoreVersion(
            f"the KV store {path} has format {version}, this blendserve reads {OLDEST_FORMAT} to {FORMAT}: {remedy}",
            path=path,
        )
    if (empty or version < FORMAT) and not read_only:  # an older blendserve would not keep the totals
        with env.begin(write=True) as txn:
            txn.put(FORMAT_KEY, format_record(FORMAT))


def format_record(version: int) -> bytes:
    record = _MAGIC + version.to_bytes(2, "little")
    return record + xxhash.xxh3_64_digest(record)
