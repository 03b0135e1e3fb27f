"""Tables as Markdown, whose header row the chunker repeats: CSV and TSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from blendserve.readers.base import MAX_TEXT, Content, Unreadable, join
from blendserve.readers.encodings import read_text

SAMPLE = 8192  # characters by which a CSV file's delimiter is found
DELIMITERS = ",;\t|"


def read_csv(path: Path) -> Iterator[Content]:
    """The rows of a CSV or TSV file; the first is its header."""
    text, encoding = read_text(path)
    csv.field_size_limit(MAX_TEXT)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text[:SAMPLE]))
    try:
        yield Content(markdown(rows), note=encoding)
    except csv.Error as error:
        raise Unreadable(f"is not CSV ({error})", line=rows.line_num) from None


def markdown(rows: Iterable[Sequence[object]]) -> str:
    """Rows as a Markdown table: the first with text is the header. Rows without text are left out."""
    filled = (cells for cells in map(_cells, rows) if any(cells))
    header = next(filled, None)
    if header is None:
        return ""
    rule = ["---"] * len(header)
    return join((f"| {' | '.join(cells)} |" for cells in chain([header, rule], filled)), "\n")


def _cells(row: Sequence[object]) -> list[str]:
    texts = ("" if cell is None else str(cell) for cell in row)
    return [" ".join(text.split()).replace("|", "\\|") for text in texts]


def _delimiter(sample: str) -> str:
    """The delimiter that the lines of a sample agree on; a comma if there is none."""
    counts = {mark: [line.count(mark) for line in sample.splitlines()[:20]] for mark in DELIMITERS}
    found = [mark for mark, of_lines in counts.items() if of_lines and of_lines[0] > 0]
    return max(found, key=lambda mark: (counts[mark].count(counts[mark][0]), counts[mark][0]), default=",")
