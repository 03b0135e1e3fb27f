"""Reads documents: from JSONL, a folder of .txt and .md files, one such file, or Python objects.

An invalid document raises an error with its file and line, so a corpus is read in full or not at all.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

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


def read_documents(source: str | Path) -> Iterator[Document]:
    """The documents of a JSONL file, of a folder of .txt and .md files (recursive, by name), or of one.

    A text file's id is its name relative to the folder, so that an edited file replaces its old version in an index; its
    title is its first Markdown heading, else that name without suffix. Hidden and blank files in a folder are skipped.
    Raises CorpusError, naming file and line, before or while reading.
    """
    path = Path(source)
    suffix, advice = path.suffix.lower(), "write some text into it"
    if path.is_dir():
        documents, advice = _read_folder(path), f"it holds no {', '.join(TEXT)} file with text in it"
    elif not path.exists():
        raise CorpusError(
            f"corpus {path} does not exist: give a .jsonl file or a folder of .txt and .md files", path=path
        )
    elif suffix in JSONL:
        documents, advice = _read_jsonl(path), _LINE_FORM
    elif suffix in TEXT:
        documents = _read_text(path, path.name)
    else:
        raise CorpusError(
            f"corpus {path} has an unknown suffix: give {', '.join((*JSONL, *TEXT))}, or a folder of texts",
            path=path,
        )
    first = next(documents, None)
    if first is None:
        raise CorpusError(f"corpus {path} is empty: {advice}", path=path)
    return chain([first], documents)


def as_documents(objects: Iterable[Document | str | Mapping[str, Any]]) -> Iterator[Document]:
    """Documents from documents, plain texts, or mappings with `text` and optionally `title` and `id`.

    Raises CorpusError with the position of an invalid object.
    """
    if isinstance(objects, str | Mapping | Document):
        objects = [objects]
    for n, item in enumerate(objects, 1):
        if isinstance(item, Document):
            item = {"text": item.text, "title": item.title, "id": item.id}
        yield _document({"text": item} if isinstance(item, str) else item, None, n)


def document_id(document: Document) -> str:
    """The document's own id, else a digest of its title and text."""
    return document.id or content_digest(document)[:16]


def content_digest(document: Document) -> str:
    """32 hex digits that change when the title or the text does."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (document.title.encode(), document.text.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _read_folder(folder: Path) -> Iterator[Document]:
    for path in sorted(folder.rglob("*"), key=lambda p: p.relative_to(folder).parts):
        inside = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in inside.parts)
        if path.suffix.lower() in TEXT and path.is_file() and not is_hidden:
            yield from _read_text(path, inside.as_posix())


def _read_text(path: Path, name: str) -> Iterator[Document]:
    text = "\n".join(line.rstrip("\r") for _, line in _lines(path))
    if not text.strip():
        return
    heading = _HEADING.search(_FENCED.sub("", text)) if path.suffix.lower() in MARKDOWN else None
    title = heading.group(1) if heading else Path(name).with_suffix("").as_posix()
    yield Document(text=text, title=title, id=name)


def _read_jsonl(path: Path) -> Iterator[Document]:
    for n, line in _lines(path):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise _invalid(path, n, f"not JSON ({_start(line)}): {_LINE_FORM}") from None
        yield _document(value, path, n)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines without their newline, counted from 1."""
    try:
        with path.open("rb") as file:
            for n, line in enumerate(file, 1):
                yield n, line.removesuffix(b"\n").decode("utf-8-sig" if n == 1 else "utf-8")
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}): check its permissions"
        raise CorpusError(message, path=path) from None
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise _invalid(path, n, f"not UTF-8 (byte 0x{bad:02x}): save the file as UTF-8") from None


def _document(value: object, path: Path | None, n: int) -> Document:
    """path, n: its file and line, or its position in a list."""
    if not isinstance(value, Mapping):
        raise _invalid(path, n, f"{_start(repr(value))} is not an object: {_LINE_FORM}")
    fields = {name: "" if value.get(name) is None else value[name] for name in ("text", "title", "id")}
    if value.get("text") is None:
        raise _invalid(path, n, f"has no `text`: {_LINE_FORM}", "text")
    if type(fields["id"]) is int:  # not bool
        fields["id"] = str(fields["id"])
    for name, text in fields.items():
        if not isinstance(text, str):
            raise _invalid(path, n, f"its `{name}` must be a string, not {_start(repr(text))}", name)
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise _invalid(path, n, f"its `{name}` has a lone surrogate: write it as UTF-8", name)
    if not fields["text"].strip():
        raise _invalid(path, n, "its `text` is blank: give it text or remove it", "text")
    return Document(text=fields["text"], title=fields["title"].strip(), id=fields["id"])


def _invalid(path: Path | None, n: int, problem: str, field: str | None = None) -> CorpusError:
    place = f"{path}, line {n}" if path else f"documents[{n - 1}]"
    return CorpusError(f"{place}: {problem}", setting=field, path=path, line=n)


def _start(text: str, n: int = 40) -> str:
    return text if len(text) <= n else text[: n - 1] + "…"
