"""Opening the files of an LMDB store: how they are opened, and which format they have."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import xxhash

from blendserve.errors import StoreVersion
from blendserve.store.lmdb_errors import DAMAGED, MAX_READERS, NOT_PERMITTED, code_of, unavailable
from blendserve.store.lmdb_pages import DamagedPages, check_pages

FORMAT = 4
FORMAT_KEY = b"m:format"
_MAGIC = b"BLKV"
ATTEMPTS = 5  # to check the pages of a commit that writers do not replace meanwhile


def open_files(path: Path, map_size: int, read_only: bool) -> lmdb.Environment:
    """Open or create the files, with the largest map ever asked for; it is never resized while open.

    Opening for reading changes nothing. Where the lock file may not be written it takes no lock: then no writer
    elsewhere knows of this reader, so its snapshot may change underneath it (and fail checksums).
    """
    data = path / "data.mdb"
    # a writer that was killed at once leaves an empty file
    exists = data.exists() and data.stat().st_size > 0
    if read_only:
        if not exists:
            raise unavailable(path, "does not exist: precompute one, or set store.location")
        readable = partial(_mapped, path, map_size, 0, readonly=True, create=False)
        try:
            return readable(max_readers=MAX_READERS)
        except (lmdb.Error, OSError) as error:
            if code_of(error) not in NOT_PERMITTED:
                raise
            return readable(lock=False)
    path.mkdir(parents=True, exist_ok=True)
    # Without metasync a power cut may undo the last chunk, never damage the others; a kill undoes nothing.
    env = _mapped(path, map_size, 0 if exists else map_size, max_readers=MAX_READERS, metasync=False)
    if env.info()["map_size"] < map_size:
        env.set_mapsize(map_size)
    return env


def _mapped(path: Path, lowest: int, size: int, **options: Any) -> lmdb.Environment:
    """A map of `size`, 0 = what the file says; one of `lowest`, or what is in use, if there is no space for it."""
    try:
        return lmdb.open(str(path), map_size=size, **options)
    except lmdb.MemoryError:
        return lmdb.open(str(path), map_size=lowest, **options)


def check_format(env: lmdb.Environment, path: Path, read_only: bool) -> None:
    """Write the format into a new store; refuse stores of other formats, damaged ones and files of other programs."""
    empty = env.stat()["entries"] == 0
    with env.begin() as txn:
        record = format_record(FORMAT) if empty and not read_only else txn.get(FORMAT_KEY)
    if record is None:
        what = "is empty: precompute it" if empty else "is an LMDB file of another program"
        raise unavailable(path, f"{what}, or set store.location to another folder")
    version = int.from_bytes(record[len(_MAGIC) :][:2], "little")
    if record != format_record(version):
        raise unavailable(path, "has a damaged format record: delete it, precompute again")
    if version != FORMAT:
        newer = "upgrade blendserve, or set store.location to another folder"
        remedy = newer if version > FORMAT else "delete it, and run `blendserve precompute`"
        raise StoreVersion(
            f"the KV store {path} has format {version}, this blendserve reads {FORMAT}: {remedy}",
            path=path,
        )
    if empty and not read_only:
        with env.begin(write=True) as txn:
            txn.put(FORMAT_KEY, format_record(FORMAT))


def refuse_damaged(env: lmdb.Environment, path: Path) -> None:
    """Raise StoreUnavailable for pages on which LMDB would end the process."""
    try:
        for _ in range(ATTEMPTS):
            with env.begin() as txn:
                if check_pages(path / "data.mdb", txn.id()):
                    return
    except DamagedPages as error:
        raise unavailable(path, f"{DAMAGED} ({error})") from None


def format_record(version: int) -> bytes:
    record = _MAGIC + version.to_bytes(2, "little")
    return record + xxhash.xxh3_64_digest(record)


def identity(data: Path) -> tuple[int, int] | None:
    """Return what tells this file from another one of its name; None if there is none."""
    try:
        status = data.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
