"""Extras: optional packages, and how to install a missing one."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Literal, cast

Extra = Literal["documents", "embedders", "evaluate", "codecs", "valkey", "ray", "gpu"]


def install_hint(extra: Extra) -> str:
    """The command that installs an extra.

    It names the checkout: on the package index, the name of this project may be anybody's.
    """
    return f"pip install '.[{extra}]' in your checkout of blendserve"


def extra_with(module: str) -> Extra | None:
    """The extra that installs this top-level module; None if no extra does, or without metadata."""
    try:
        requirements = metadata.requires("blendserve") or []
    except metadata.PackageNotFoundError:
        return None
    lines = (line for line in requirements if re.match(rf"{re.escape(module)}\b", line))
    found = filter(None, (re.search(r"extra == [\"'](\w+)", line) for line in lines))
    return next((cast(Extra, match[1]) for match in found), None)
