"""The files of an LMDB store: opened once per process, checked, written by one at a time.

LMDB forbids opening a file twice in one process, and unmapping it under a reader is a crash. So one environment per file
and process is counted: every store and every open transaction holds it, and the last one closes it.

What no check can prevent: when another program cuts the file short while a chunk is read, the system kills the process
(SIGBUS). A file that was cut short before is refused.
"""

from __future__ import annotations

import contextlib
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

FORMAT = 4  # 3: without totals, which are counted when the store is first opened for writing
OLDEST_FORMAT = 3
FORMAT_KEY = b"m:format"
MAX_READERS = 1024  # simultaneous snapshots, over all processes

_MAGIC = b"BLKV"
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}  # EIO is LMDB's word for a write cut short


class MapFull(StoreFull):
    """The file has reached the fixed size of its map, mostly through fragmentation."""


class Environment:
    """The open files of one store. Made by `acquire`, let go by `release`; safe to share between threads."""

    def __init__(self, path: Path, map_size: int, read_only: bool) -> None:
        self.path = path
        self._data = path / "data.mdb"
        self._pid = os.getpid()
        self._users = 0
        self._closed = False
        self._counting = threading.Lock()
        self._one_writer = threading.Lock()
        self._writer_file = filelock.FileLock(path / "writer.lock", thread_local=False, poll_interval=0.01)
        with explaining(path):
            self._lmdb = open_lmdb(path, map_size, read_only)
            try:
                self.read_only = bool(self._lmdb.flags()["readonly"])
                self._identity = _identity(self._data)
                self.refuse_truncated()
                check_format(self._lmdb, path, self.read_only)
                if not self.read_only:
                    self._lmdb.reader_check()  # a killed reader's slot keeps freed pages from being reused
            except BaseException:
                self._lmdb.close()
                raise

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
        with self._counting:
            if self._closed:
                raise StoreUnavailable(f"the KV store {self.path} is closed: open it again")
            self._users += 1

    def release(self) -> bool:
        """Count one user less, and close with the last one. True when that closed it."""
        with self._counting:
            self._users -= 1
            self._closed = self._users == 0 and os.getpid() == self._pid
            if self._closed:
                self._lmdb.close()
            return self._closed

    @contextmanager
    def reading(self) -> Iterator[LMDBTransaction]:
        """A read transaction whose values are views into the map."""
        self.retain()
        try:
            with explaining(self.path):
                self.refuse_truncated()
                txn = self._begin_read()
            try:
                yield txn
            finally:
                txn.abort()
        finally:
            release(self)

    @contextmanager
    def writing(self, wait_s: float) -> Iterator[LMDBTransaction]:
        """A write transaction: committed at the end, aborted by any exception.

        Waits at most `wait_s` for other writers, then raises StoreUnavailable; StoreFull when the disk is
        full.
        """
        self.retain()
        try:
            with self._alone(wait_s), explaining(self.path):
                self._lmdb.reader_check()
                with self._lmdb.begin(write=True, buffers=True) as txn:
                    yield txn
                self._extend()
        finally:
            release(self)

    def refuse_truncated(self) -> None:
        """Raise StoreUnavailable when the file was cut short: reading past its end would kill the process."""
        with contextlib.suppress(FileNotFoundError):  # deleted: the map still holds what it held
            needed = self._needed_bytes()
            status = self._data.stat()  # after `needed`: a writer elsewhere makes the file grow first
            if (status.st_dev, status.st_ino) == self._identity and status.st_size < needed:
                raise StoreUnavailable(
                    f"{self._data} was cut short, {status.st_size} bytes of {needed} are left: "
                    "delete it and precompute again",
                    path=self.path,
                )

    def _needed_bytes(self) -> int:
        """Size of the file up to its last page."""
        return int((self._lmdb.info()["last_pgno"] + 1) * self._lmdb.stat()["psize"])

    def _extend(self) -> None:
        """Make the file as long as LMDB counts it.

        LMDB does not write a page that the same transaction allocated and freed again. At the end of the file that looks
        like a file that was cut short.
        """
        needed, status = self._needed_bytes(), self._data.stat()
        if (status.st_dev, status.st_ino) == self._identity and status.st_size < needed:
            os.truncate(self._data, needed)

    def _begin_read(self) -> LMDBTransaction:
        try:
            return self._lmdb.begin(buffers=True)
        except lmdb.ReadersFullError:
            self._lmdb.reader_check()  # killed readers leave their slots
            return self._lmdb.begin(buffers=True)

    @contextmanager
    def _alone(self, wait_s: float) -> Iterator[None]:
        """Be the only writer of all threads and processes; LMDB's own lock would wait for ever."""
        if not self._one_writer.acquire(timeout=wait_s):
            raise self._busy(wait_s)
        try:
            if not self.is_at(self.path):
                raise StoreUnavailable(
                    f"the KV store {self.path} was removed or replaced: open it again", path=self.path
                )
            self._lock_file(wait_s)
            try:
                yield
            finally:
                self._writer_file.release()
        finally:
            self._one_writer.release()

    def _lock_file(self, wait_s: float) -> None:
        try:
            self._writer_file.acquire(timeout=wait_s)
        except filelock.Timeout:
            raise self._busy(wait_s) from None
        except OSError as error:
            raise explained(error, self.path) from error

    def _busy(self, wait_s: float) -> StoreUnavailable:
        return StoreUnavailable(
            f"another writer has held the KV store {self.path} for {wait_s:g} s: wait for it or stop it",
            path=self.path,
        )


_registry: list[Environment] = []
_registering = threading.RLock()


def acquire(path: Path, map_size: int, read_only: bool) -> Environment:
    """The process's environment on the files at `path`, opened if need be.

    Raises StoreUnavailable, StoreVersion.
    """
    with _registering:
        env = next((known for known in _registry if known.is_at(path)), None)
        if env is None:
            env = Environment(path, map_size, read_only)
            _registry.append(env)
        elif env.read_only and not read_only:
            raise StoreUnavailable(
                f"the KV store {path} is open for reading only in this process: close that first"
            )
        env.retain()
        return env


def release(env: Environment) -> None:
    """Give back what `acquire` gave."""
    with _registering:
        if env.release():
            _registry.remove(env)


def _free_lock_after_fork() -> None:
    global _registering
    _registering = threading.RLock()


os.register_at_fork(after_in_child=_free_lock_after_fork)


def _identity(data: Path) -> tuple[int, int] | None:
    try:
        status = data.stat()
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
        what = f"{path} holds a data.mdb that is no LMDB file of a known version: move it, or set store.path"
    elif isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError):
        what = f"the file of the KV store {path} is damaged ({error}): move its data.mdb away, and precompute again"
    elif isinstance(error, lmdb.MapResizedError):
        what = f"the KV store {path} was enlarged by another process: open it again"
    elif isinstance(error, lmdb.ReadersFullError):
        what = f"the KV store {path} has {MAX_READERS} open readers already: close some"
    else:
        what = f"the KV store {path} cannot be used: {error}. Check that store.path is a writable folder"
    return StoreUnavailable(what, path=path)


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Turn what LMDB and the system raise inside into StoreErrors."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise explained(error, path) from error


def open_lmdb(path: Path, map_size: int, read_only: bool) -> lmdb.Environment:
    """Open or create the files, with the largest map ever asked for; it is never resized while open."""
    if read_only:
        if not (path / "data.mdb").exists():
            raise StoreUnavailable(
                f"there is no KV store at {path}: precompute one, or set store.path", path=path
            )
        return _open_for_reading(path)
    path.mkdir(parents=True, exist_ok=True)
    if (path / "data.mdb").exists():
        env = _open_sized(path, 0)  # 0 = as large as the file says
        if env.info()["map_size"] >= map_size:
            return env
        env.close()
    return _open_sized(path, map_size)


def _open_sized(path: Path, map_size: int) -> lmdb.Environment:
    # Without metasync a power cut may undo the last chunk, never damage the others; a kill undoes nothing.
    return lmdb.open(str(path), map_size=map_size, max_readers=MAX_READERS, metasync=False)


def _open_for_reading(path: Path) -> lmdb.Environment:
    """Open without changing anything; where not even the lock file may be written, open without locks.

    Then no writer elsewhere knows of this reader, so its snapshot may change underneath it (and fail
    checksums).
    """
    read = partial(lmdb.open, str(path), map_size=0, readonly=True, create=False)
    try:
        return read(max_readers=MAX_READERS)
    except (lmdb.Error, OSError) as error:
        code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
        if code not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return read(lock=False)


def check_format(env: lmdb.Environment, path: Path, read_only: bool) -> None:
    """Write the format into a new store, or an older one's; refuse others, damaged ones and other programs' files."""
    empty = env.stat()["entries"] == 0
    if empty and not read_only:
        _write_format(env)
    with env.begin() as txn:
        record = txn.get(FORMAT_KEY)
    if record is None:
        what = (
            f"there is no KV store at {path}: precompute one, or set store.path"
            if empty
            else f"{path} is an LMDB file of another program: set store.path to another folder"
        )
        raise StoreUnavailable(what, path=path)
    version = int.from_bytes(record[len(_MAGIC) :][:2], "little")
    if record != format_record(version):
        raise StoreUnavailable(
            f"the KV store {path} has a damaged format record: delete it, precompute again", path=path
        )
    if not OLDEST_FORMAT <= version <= FORMAT:
        remedy = (
            "upgrade blendserve, or set store.path to another folder"
            if version > FORMAT
            else "delete it, and run `blendserve precompute`"
        )
        formats = f"{OLDEST_FORMAT} to {FORMAT}"
        raise StoreVersion(
            f"the KV store {path} has format {version}, this blendserve reads {formats}: {remedy}", path=path
        )
    if version < FORMAT and not read_only:  # an older blendserve would not keep the totals
        _write_format(env)


def _write_format(env: lmdb.Environment) -> None:
    with env.begin(write=True) as txn:
        txn.put(FORMAT_KEY, format_record(FORMAT))


def format_record(version: int) -> bytes:
    record = _MAGIC + version.to_bytes(2, "little")
    return record + xxhash.xxh3_64_digest(record)
