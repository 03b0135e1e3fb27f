"""What readers return, and the limits of all readers."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MAX_TEXT = 32_000_000  # bytes of a text file, and characters of any document: 8 million tokens
MAX_LOG = 256_000_000  # bytes of plain text that is read in parts: 64 million tokens, an hour of embedding
MAX_FILE = 512_000_000  # bytes of any other file, and of all that an archive unpacks to

OLE = bytes.fromhex("d0cf11e0a1b11ae1")  # first bytes of Office's encrypted and old files


class Content(NamedTuple):
    """A document of a file."""

    text: str
    title: str | None = None  # None: the file's name
    id: str | None = None  # None: the file's name; "": derived from title and text
    note: str = ""  # for the report of what was read: an encoding that was detected, attachments left out
    metadata: Mapping[str, Any] | None = None  # fields of the document, for filters


class Unreadable(Exception):
    """A file cannot be read; corpus.py says which. The message is the reason alone."""

    def __init__(
        self, reason: str, *, line: int | None = None, setting: str | None = None, is_known: bool = True
    ) -> None:
        """line: of the file, or number of the record. setting: field of the record. is_known: there is a reader."""
        super().__init__(reason)
        self.reason = reason
        self.line = line
        self.setting = setting
        self.is_known = is_known


def check_size(path: Path, most: int, remedy: str) -> None:
    """Raises Unreadable for a file of more than `most` bytes."""
    size = path.stat().st_size
    if size > most:
        raise Unreadable(f"has {size / 1e6:,.0f} MB, more than {most / 1e6:,.0f}: {remedy}")


def check_archive(path: Path) -> None:
    """Raises Unreadable for a ZIP archive that unpacks to too much; zipfile.BadZipFile for another file."""
    check_size(path, MAX_FILE, "split it")
    with path.open("rb") as file:
        if file.read(len(OLE)) == OLE:
            raise Unreadable(
                "is encrypted, or of Office's format before 2007: save it anew, without a password"
            )
    with zipfile.ZipFile(path) as archive:  # which reads no more of an entry than its size says
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > MAX_FILE:
        raise Unreadable(f"unpacks to {unpacked / 1e6:,.0f} MB, more than {MAX_FILE / 1e6:,.0f}: split it")


def join(parts: Iterable[str], separator: str = "\n\n") -> str:
    """Join the parts that are not blank. Raises Unreadable above MAX_TEXT characters."""
    found: list[str] = []
    length = 0
    for part in parts:
        if part.strip():
            found.append(part)
            length += len(part) + len(separator)
        if length > MAX_TEXT:
            raise Unreadable(f"has more than {MAX_TEXT:,} characters: split it")
    return separator.join(found)
