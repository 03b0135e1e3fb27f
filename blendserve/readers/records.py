"""Documents as JSON: one object per line, also compressed, or an array."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

from blendserve.readers.base import MAX_TEXT, Content, Unreadable, check_size
from blendserve.readers.encodings import NUL, not_utf8

FORM = 'write one JSON object per line: {"text": "...", "title": "...", "id": "..."}, title and id optional'
ARRAY = "write an array of such objects, or one per line"
TEXT_FIELDS = ("text", "page_content")  # the second is LangChain's


def read(path: Path) -> Iterator[Content]:
    """The documents of a file, one at a time if each has a line. Raises Unreadable, OSError."""
    with ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(path.open("rb"))
        if path.suffix.lower() == ".gz":
            file = cast("IO[bytes]", stack.enter_context(gzip.GzipFile(fileobj=file)))
        try:
            is_whole = path.suffix.lower() == ".json" and _is_whole(file)
            yield from _of_array(path) if is_whole else _of_lines(file)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise Unreadable(f"is no whole gzip file ({error}): compress it again") from None


def record(value: object, n: int) -> Content:
    """Return the document that a JSON object describes. n: the object's number, from 1. Raises Unreadable."""
    if not isinstance(value, Mapping):
        raise Unreadable(f"{_start(repr(value))} is not an object: {FORM}", line=n)
    given = value.get("metadata")
    if given is not None and not isinstance(given, Mapping):
        raise Unreadable(
            f"its `metadata` is not an object: {_start(repr(given))}", line=n, setting="metadata"
        )
    title = value.get("title")
    if title is None and given:
        title = given.get("title")
    text = next((value[name] for name in TEXT_FIELDS if value.get(name) is not None), None)
    if text is None:
        raise Unreadable(f"has no `text`: {FORM}", line=n, setting="text")
    number = value.get("id")
    fields = {"text": text, "title": title, "id": str(number) if type(number) is int else number}  # not bool
    for name, field in fields.items():
        if field is not None and not isinstance(field, str):
            raise Unreadable(
                f"its `{name}` must be a string, not {_start(repr(field))}", line=n, setting=name
            )
        if field and any("\ud800" <= char <= "\udfff" for char in field):
            raise Unreadable(f"its `{name}` has a lone surrogate: write it as UTF-8", line=n, setting=name)
        if field and "\0" in field:
            raise Unreadable(f"its `{name}` {NUL}", line=n, setting=name)
    if not text.strip():
        raise Unreadable("its `text` is blank: give it text or remove it", line=n, setting="text")
    metadata = {
        str(key): field for key, field in (given or {}).items() if field is not None and key != "title"
    }
    return Content(text, (title or "").strip(), fields["id"] or "", metadata=metadata)


def _is_whole(file: IO[bytes]) -> bool:
    """Whether a file is one JSON value, an array or an object over several lines."""
    start = file.readline(MAX_TEXT)
    while start and not start.strip():
        start = file.readline(MAX_TEXT)
    file.seek(0)
    if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return True
    try:
        json.loads(start)
    except (ValueError, RecursionError):
        return True
    return False


def _of_array(path: Path) -> Iterator[Content]:
    check_size(path, MAX_TEXT, ARRAY)
    try:
        value: Any = json.loads(path.read_text("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise not_utf8(error) from None
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"is not JSON ({_start(str(error))}): {ARRAY}") from None
    for n, item in enumerate(value if isinstance(value, list) else [value], 1):
        yield record(item, n)


def _of_lines(file: IO[bytes]) -> Iterator[Content]:
    for n, line in _lines(file):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                raise Unreadable(f"not JSON ({_start(line)}): {FORM}", line=n) from None
            yield record(value, n)


def _lines(file: IO[bytes]) -> Iterator[tuple[int, str]]:
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
            raise not_utf8(error, n) from None


def _start(text: str, n: int = 40) -> str:
    return text if len(text) <= n else text[: n - 1] + "…"
