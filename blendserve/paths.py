"""Where things lie on disk: what this machine keeps for itself, indexes by name, and files that a command writes."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from blendserve.errors import ConfigError, InputError

INDEXES = Path("indexes")
HOME_CACHE = os.path.join("~", ".cache")
SEAL_BYTES = 16  # of a digest, which takes twice as many characters at the end of a cached file

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """What is made once and can be made again: $XDG_CACHE_HOME/blendserve or ~/.cache/blendserve.

    Where that cannot be written, or there is no home, a folder of the user's among the temporary ones, with one warning.
    Raises ConfigError if there is none of these.
    """
    return _writable_cache(_wanted_cache())


def cached_path(*parts: str) -> Path:
    """A file or folder of the cache; the one in a cache that can only be read, if it is there."""
    wanted = _wanted_cache()
    there = None if wanted is None else wanted.joinpath(*parts)
    return there if there is not None and os.path.exists(there) else cache_folder().joinpath(*parts)


def cached_file(folder: str, about: object, suffix: str = ".json") -> Path:
    """The file in a folder of the cache that keeps what was made for these facts."""
    digest = hashlib.blake2b(str(about).encode(), digest_size=12).hexdigest()
    return cached_path(folder, f"{digest}{suffix}")


def write_cached(file: Path, text: str) -> None:
    """Write it in one step. A cache that cannot be written costs a few seconds a start, not an answer."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(file, text.encode())


def read_cached(file: Path) -> str:
    """What `write_cached` wrote. Raises as `read_sealed`."""
    return str(read_sealed(file), "utf-8")


def write_sealed(file: Path, content: bytes) -> None:
    """Write the content and a digest of it to the disk; the file appears whole, or not at all. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix=".write-", dir=file.parent) as folder:
        scratch = Path(folder, "whole")
        with scratch.open("wb") as opened:
            opened.write(content + _seal(content))
            opened.flush()
            os.fsync(opened.fileno())  # else the name may reach the disk before the content
        os.replace(scratch, file)


def read_sealed(file: Path) -> memoryview:
    """What `write_sealed` wrote. Raises OSError without a file, ValueError for one that was cut or changed."""
    content = memoryview(file.read_bytes())
    if not _is_sealed(content):
        raise ValueError(f"{file} is damaged")
    return content[: -2 * SEAL_BYTES]


def is_sealed(file: Path) -> bool:
    """Whether the file is there as `write_sealed` wrote it."""
    try:
        return _is_sealed(file.read_bytes())
    except OSError:
        return False


def _is_sealed(content: bytes | memoryview) -> bool:
    at = len(content) - 2 * SEAL_BYTES
    return at >= 0 and content[at:] == _seal(content[:at])


def _seal(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=SEAL_BYTES).hexdigest().encode()


def index_folder(index: str | Path) -> Path:
    """indexes/NAME for a bare name that is no folder here; what has a separator, as ./NAME, is the folder itself."""
    if not isinstance(index, str | Path) or not str(index) or "\0" in str(index):
        raise InputError(
            f"index cannot be {index!r}: give the name of an index, or its folder", setting="index"
        )
    path = Path(index)
    is_name = str(index) == path.name and not path.exists()
    return INDEXES / path if isinstance(index, str) and is_name else path


def check_output(path: Path | None) -> Path | None:
    """The path, if a file can be written there: checked before the work that fills it. Raises InputError."""
    if path is not None and path.is_dir():
        raise InputError(f"{path} cannot be written: it is a folder; give a file", path=path)
    if path is not None and not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {path.parent}", path=path)
    place = None if path is None else path if path.exists() else path.parent
    if place is not None and not os.access(place, os.W_OK):
        raise InputError(f"{path} cannot be written: check the permissions of {place}", path=path)
    return path


def check_output_folder(folder: Path) -> Path:
    """The folder, if files can be written into it, or it can be made. Raises InputError."""
    there = folder
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise InputError(f"{folder} cannot be written: {there} is not a folder", path=folder)
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{folder} cannot be written: check the permissions of {there}", path=folder)
    return folder


def _wanted_cache() -> Path | None:
    """The cache of the user, writable or not; None without a home."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(HOME_CACHE)
    return None if home == HOME_CACHE else Path(home) / "blendserve"


@cache
def _writable_cache(wanted: Path | None) -> Path:
    why = "there is no home directory"
    if wanted is not None:
        with suppress(OSError):
            wanted.mkdir(parents=True, exist_ok=True)
        if os.access(wanted, os.W_OK | os.X_OK):
            return wanted
        why = f"the cache {wanted} cannot be written"
    try:
        folder = _temporary_cache()
    except OSError:
        raise ConfigError(f"{why}: set XDG_CACHE_HOME to a writable folder", path=wanted) from None
    log.warning("%s: using %s; set XDG_CACHE_HOME to a writable folder", why, folder)
    return folder


def _temporary_cache() -> Path:
    """A folder that nobody else can write: it holds code that is loaded. Raises OSError."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"blendserve-{user}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_ours = os.name != "posix" or (
        found.st_uid == user and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )
    return folder if stat.S_ISDIR(found.st_mode) and is_ours else Path(tempfile.mkdtemp(prefix="blendserve-"))
