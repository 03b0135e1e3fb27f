"""What a reader makes of a file, the limits of all readers, and text in any encoding."""

from __future__ import annotations

import codecs
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from charset_normalizer import from_bytes

MAX_TEXT = 32_000_000  # bytes of a text file, and characters of any document: 8 million tokens
MAX_FILE = 512_000_000  # bytes of any other file, and of all that an archive unpacks to

OLE = bytes.fromhex("d0cf11e0a1b11ae1")  # first bytes of Office's encrypted and old files
NUL = "has NUL characters, as UTF-16 without a mark and binary files have: save it as UTF-8 text"
BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins as UTF-16's does
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
ENCODINGS = (  # that text which is not UTF-8 may have
    *("cp1252", "cp1250", "iso8859_2", "cp1251", "koi8_r", "cp1253", "cp1254", "cp1255", "cp1256"),
    *("gb18030", "big5", "cp932", "euc_jp", "cp949"),
)
UNCLEAR = 0.1  # encodings whose texts look alike within this are not told apart
TURKISH = re.compile("[ðþýÐÞÝ]")  # what cp1252 makes of letters of Turkish text in cp1254


class Content(NamedTuple):
    """A document of a file."""

    text: str
    title: str | None = None  # None: the file's name
    id: str | None = None  # None: the file's name; "": derived from title and text
    note: str = ""  # for the report of what was read: an encoding that was detected, attachments left out


class Unreadable(Exception):
    """A file cannot be read; corpus.py says which. The message is the reason alone."""

    def __init__(
        self, reason: str, *, line: int | None = None, setting: str | None = None, is_known: bool = True
    ) -> None:
        """line: of the file, or number of the record. setting: field of the record. is_known: there is a reader."""
        super().__init__(reason)
        self.reason, self.line, self.setting, self.is_known = reason, line, setting, is_known


def check_size(path: Path, most: int, remedy: str) -> None:
    """Raises Unreadable for a file of more than `most` bytes."""
    size = path.stat().st_size
    if size > most:
        raise Unreadable(f"has {size / 1e6:,.0f} MB, more than {most / 1e6:,.0f}: {remedy}")


def check_archive(path: Path) -> None:
    """Raises Unreadable for a ZIP archive that unpacks to too much, or is none."""
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
    """The parts that are not blank. Raises Unreadable above MAX_TEXT characters."""
    found, length = list[str](), 0
    for part in parts:
        if part.strip():
            found.append(part)
            length += len(part) + len(separator)
        if length > MAX_TEXT:
            raise Unreadable(f"has more than {MAX_TEXT:,} characters: split it")
    return separator.join(found)


def read_text(path: Path) -> tuple[str, str]:
    """The text of a file with "\\n" as the end of lines, and its encoding if that was detected. Raises Unreadable."""
    check_size(path, MAX_TEXT, "split it")
    text, encoding = decode(path.read_bytes())
    return text.replace("\r\n", "\n"), encoding


def decode(data: bytes, declared: str = "") -> tuple[str, str]:
    """Text, and its encoding if it is not UTF-8. declared: the encoding that the text itself names.

    Raises Unreadable if the encoding is not clear, or for UTF-8 with wrong bytes.
    """
    for mark, encoding in BOMS:
        if data.startswith(mark):
            return _strictly(data, encoding), encoding.replace("utf-8-sig", "")
    if b"\0" in data:
        raise Unreadable(NUL, line=data[: data.index(b"\0")].count(b"\n") + 1)
    try:
        return data.decode(), ""
    except UnicodeDecodeError as error:
        if _is_utf8(data, error):
            raise _not_utf8(error) from None
    encoding = _known(declared) or _detect(data)
    return _strictly(data, encoding), encoding


def _strictly(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise Unreadable(f"is not {encoding} (byte 0x{bad:02x}): save it as UTF-8") from None


def _is_utf8(data: bytes, error: UnicodeDecodeError) -> bool:
    """Whether text is UTF-8 but for a few bytes: read in another encoding, all its letters would be wrong."""
    if error.reason == "unexpected end of data" and error.end - error.start > 1:
        return True  # cut within a character
    text = data.decode("utf-8", "replace")
    n_wrong = text.count("\ufffd")
    return sum(char > "\x7f" for char in text) - n_wrong > n_wrong


def _not_utf8(error: UnicodeDecodeError) -> Unreadable:
    line = error.object[: error.start].count(b"\n") + 1
    bad = error.object[error.start]
    return Unreadable(f"is not UTF-8 (byte 0x{bad:02x}): save it as UTF-8", line=line)


def _known(encoding: str) -> str:
    """The name of an encoding, "" for one that Python does not know or that is no encoding of text."""
    try:
        codec = codecs.lookup(encoding)
    except (LookupError, ValueError):
        return ""
    is_text: bool = getattr(codec, "_is_text_encoding", True)
    return codec.name if is_text else ""


def _detect(data: bytes) -> str:
    """The encoding of text that is not UTF-8. Raises Unreadable if several would give other plausible texts."""
    found = list(from_bytes(data, cp_isolation=list(ENCODINGS)))
    best = max((match.coherence - match.chaos for match in found), default=0.0)
    near = [match for match in found if match.coherence - match.chaos > best - UNCLEAR]
    western = next((match for match in near if "cp1252" in match.could_be_from_charset), None)
    if western is not None and not (TURKISH.search(str(western)) and len(near) > 1):
        return "cp1252"  # of alike ones by far the most frequent
    if len(near) == 1:
        return near[0].encoding
    names = " or ".join(match.encoding for match in near[:4]) or "none that is known"
    raise Unreadable(f"is not UTF-8, and its encoding may be {names}: save it as UTF-8")


def lines(file: IO[bytes]) -> Iterator[tuple[int, str]]:
    """Lines of UTF-8 without their newline, counted from 1. Raises Unreadable, OSError."""
    n = 0
    while line := file.readline(MAX_TEXT + 1):
        n += 1
        if len(line) > MAX_TEXT:
            raise Unreadable(f"has a line of more than {MAX_TEXT / 1e6:,.0f} MB: split it", line=n)
        if b"\0" in line:
            raise Unreadable(NUL, line=n)
        try:
            yield n, line.removesuffix(b"\n").decode("utf-8-sig" if n == 1 else "utf-8")
        except UnicodeDecodeError as error:
            bad = error.object[error.start]
            raise Unreadable(f"is not UTF-8 (byte 0x{bad:02x}): save it as UTF-8", line=n) from None
