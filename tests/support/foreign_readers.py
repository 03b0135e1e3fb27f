"""Readers of files that are made to harm, as a library may be made to by one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from blendserve.readers.base import Content


def forever(_: Path) -> Iterator[Content]:
    """Take all time."""
    while True:
        pass


def memory(_: Path) -> Iterator[Content]:
    """Take all memory."""
    yield Content("x" * 4_000_000_000)


def much(_: Path) -> Iterator[Content]:
    """Make more text than a document may have."""
    yield Content("x" * 40_000_000)


def abort(_: Path) -> Iterator[Content]:
    """End the process, as a fault in a library does."""
    os.abort()


def lines(path: Path) -> Iterator[Content]:
    """A document a line; the library prints, too."""
    print("a message")
    for line in path.read_text().splitlines():
        yield Content(line)
