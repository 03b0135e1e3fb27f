"""Text, Markdown, reStructuredText, logs and source code, in any encoding."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from blendserve.readers.base import Content
from blendserve.readers.encodings import read_parts, read_text

_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*\s*$", re.MULTILINE)
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def read(path: Path) -> Iterator[Content]:
    """The file's text; of a large one, each part is a document."""
    for text, encoding in read_parts(path):
        yield Content(text, note=encoding)


def read_code(path: Path) -> Iterator[Content]:
    """The same, titled by the whole name of the file."""
    text, encoding = read_text(path)
    yield Content(text, path.name, note=encoding)


def read_markdown(path: Path) -> Iterator[Content]:
    """The same, titled by its first heading."""
    text, encoding = read_text(path)
    heading = _HEADING.search(_FENCED.sub("", text))
    yield Content(text, heading.group(1) if heading else None, note=encoding)
