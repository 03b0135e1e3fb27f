"""Where things lie on disk: what this machine keeps for itself, and indexes by name."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

INDEXES = Path("indexes")


def cache_folder() -> Path:
    """What is made once and can be made again: $XDG_CACHE_HOME/blendserve or ~/.cache/blendserve."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blendserve"


def cached_file(folder: str, about: object, suffix: str = ".json") -> Path:
    """The file in a folder of the cache that keeps what was made for these facts."""
    digest = hashlib.blake2b(str(about).encode(), digest_size=12).hexdigest()
    return cache_folder() / folder / f"{digest}{suffix}"


def write_cached(file: Path, text: str) -> None:
    """Write it in one step. A cache that cannot be written costs a few seconds a start, not an answer."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(text, "utf-8")
        os.replace(scratch, file)


def index_folder(index: str | Path) -> Path:
    """indexes/<name> for a bare name, else the folder itself."""
    path = Path(index)
    return INDEXES / path if len(path.parts) == 1 and not path.exists() else path
