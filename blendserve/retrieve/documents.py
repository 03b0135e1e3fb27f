"""Reads documents: from JSONL, a folder of .txt and .md files, one such file, or Python objects.

An invalid document raises an error with its file and line, so a file is read in full or not at all. In a folder, files
that cannot be read are left out: each is counted and said, in the log and in `Skipped`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from blendserve.core import Document
from blendserve.errors import CorpusError

JSONL = (".jsonl", ".ndjson", ".json")
MARKDOWN = (".md", ".markdown")
TEXT = (".txt", *MARKDOWN)

SHOWN = 5  # files that a message names

log = logging.getLogger(__name__)
_LINE_FORM = (
    'write one JSON object per line: {"text": "...", "title": "...", "id": "..."}, title and id optional'
)
_NUL = "has NUL characters, as UTF-16 and binary files have: save it as UTF-8 text"
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*\s*$", re.MULTILINE)
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


@dataclass(slots=True)
class Skipped:
    """What was not read of a folder, and why. Names are relative to the folder."""

    read: int = 0  # files that became documents
    other_kinds: Counter[str] = field(default_factory=Counter)  # suffix -> number of files
    hidden: int = 0  # files whose name, or a folder's above it, begins with a dot
    blank: int = 0  # text files without text
    links: list[str] = field(
        default_factory=list
    )  # linked folders, which are not followed, and links to nothing
    unreadable: dict[str, str] = field(default_factory=dict)  # text file or folder -> what is wrong with it

    def __str__(self) -> str:
        """One line: how many files were not read, by reason."""
        parts = [f"{n} {kind}" for kind, n in self.other_kinds.most_common()]
        if parts:
            parts[-1] += f" (read are {', '.join(TEXT)})"
        parts += [f"{n} {what}" for what, n in (("hidden", self.hidden), ("blank", self.blank)) if n]
        if self.links:
            parts.append(f"{len(self.links)} links to folders or to nothing ({_some(self.links)})")
        if self.unreadable:
            parts.append(f"{len(self.unreadable)} unreadable ({_some(list(self.unreadable))})")
        return ", ".join(parts)


def read_documents(source: str | Path, skipped: Skipped | None = None) -> Iterator[Document]:
    """The documents of a JSONL file, of a folder of .txt and .md files (recursive, by name), or of one.

    A text file's id is its name relative to the folder, so that an edited file replaces its old version in an index; its
    title is its first Markdown heading, else that name without suffix. In a folder, files are left out that are hidden,
    blank, of another kind or not UTF-8; linked folders are not followed. `skipped` counts them, and the log has a line.
    Raises CorpusError, naming file and line, before or while reading.
    """
    path, skipped = Path(source), Skipped() if skipped is None else skipped
    suffix, advice = path.suffix.lower(), "write some text into it"
    if path.is_dir():
        documents, advice = _read_folder(path, skipped), f"it has no {', '.join(TEXT)} file with text in it"
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
    if not isinstance(objects, Iterable):
        raise CorpusError(f"documents cannot be {_start(repr(objects))}: give a list of documents or texts")
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


def _read_folder(folder: Path, skipped: Skipped) -> Iterator[Document]:
    for path in _files(folder, skipped):
        name = _printable(path.relative_to(folder).as_posix())
        try:
            documents = list(_read_text(path, name))
        except CorpusError as error:
            skipped.unreadable[name] = str(error)
            if len(skipped.unreadable) <= SHOWN:
                log.warning("skipped: %s", error)
            continue
        skipped.read += len(documents)
        skipped.blank += not documents
        yield from documents
    if text := str(skipped):
        log.warning("%s: %d files read; skipped: %s", folder, skipped.read, text)


def _files(folder: Path, skipped: Skipped) -> list[Path]:
    """The text files below a folder, by name."""

    def refuse(error: OSError) -> None:
        name = _printable(os.path.relpath(error.filename, folder))
        skipped.unreadable[name] = (
            f"{error.filename} cannot be read ({error.strerror}): check its permissions"
        )

    texts = list[Path]()
    for parent, folders, names in os.walk(folder, onerror=refuse):
        linked = [name for name in folders if Path(parent, name).is_symlink()]
        for path in (Path(parent, name) for name in (*linked, *names)):
            inside = path.relative_to(folder)
            if any(part.startswith(".") for part in inside.parts):
                skipped.hidden += 1
            elif path.is_symlink() and not path.is_file():
                skipped.links.append(_printable(inside.as_posix()))
            elif path.suffix.lower() in TEXT and path.is_file():
                texts.append(path)
            else:
                skipped.other_kinds[_printable(path.suffix.lower()) or "without suffix"] += 1
    skipped.links.sort()
    return sorted(texts, key=lambda path: path.relative_to(folder).parts)


def _read_text(path: Path, name: str) -> Iterator[Document]:
    """The document of a text file; none of a blank one."""
    text = "\n".join(line.rstrip("\r") for _, line in _lines(path))
    if not text.strip():
        return
    heading = _HEADING.search(_FENCED.sub("", text)) if path.suffix.lower() in MARKDOWN else None
    name = _printable(name)
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
                if b"\0" in line:
                    raise _invalid(path, n, _NUL)
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
        if "\0" in text:
            raise _invalid(path, n, f"its `{name}` {_NUL}", name)
    if not fields["text"].strip():
        raise _invalid(path, n, "its `text` is blank: give it text or remove it", "text")
    return Document(text=fields["text"], title=fields["title"].strip(), id=fields["id"])


def _invalid(path: Path | None, n: int, problem: str, field: str | None = None) -> CorpusError:
    place = f"{path}, line {n}" if path else f"documents[{n - 1}]"
    return CorpusError(f"{place}: {problem}", setting=field, path=path, line=n)


def _printable(name: str) -> str:
    """A file's name as UTF-8, its other bytes written as \\xff: distinct names stay distinct."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _start(text: str, n: int = 40) -> str:
    return text if len(text) <= n else text[: n - 1] + "…"
