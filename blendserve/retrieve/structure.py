"""Finds the structure of a text: headings and their sections, tables, and the positions where it may be cut.

Markdown, reStructuredText and plain text are parsed by lines. Source code, recognised by the document's name, is cut by
its indentation: between functions first, then between methods, then between lines.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from blendserve.core import Document
from blendserve.registry import CODE_SUFFIXES

MAX_NAME = 80  # characters of a heading in a title
# A fenced block, or front matter: nothing in it is a heading or a table.
_FENCED = r"^[^\S\n]*(?P<fence>`{3,}|~{3,})[^\n]*\n(?:.*?^[^\S\n]*(?P=fence)|.*)"
_FRONT = r"(?P<front>\A---)[^\S\n]*\n(?:[^\n]*\n){1,100}?---[^\S\n]*$"
_TABLE = r"^(?P<head>[^\S\n]*\|[^\n]*\n[^\S\n]*\|(?:[^\S\n]*:?-+:?[^\S\n]*\|)+[^\S\n]*\n)(?:[^\S\n]*\|[^\n]*(?:\n|\Z))+"
_HEADING = r"^(?P<marks>#{1,6})[^\S\n]+(?P<name>[^\n]*?\S)[^\S\n]*#*[^\S\n]*$"
_UNDERLINED = (
    r"^(?:[=~^-]{3,}[^\S\n]*\n)?(?P<title>[^\s|>#+*~=-][^\n]*)\n(?P<line>={3,}|-{3,}|~{3,}|\^{3,})[^\S\n]*$"
)
_BLOCK = re.compile(f"{_FENCED}|{_FRONT}|{_TABLE}|{_HEADING}|{_UNDERLINED}", re.MULTILINE | re.DOTALL)
_LEVELS = "=-~^"  # of underlined headings
_TEXT = re.compile(r"\S")
_CODE = re.compile(rf"\.(?:{'|'.join(CODE_SUFFIXES)})(?:#\d+)?\Z", re.IGNORECASE)

# Boundaries, from the coarsest kind, each with the share of the room that a passage ending there must fill. A boundary
# lies before the white space, so that a code block's indentation stays with the code.
_SENTENCES = (
    r"(?<=[.!?…])(?=\s+[^a-z\s])|(?<=[.!?…][\"')\]”’»])(?=\s+[^a-z\s])|(?<=[。！？｡])(?![。！？｡」』”’])"
    r"|(?<=[؟۔।॥።။។])(?=\s)"
)
_PARAGRAPHS, _LINES, _WORDS = r"(?=\n[^\S\n]*\n)", r"(?=\n)", r"(?<=\S)(?=\s)"
_BLANK = r"(?=\n(?:[^\S\n]*\n)+"
_IN_TEXT = ((_PARAGRAPHS, 0.8), (_SENTENCES, 0.6), (_LINES, 0.5), (_WORDS, 0.2))
_IN_CODE = (
    (rf"{_BLANK}[^\s}}\])])", 0.4),  # before a definition that is in no other
    (rf"{_BLANK}(?: {{1,4}}|\t)[^\s}}\])])", 0.4),  # before one of a class
    (_PARAGRAPHS, 0.5),
    (_LINES, 0.3),
    (_WORDS, 0.2),
)
HEADING_FILL = 0.4  # of a passage that ends before a heading


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading, and where the text below it begins."""

    start: int
    end: int
    level: int
    name: str


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table with its header row and the rule below it."""

    start: int
    rows: int  # where the first row after the header begins
    end: int
    head: str


@dataclass(slots=True)
class Structure:
    """The parts of a text, in order."""

    headings: list[Heading] = field(default_factory=list)
    tables: list[TextTable] = field(default_factory=list)
    ends: list[tuple[Sequence[int], float]] = field(default_factory=list)  # where to cut, the coarsest first
    whole: list[tuple[int, int]] = field(default_factory=list)  # (start, end] of parts that stay whole
    paths: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)  # see `_paths`

    def path(self, at: int) -> tuple[str, ...]:
        """Return the names of the sections around a passage that begins at `at`, without headings inside it."""
        n = bisect_right(self.paths, at, key=lambda entry: entry[0])
        return self.paths[n - 1][1] if n else ()

    def head(self, at: int) -> str:
        """Return the header of the table if a passage that begins at `at` begins among its rows; else ""."""
        n = bisect_left(self.tables, at, key=lambda table: table.start)
        return self.tables[n - 1].head if n and self.tables[n - 1].rows <= at < self.tables[n - 1].end else ""

    def may_end(self, at: int) -> bool:
        """Return whether a passage may end at `at`: not after a heading, nor inside a table's header."""
        return self.start_of_whole(at) == at

    def start_of_whole(self, at: int) -> int:
        """Return where the part begins that may not be cut at `at`; `at` itself if a cut is allowed there."""
        n = bisect_left(self.whole, at, key=lambda pair: pair[0])
        return self.whole[n - 1][0] if n and at <= self.whole[n - 1][1] else at


def parse(document: Document, text: str) -> Structure:
    """Return the structure of a document's text."""
    if _CODE.search(document.id or document.title):
        return Structure(ends=[(_positions(pattern, text), fill) for pattern, fill in _IN_CODE])
    found = Structure()
    fenced: list[tuple[int, int]] = []
    for block in _BLOCK.finditer(text):
        if block["head"]:
            found.tables.append(TextTable(block.start(), block.end("head"), block.end(), block["head"]))
        elif heading := _heading(block):
            found.headings.append(heading)
        elif block["fence"] or block["front"]:
            fenced.append(block.span())
    found.paths = list(_paths(found.headings))
    found.whole = list(_merged(text, found))
    solid = sorted([*fenced, *((table.start, table.end) for table in found.tables)])
    for level in (1, 2, 6):
        found.ends.append((_before(text, found.headings, level), HEADING_FILL))
    for pattern, fill in _IN_TEXT:
        ends = (at for at in _positions(pattern, text) if found.may_end(at))
        if pattern == _SENTENCES:
            ends = (at for at in ends if not _is_inside(solid, at))
        found.ends.append((array("Q", ends), fill))
    return found


def sentences(text: str) -> list[tuple[int, int]]:
    """Return start and end of each sentence, or line without one, without the space around it."""
    found: list[tuple[int, int]] = []
    start = 0
    for end in (*_positions(f"{_SENTENCES}|{_LINES}", text), len(text)):
        piece = text[start:end]
        if piece.strip():
            first = start + len(piece) - len(piece.lstrip())
            found.append((first, first + len(piece.strip())))
        start = end
    return found


def _positions(pattern: str, text: str) -> Sequence[int]:
    return array("Q", (match.start() for match in re.finditer(pattern, text)))


def _heading(block: re.Match[str]) -> Heading | None:
    if block["marks"]:
        return Heading(block.start(), block.end(), len(block["marks"]), block["name"][:MAX_NAME])
    if block["title"] and len(block["line"]) >= len(block["title"].rstrip()):
        level = _LEVELS.index(block["line"][0]) + 1
        return Heading(block.start(), block.end(), level, block["title"].strip()[:MAX_NAME])
    return None


def _paths(headings: Iterable[Heading]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield (position, names of the sections around passages that begin there or later)."""
    above = list[Heading]()
    for heading in headings:
        above = [other for other in above if other.level < heading.level]
        yield heading.start, tuple(other.name for other in above)
        above.append(heading)
        yield heading.start + 1, tuple(other.name for other in above)


def _merged(text: str, found: Structure) -> Iterator[tuple[int, int]]:
    """Yield the parts that stay whole: a heading, or a table's header, with the start of the text below it."""
    parts = [*((part.start, part.end) for part in found.headings), *((t.start, t.rows) for t in found.tables)]
    start = end = -1
    for first, last in sorted(parts):
        if end < first:
            if end >= 0:
                yield start, end
            start = first
        body = _TEXT.search(text, last)
        end = body.start() if body else len(text)
    if end >= 0:
        yield start, end


def _before(text: str, headings: Sequence[Heading], level: int) -> Sequence[int]:
    """Return where text ends before headings of at most this level; before the first of several in a row."""
    ends = array("Q")
    for n, heading in enumerate(headings):
        before = heading.start
        while before and text[before - 1].isspace():
            before -= 1
        follows = n > 0 and before <= headings[n - 1].end
        if heading.level <= level and not follows:
            ends.append(before)
    return ends


def _is_inside(spans: Sequence[tuple[int, int]], at: int) -> bool:
    n = bisect_left(spans, at, key=lambda span: span[0])
    return n > 0 and at < spans[n - 1][1]
