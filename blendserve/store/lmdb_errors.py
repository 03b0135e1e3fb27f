"""The store's errors for those of LMDB and of the system, with what to do about each."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from blendserve.errors import StoreError, StoreFull, StoreUnavailable

MAX_READERS = 1024  # simultaneous snapshots, over all processes
NOT_PERMITTED = {errno.EACCES, errno.EPERM, errno.EROFS}
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}  # LMDB reports a short write as EIO


class MapFull(StoreFull):
    """The file has reached the fixed size of its map, mostly through fragmentation."""


def unavailable(path: Path, what: str) -> StoreUnavailable:
    return StoreUnavailable(f"the KV store {path} {what}", path=path)


DAMAGED = (
    "has a damaged file: move its data.mdb away, and run `blendserve precompute` to store the chunks again"
)
_REASONS: dict[type[Exception], str] = {
    lmdb.InvalidError: "has a data.mdb that is not an LMDB file of a known version: move it, or set store.location",
    lmdb.VersionMismatchError: "has a data.mdb of another LMDB version: move it, or set store.location",
    **dict.fromkeys((lmdb.CorruptedError, lmdb.PageNotFoundError), DAMAGED),
    lmdb.MapResizedError: "was enlarged by another process: open it again",
    lmdb.MemoryError: "does not fit into the address space that is left: raise `ulimit -v`, or lower store.cap_gb",
    lmdb.ReadersFullError: f"has {MAX_READERS} open readers already: close some",
}


def explained(error: lmdb.Error | OSError, path: Path) -> StoreError:
    """The store's error for one of LMDB or of the system."""
    if isinstance(error, lmdb.MapFullError):
        what = f"the file of the KV store {path} has no space left: raise store.cap_gb and open it again"
        return MapFull(what, setting="store.cap_gb", path=path)
    if code_of(error) in _DISK_FULL:
        what = f"the KV store {path} could not be written in full ({error}): free some disk space"
        return StoreFull(what, path=path)
    usual = f"cannot be used: {error}. Check that store.location is a writable folder"
    return unavailable(path, _REASONS.get(type(error), usual))


def code_of(error: lmdb.Error | OSError) -> int | None:
    return error.errno if isinstance(error, OSError) else getattr(error, "code", 0)


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Turn errors of LMDB and of the system into StoreErrors."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise explained(error, path) from error
