"""Extras: optional packages, and how to install a missing one."""

from __future__ import annotations

import re
from importlib import metadata


def install_hint(extra: str) -> str:
    """The command that installs an extra. pip reads the installed package's metadata, so it needs no index for it."""
    return f"pip install 'blendserve[{extra}]'"


def extra_with(module: str) -> str | None:
    """The extra that installs this top-level module; None if no extra does, or without metadata."""
    try:
        requirements = metadata.requires("blendserve") or []
    except metadata.PackageNotFoundError:
        return None
    lines = (line for line in requirements if re.match(rf"{re.escape(module)}\b", line))
    return next((found[1] for line in lines if (found := re.search(r"extra == [\"'](\w+)", line))), None)
