"""Reads documents: from JSONL, a folder of .txt and .md files, one such file, or Python objects.

An invalid document raises an error with its file and line, so a corpus is read in full or not at all.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from blendserve.core import Document
from blendserve.errors import CorpusError

JSONL = (".jsonl", ".ndjson", ".json")
MARKDOWN = (".md", ".markdown")
TEXT = (".txt", *MARKDOWN)

_LINE_FORM = (
    'write one JSON object a line: {"text": "...", "title": "...", "id": "..."}, title and id optional'
)
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*\s*$", re.MULTILINE)
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


class _Place(NamedTuple):
    """The origin of a document: a line of a file, or a position in a list."""

    path: Path | None
    n: int  # from 1

    def __str__(self) -> str:
        return f"{self.path}, line {self.n}" if self.path else f"documents[{self.n - 1}]"

    def error(self, problem: str, field: str | None = None) -> CorpusError:
        return CorpusError(f"{self}: {problem}", setting=field, path=self.path, line=self.n)


def read_documents(source: str | Path) -> Iterator[Document]:
    """The documents of a JSONL file, of a folder of .txt and .md files (recursive, by name), or of one.

    A text file's id is its name relative to the folder, so that an edited file replaces its old version in an index; its
    title is its first Markdown heading, else that name without suffix. Hidden and blank files in a folder are skipped.
    Raises CorpusError, naming file and line, before or while reading.
    """
    path = Path(source)
    if path.is_dir():
        return _not_empty(_read_folder(path), path, f"it holds no {', '.join(TEXT)} file with text in it")
    if not path.exists():
        raise CorpusError(
            f"corpus {path} does not exist: give a .jsonl file or a folder of .txt and .md files", path=path
        )
    if path.suffix.lower() in JSONL:
        return _not_empty(_read_jsonl(path), path, _LINE_FORM)
    if path.suffix.lower() in TEXT:
        return _not_empty(_read_text(path, path.name), path, "write some text into it")
    kinds = ", ".join((*JSONL, *TEXT))
    raise CorpusError(
        f"corpus {path} is of a kind that is not read: bring {kinds}, or a folder of texts", path=path
    )


def as_documents(objects: Iterable[Document | str | Mapping[str, Any]]) -> Iterator[Document]:
    """Documents from documents, plain texts, or mappings with `text` and optionally `title` and `id`.

    Raises CorpusError with the position of an invalid object.
    """
    if isinstance(objects, str | Mapping | Document):
        objects = [objects]
    for n, item in enumerate(objects, 1):
        where = _Place(None, n)
        if isinstance(item, Document):
            item = {"text": item.text, "title": item.title, "id": item.id}
        elif isinstance(item, str):
            item = {"text": item}
        yield _document(item, where)


def document_id(document: Document) -> str:
    """The document's own id, else a digest of its title and text."""
    return document.id or content_digest(document)[:16]


def content_digest(document: Document) -> str:
    """32 hex digits that change when the title or the text does."""
    parts = (document.title.encode(), document.text.encode())
    return hashlib.blake2b(
        b"".join(len(p).to_bytes(8, "little") + p for p in parts), digest_size=16
    ).hexdigest()


def _read_folder(folder: Path) -> Iterator[Document]:
    for path in sorted(folder.rglob("*"), key=lambda p: p.relative_to(folder).parts):
        inside = path.relative_to(folder)
        if (
            path.suffix.lower() in TEXT
            and path.is_file()
            and not any(part.startswith(".") for part in inside.parts)
        ):
            yield from _read_text(path, inside.as_posix())


def _read_text(path: Path, name: str) -> Iterator[Document]:
    lines = [_decode(line, path, n) for n, line in _lines(path)]
    text = "\n".join(line.rstrip("\r") for line in lines)
    if not text.strip():
        return
    heading = _HEADING.search(_FENCED.sub("", text)) if path.suffix.lower() in MARKDOWN else None
    yield Document(
        text=text, title=heading.group(1) if heading else Path(name).with_suffix("").as_posix(), id=name
    )


def _read_jsonl(path: Path) -> Iterator[Document]:
    for n, raw in _lines(path):
        line = _decode(raw, path, n)
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise _Place(path, n).error(f"not JSON ({_start(line)}): {_LINE_FORM}") from None
        yield _document(value, _Place(path, n))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines without their newline, counted from 1."""
    try:
        with path.open("rb") as file:
            for n, line in enumerate(file, 1):
                yield n, line.removesuffix(b"\n")
    except OSError as error:
        raise CorpusError(
            f"{path} cannot be read ({error.strerror}): check its permissions", path=path
        ) from None


def _decode(line: bytes, path: Path, n: int) -> str:
    try:
        return line.decode("utf-8-sig" if n == 1 else "utf-8")
    except UnicodeDecodeError as error:
        bad = line[error.start]
        raise _Place(path, n).error(f"not UTF-8 (byte 0x{bad:02x}): save the file as UTF-8") from None


def _document(value: object, where: _Place) -> Document:
    if not isinstance(value, Mapping):
        raise where.error(f"{_start(repr(value))} is not an object: {_LINE_FORM}")
    if value.get("text") is None:
        raise where.error(f"has no `text`: {_LINE_FORM}", "text")
    fields = {name: _string(value.get(name), name, where) for name in ("text", "title", "id")}
    if not fields["text"].strip():
        raise where.error("its `text` is blank: give it text or remove it", "text")
    return Document(text=fields["text"], title=fields["title"].strip(), id=fields["id"])


def _string(value: object, name: str, where: _Place) -> str:
    if value is None:
        return ""
    if name == "id" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise where.error(f"its `{name}` must be a string, not {_start(repr(value))}", name)
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise where.error(f"its `{name}` holds half a character (a lone surrogate): write it as UTF-8", name)
    return value


def _not_empty(documents: Iterator[Document], path: Path, advice: str) -> Iterator[Document]:
    empty = True
    for document in documents:
        empty = False
        yield document
    if empty:
        raise CorpusError(f"corpus {path} is empty: {advice}", path=path)


def _start(text: str, n: int = 40) -> str:
    return text if len(text) <= n else text[: n - 1] + "…"
