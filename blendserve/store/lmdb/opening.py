"""Opening an LMDB file as a store: its map, its format, and what LMDB's errors mean here."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import lmdb
import xxhash

from blendserve.errors import StoreError, StoreFull, StoreUnavailable, StoreVersion

FORMAT = (
    3  # 2: records without token ids; 1: of format 1, and ledger entries without uncoded bytes; all are read
)
_STORE_MAGIC = b"BLKV"

FORMAT_KEY = b"m:format"
MAX_READERS = 1024  # simultaneous snapshots, over all processes
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}  # EIO is LMDB's word for a write cut short


class MapFull(StoreFull):
    """The file has reached the fixed size of its map, mostly through fragmentation."""


def explained(error: lmdb.Error | OSError, path: Path) -> StoreError:
    """What an error of LMDB or of the system means to those who use the store at `path`."""
    code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
    if isinstance(error, lmdb.MapFullError):
        return MapFull(
            f"the file of the KV store {path} has no space left: raise store.cap_gb and open it again",
            setting="store.cap_gb",
            path=path,
        )
    if code in _DISK_FULL:
        return StoreFull(
            f"the KV store {path} could not be written in full ({error}): free some disk space", path=path
        )
    if isinstance(error, lmdb.InvalidError | lmdb.VersionMismatchError):
        return StoreUnavailable(
            f"{path} holds a data.mdb that is no LMDB file of a known version: move it, or set store.path",
            path=path,
        )
    if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError):
        return StoreUnavailable(
            f"the file of the KV store {path} is damaged ({error}): move its data.mdb away, and precompute again",
            path=path,
        )
    if isinstance(error, lmdb.MapResizedError):
        return StoreUnavailable(
            f"the KV store {path} was enlarged by another process: open it again", path=path
        )
    if isinstance(error, lmdb.ReadersFullError):
        return StoreUnavailable(
            f"the KV store {path} has {MAX_READERS} open readers already: close some", path=path
        )
    return StoreUnavailable(
        f"the KV store {path} cannot be used: {error}. Check that store.path is a writable folder", path=path
    )


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
    """Write the format into a new store; refuse a newer one, a damaged one and another program's file."""
    if env.stat()["entries"] == 0 and not read_only:
        with env.begin(write=True) as txn:
            txn.put(FORMAT_KEY, _format_record(FORMAT), overwrite=False)
    with env.begin() as txn:
        record = txn.get(FORMAT_KEY)
    if record is None and env.stat()["entries"] == 0:
        raise StoreUnavailable(
            f"there is no KV store at {path}: precompute one, or set store.path", path=path
        )
    if record is None:
        raise StoreUnavailable(
            f"{path} is an LMDB file of another program: set store.path to another folder", path=path
        )
    version = int.from_bytes(record[len(_STORE_MAGIC) :][:2], "little")
    if record != _format_record(version):
        raise StoreUnavailable(
            f"the KV store {path} has a damaged format record: delete it, precompute again", path=path
        )
    if version > FORMAT:
        raise StoreVersion(
            f"the KV store {path} has format {version}, this blendserve reads up to {FORMAT}: "
            "upgrade blendserve, or set store.path to another folder",
            path=path,
        )
    if version < FORMAT and not read_only:  # what is written from now on, an older blendserve must not touch
        with env.begin(write=True) as txn:
            txn.put(FORMAT_KEY, _format_record(FORMAT))


def _format_record(version: int) -> bytes:
    record = _STORE_MAGIC + version.to_bytes(2, "little")
    return record + xxhash.xxh3_64_digest(record)
