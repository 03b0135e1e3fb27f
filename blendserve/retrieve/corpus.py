"""Reads a corpus: a folder or a file. Each file is read in full or not at all; a report says what happened to each.

A document's id is the file's name relative to the folder, so an edited file replaces its old version in an index.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

from blendserve.core import Document
from blendserve.errors import CorpusError
from blendserve.extras import extra_with, install_hint
from blendserve.readers.base import Content, Unreadable
from blendserve.readers.child import Child
from blendserve.registry import READER_PLUGINS, READERS

IN_PROCESS = {f"blendserve.readers.{name}" for name in ("text", "records", "tables")}  # they need no library
BLANK, HIDDEN = "has no text", "its name begins with a dot"
SHOWN = 5  # files that the log names
State = Literal["read", "empty", "skipped", "failed"]
STATES: tuple[State, ...] = get_args(State)
Files = Iterable[tuple[str, Path]]  # name and place of each

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileReport:
    """What was read of a file, or why it was not."""

    name: str
    state: State
    note: str = ""  # why it was not read; for a file that was read: a detected encoding, or what was left out
    documents: int = 0
    characters: int = 0
    line: int | None = None  # of the error

    @property
    def place(self) -> str:
        """Return ", line N" for messages; "" without a line."""
        return "" if self.line is None else f", line {self.line}"

    def __str__(self) -> str:
        return f"{self.state}  {self.name}{self.place}: {self.note}"


@dataclass(slots=True)
class ReadReport:
    """What was read of each file of a corpus. A folder that is skipped has one entry."""

    files: list[FileReport] = field(default_factory=list)

    @property
    def notes(self) -> list[FileReport]:
        """Return the files with a note: those that were not read, and those read with a remark."""
        return [file for file in self.files if file.note]

    def lines(self) -> list[str]:
        """Return lines to print: a table of the kinds of files by state, then one line per file with a note."""
        kinds: dict[str, Counter[str]] = {}
        for file in self.files:
            kinds.setdefault(Path(file.name).suffix.lower() or "none", Counter())[file.state] += 1
        rows = [
            ("files", *STATES),
            *((kind, *(n[state] or "" for state in STATES)) for kind, n in sorted(kinds.items())),
        ]
        table = [f"{row[0]:<10}" + "".join(f"{cell:>9}" for cell in row[1:]) for row in rows]
        return [*table, *map(str, sorted(self.notes, key=lambda file: (file.state, file.name)))]

    def __str__(self) -> str:
        """One line: the number of files in each state."""
        counts = Counter(file.state for file in self.files)
        return ", ".join(f"{n} files {state}" for state, n in counts.most_common())


def read_documents(
    source: str | Path, report: ReadReport | None = None, strict: bool = False
) -> Iterator[Document]:
    """Yield the documents of a file, or of a folder by name; registry.py lists the kinds of files.

    In a folder, files are skipped that are hidden, of an unknown kind, blank or unreadable; linked folders are not
    followed. strict: such a file is an error, unless it is hidden. Raises CorpusError with file and line, before or while
    reading.
    """
    path = Path(source)
    found = ReadReport() if report is None else report
    if not path.exists():
        raise CorpusError(f"corpus {path} does not exist: give a folder or a file", path=path)
    files = _files(path, found) if path.is_dir() else [(printable(path.name), path)]
    documents = read_files(files, found, strict or not path.is_dir())
    first = next(documents, None)
    if first is None:
        what = str(found) or "no files"
        raise CorpusError(f"corpus {path} is empty ({what}): write some text into it", path=path)
    if report is None:
        documents = _with_log(documents, path, found)
    return chain([first], documents)


def read_files(
    files: Files, report: ReadReport, strict: bool = False, child: Child | None = None
) -> Iterator[Document]:
    """Yield the documents of these files. strict: raises CorpusError for the first that is not read.

    child: a process that reads all files, as a server needs it; by default, a child reads those that need a library.
    """
    add_plugins()
    with closing(Child()) if child is None else nullcontext(child) as process:
        for name, path in files:
            n = 0
            size = 0
            note = ""
            line = None
            setting = None
            try:
                contents = _contents(name, path, process, in_process=child is None)
                if not strict:
                    contents = iter(list(contents))  # a file that fails at its end gives no document
                for content in contents:
                    note = content.note or note
                    if content.text.strip():
                        n += 1
                        size += len(content.text)
                        yield _document(content, name, n)
                done = (
                    FileReport(name, "read", note, n, size) if n else FileReport(name, "empty", note or BLANK)
                )
            except Unreadable as error:
                line = error.line
                setting = error.setting
                done = FileReport(name, "failed" if error.is_known else "skipped", error.reason, line=line)
            if strict and done.state != "read":
                raise CorpusError(f"{path}{done.place}: {done.note}", path=path, line=line, setting=setting)
            report.files.append(done)


def printable(name: str) -> str:
    """Return a file's name as UTF-8, with other bytes written as \\xff, so that distinct names stay distinct."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _files(folder: Path, report: ReadReport) -> list[tuple[str, Path]]:
    """Return the files below a folder, by name. Hidden files and folders are skipped, and reported."""
    found = list[Path]()

    def refuse(error: OSError) -> None:
        found.append(Path(error.filename))

    for parent, folders, names in os.walk(folder, onerror=refuse):
        for path in (Path(parent, name) for name in (*folders, *names)):
            if path.name.startswith("."):
                report.files.append(
                    FileReport(printable(path.relative_to(folder).as_posix()), "skipped", HIDDEN)
                )
            elif path.is_symlink() or path.name in names:
                found.append(path)
        folders[:] = [name for name in folders if not name.startswith(".")]
    found.sort(key=lambda path: path.relative_to(folder).parts)
    return [(printable(path.relative_to(folder).as_posix()), path) for path in found]


def _contents(name: str, path: Path, child: Child, in_process: bool) -> Iterator[Content]:
    """Yield the documents of a file. in_process: plain text is read in this process. Raises Unreadable."""
    if not path.is_file():
        what = "a folder that cannot be opened" if path.is_dir() else "no regular file"
        what = "a link to a folder or to nothing" if path.is_symlink() else what
        raise Unreadable(what, is_known=path.is_dir() and not path.is_symlink())
    target = READERS.target(_kind(name))
    try:
        if in_process and target.partition(":")[0] in IN_PROCESS:
            yield from READERS.load(_kind(name))(path)
        else:
            yield from child.read(target, path)
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror}): check its permissions") from None
    except ModuleNotFoundError as error:
        extra = extra_with(error.name or "")
        remedy = install_hint(extra) if extra else "install it"
        raise Unreadable(f"needs the package {error.name}: {remedy}", is_known=False) from None


def _kind(name: str) -> str:
    """Return the longest suffix of a file's name that has a reader. Raises Unreadable."""
    parts = name.rpartition("/")[2].lower().split(".")
    suffixes = [".".join(parts[n:]) for n in range(1, len(parts))]
    for suffix in suffixes:
        if suffix in READERS.names:
            return suffix
    what = f"there is no reader of .{suffixes[-1]} files" if suffixes else "has no suffix"
    raise Unreadable(what, is_known=False)


def add_plugins() -> None:
    """Register the readers of other packages."""
    for entry in entry_points(group=READER_PLUGINS):
        if entry.name not in READERS.names:
            READERS.add(entry.name, entry.value)


def _document(content: Content, name: str, n: int) -> Document:
    """The n-th document of a file."""
    title = Path(name).with_suffix("").as_posix() if content.title is None else content.title
    numbered = name if n == 1 else f"{name}#{n}"
    id = numbered if content.id is None else content.id
    return Document(content.text, title, id, content.metadata or {})


def _with_log(documents: Iterator[Document], path: Path, report: ReadReport) -> Iterator[Document]:
    """Yield the documents, then log which files were not read."""
    yield from documents
    for file in report.notes[:SHOWN]:
        log.warning("%s", file)
    if report.notes:
        log.warning("%s: %s", path, report)
