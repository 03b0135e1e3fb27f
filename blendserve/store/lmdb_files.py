"""The files of an LMDB store: opened once per process, checked, written by one at a time.

LMDB forbids opening a file twice in one process, and unmapping it under a reader is a crash. So a process has one
environment per file: every store and every open transaction counts as a user, and the last one closes it.

What no check can prevent: when another program cuts the file short while a chunk is read, the system kills the process
(SIGBUS). A file that was cut short before is refused.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import filelock
import lmdb
import xxhash

from blendserve.errors import StoreError, StoreFull, StoreUnavailable, StoreVersion

LMDBTransaction: TypeAlias = "lmdb.Transaction[memoryview]"

FORMAT = 4
OLDEST_FORMAT = 3  # without totals, which are counted when the store is first written
FORMAT_KEY = b"m:format"
MAX_READERS = 1024  # simultaneous snapshots, over all processes

_MAGIC = b"BLKV"
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}  # LMDB reports a short write as EIO
_NOT_PERMITTED = {errno.EACCES, errno.EPERM, errno.EROFS}

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
        self.path = path
        self._data = str(path / "data.mdb")
        self._pid, self._users = os.getpid(), 0
        self._one_writer = threading.Lock()
        self._writer_file = filelock.FileLock(path / "writer.lock", thread_local=False, poll_interval=0.01)
        with explaining(path):
            self._lmdb = open_lmdb(path, map_size, read_only)
            try:
                self.read_only = bool(self._lmdb.flags()["readonly"])
                self._page_bytes = int(self._lmdb.stat()["psize"])
                self._identity = _identity(self._data)
                self._refuse_truncated()
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
        with _lock:
            env = next((env for env in _open if env.is_at(path)), None)
            if env is None:
                env = cls(path, map_size, read_only)
                _open.append(env)
            elif env.read_only and not read_only:
                raise StoreUnavailable(
                    f"the KV store {path} is open for reading only in this process: close that first"
                )
            env.retain()
            return env

    def is_at(self, path: Path) -> bool:
        """Whether the files at `path` are the ones open here."""
        return _identity(path / "data.mdb") == self._identity

    def retain(self) -> None:
        """Count one more user. Raises StoreUnavailable when closed, or inherited by a fork."""
        if os.getpid() != self._pid:  # closing what it inherited would end its parent's snapshots
            raise StoreUnavailable(
                f"the KV store {self.path} was open when this process was forked, and cannot be used here: "
                "open it after the fork only, or start processes by spawn"
            )
        with _lock:
            if self not in _open:
                raise StoreUnavailable(f"the KV store {self.path} is closed: open it again")
            self._users += 1

    def release(self) -> None:
        """Count one user less. The last one closes the files."""
        with _lock:
            self._users -= 1
            if self._users == 0 and os.getpid() == self._pid:
                _open.remove(self)
                self._lmdb.close()

    @contextmanager
    def reading(self) -> Iterator[LMDBTransaction]:
        """A read transaction whose values are views into the map."""
        self.retain()
        try:
            with explaining(self.path):
                self._refuse_truncated()
                txn = self._begin_read()
            try:
                yield txn
            finally:
                txn.abort()
        finally:
            self.release()

    @contextmanager
    def writing(self, wait_s: float) -> Iterator[LMDBTransaction]:
        """A write transaction: committed at the end, aborted by any exception. wait_s: for other writers.

        Raises StoreUnavailable, also after `wait_s`; StoreFull when the disk is full.
        """
        self.retain()
        try:
            with explaining(self.path), self._alone(wait_s):
                self._lmdb.reader_check()
                with self._lmdb.begin(write=True, buffers=True) as txn:
                    yield txn
                self._extend()
        finally:
            self.release()

    def _begin_read(self) -> LMDBTransaction:
        try:
            return self._lmdb.begin(buffers=True)
        except lmdb.ReadersFullError:
            self._lmdb.reader_check()  # killed readers leave their slots
            return self._lmdb.begin(buffers=True)

    @contextmanager
    def _alone(self, wait_s: float) -> Iterator[None]:
        """Be the only writer of all threads and processes; LMDB's own lock has no timeout."""
        busy = StoreUnavailable(
            f"another writer has held the KV store {self.path} for {wait_s:g} s: wait for it or stop it",
            path=self.path,
        )
        if not self._one_writer.acquire(timeout=wait_s):
            raise busy
        try:
            if _identity(self._data) != self._identity:
                raise StoreUnavailable(
                    f"the KV store {self.path} was removed or replaced: open it again", path=self.path
                )
            try:
                self._writer_file.acquire(timeout=wait_s)
            except filelock.Timeout:
                raise busy from None
            try:
                yield
            finally:
                self._writer_file.release()
        finally:
            self._one_writer.release()

    def _refuse_truncated(self) -> None:
        """Raise StoreUnavailable for a file that was cut short: reading past its end would kill the process."""
        size, needed = self._sizes()
        if size < needed:
            raise StoreUnavailable(
                f"{self._data} was cut short, {size} bytes of {needed} are left: delete it and precompute again",
                path=self.path,
            )

    def _extend(self) -> None:
        """Make the file as long as LMDB counts it.

        LMDB does not write a page that the same transaction allocated and freed again. At the end of the file that looks
        like a file that was cut short.
        """
        size, needed = self._sizes()
        if size < needed:
            os.truncate(self._data, needed)

    def _sizes(self) -> tuple[int, int]:
        """Bytes of the file, and up to its last page; twice the latter for a file that was removed or replaced: the map
        still has its content."""
        needed = (int(self._lmdb.info()["last_pgno"]) + 1) * self._page_bytes
        try:
            status = os.stat(self._data)  # after `needed`: another process extends the file before it commits
        except FileNotFoundError:
            return needed, needed
        is_same = (status.st_dev, status.st_ino) == self._identity
        return status.st_size if is_same else needed, needed


def _identity(data: Path | str) -> tuple[int, int] | None:
    try:
        status = os.stat(data)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def explained(error: lmdb.Error | OSError, path: Path) -> StoreError:
    """The store's error for one of LMDB or of the system."""
    code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
    if isinstance(error, lmdb.MapFullError):
        what = f"the file of the KV store {path} has no space left: raise store.cap_gb and open it again"
        return MapFull(what, setting="store.cap_gb", path=path)
    if code in _DISK_FULL:
        what = f"the KV store {path} could not be written in full ({error}): free some disk space"
        return StoreFull(what, path=path)
    if isinstance(error, lmdb.InvalidError | lmdb.VersionMismatchError):
        what = (
            f"{path} holds a data.mdb that is no LMDB file of a known version: move it, or set store.location"
        )
    elif isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError):
        what = f"the file of the KV store {path} is damaged ({error}): move its data.mdb away, and precompute again"
    elif isinstance(error, lmdb.MapResizedError):
        what = f"the KV store {path} was enlarged by another process: open it again"
    elif isinstance(error, lmdb.ReadersFullError):
        what = f"the KV store {path} has {MAX_READERS} open readers already: close some"
    else:
        what = f"the KV store {path} cannot be used: {error}. Check that store.location is a writable folder"
    return StoreUnavailable(what, path=path)


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Turn errors of LMDB and of the system into StoreErrors."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise explained(error, path) from error


def open_lmdb(path: Path, map_size: int, read_only: bool) -> lmdb.Environment:
    """Open or create the files, with the largest map ever asked for; it is never resized while open."""
    if read_only:
        if not (path / "data.mdb").exists():
            raise _no_store(path)
        return _open_for_reading(path)
    path.mkdir(parents=True, exist_ok=True)
    # Without metasync a power cut may undo the last chunk, never damage the others; a kill undoes nothing.
    writable = partial(lmdb.open, str(path), max_readers=MAX_READERS, metasync=False)
    if (path / "data.mdb").exists():
        env = writable(map_size=0)  # as large as the file says
        if env.info()["map_size"] >= map_size:
            return env
        env.close()
    return writable(map_size=map_size)


def _open_for_reading(path: Path) -> lmdb.Environment:
    """Open without changing anything; without locks where the lock file may not be written.

    Then no writer elsewhere knows of this reader, so its snapshot may change underneath it (and fail checksums).
    """
    readable = partial(lmdb.open, str(path), map_size=0, readonly=True, create=False)
    try:
        return readable(max_readers=MAX_READERS)
    except (lmdb.Error, OSError) as error:
        code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
        if code not in _NOT_PERMITTED:
            raise
        return readable(lock=False)


def check_format(env: lmdb.Environment, path: Path, read_only: bool) -> None:
    """Write the format into a new store, or an older one's; refuse others, damaged ones and other programs' files."""
    empty = env.stat()["entries"] == 0
    if empty and not read_only:
        _write_format(env)
    with env.begin() as txn:
        record = txn.get(FORMAT_KEY)
    if record is None:
        raise (
            _no_store(path)
            if empty
            else StoreUnavailable(
                f"{path} is an LMDB file of another program: set store.location to another folder", path=path
            )
        )
    version = int.from_bytes(record[len(_MAGIC) :][:2], "little")
    if record != format_record(version):
        raise StoreUnavailable(
            f"the KV store {path} has a damaged format record: delete it, precompute again", path=path
        )
    if not OLDEST_FORMAT <= version <= FORMAT:
        newer = "upgrade blendserve, or set store.location to another folder"
        remedy = newer if version > FORMAT else "delete it, and run `blendserve precompute`"
        raise StoreVersion(
            f"the KV store {path} has format {version}, this blendserve reads {OLDEST_FORMAT} to {FORMAT}: {remedy}",
            path=path,
        )
    if version < FORMAT and not read_only:  # an older blendserve would not keep the totals
        _write_format(env)


def _no_store(path: Path) -> StoreUnavailable:
    return StoreUnavailable(
        f"there is no KV store at {path}: precompute one, or set store.location", path=path
    )


def _write_format(env: lmdb.Environment) -> None:
    with env.begin(write=True) as txn:
        txn.put(FORMAT_KEY, format_record(FORMAT))


def format_record(version: int) -> bytes:
    record = _MAGIC + version.to_bytes(2, "little")
    return record + xxhash.xxh3_64_digest(record)
