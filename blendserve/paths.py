"""Where things lie on disk: what this machine keeps for itself, and indexes by name."""

from __future__ import annotations

import os
from pathlib import Path

INDEXES = Path("indexes")


def cache_folder() -> Path:
    """What is made once and can be made again: $XDG_CACHE_HOME/blendserve or ~/.cache/blendserve."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blendserve"


def index_folder(index: str | Path) -> Path:
    """indexes/<name> for a bare name, else the folder itself."""
    path = Path(index)
    return INDEXES / path if len(path.parts) == 1 and not path.exists() else path
