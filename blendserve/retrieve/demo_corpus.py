"""The demo's corpus: a part of the Python language reference, which every Python installation has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from blendserve.core import Document

# In order of importance: topics that exceed the limit are left out, from the end.
DEMO_TOPICS = (
    "with", "try", "for", "while", "if", "function", "class", "import", "raise", "assert", "lambda",
    "global", "nonlocal", "del", "yield", "return", "break", "continue", "pass", "context-managers",
    "truth", "booleans", "calls", "exceptions", "comparisons", "await", "augassign", "slicings", "lists",
)  # fmt: skip
DEMO_CHARACTERS = 74_000  # about 18,000 tokens of SmolLM2, 415 MB of its KV

_WRAPPED_AT = 70  # columns, the width of the reference's text
_INDENT = re.compile(r" *(?:(?:\*|\d+\.|\[\d+\]) +)?")  # with a list marker


def language_reference(topics: Sequence[str] = DEMO_TOPICS, limit: int = DEMO_CHARACTERS) -> list[Document]:
    """Topics of `pydoc_data` as documents, at most `limit` characters together.

    Topics that this Python does not have, or that exceed the limit, are skipped.
    """
    from pydoc_data.topics import topics as texts  # start-up: half a megabyte

    documents: list[Document] = []
    for topic in topics:
        document = _document(topic, texts.get(topic, ""))
        twice = any(document.text == other.text for other in documents)  # `else` has the text of `if`
        if document.text and not twice and len(document.text) <= limit:
            limit -= len(document.text)
            documents.append(document)
    return documents


def _document(topic: str, text: str) -> Document:
    title, _, underlined = text.strip("\n").partition("\n")
    body = underlined.partition("\n")[2].strip("\n")
    return Document(text=unwrap(body).rstrip(), title=title.replace('"', ""), id=topic)


def unwrap(text: str, width: int = _WRAPPED_AT) -> str:
    """Undo hard wrapping: a line break inside a paragraph goes, one in code, tables or grammar stays.

    Wrapping made a break if the next line's first word would not have fitted, and both lines start at the same column (a
    list marker counts as indentation).
    """
    lines = text.split("\n")
    out = lines[:1]
    for line, after in pairwise(lines):
        if _was_wrapped(line, after, width):
            out[-1] += " " + after.strip()
        else:
            out.append(after)
    return "\n".join(out)


def _was_wrapped(line: str, after: str, width: int) -> bool:
    if not line.strip() or not after.strip() or "::=" in line or line.lstrip().startswith(("|", "+-", ">>>")):
        return False
    first_word = after.split(maxsplit=1)[0]
    same_column = _column(line) == len(after) - len(after.lstrip())
    return same_column and len(line.rstrip()) + 1 + len(first_word) > width


def _column(line: str) -> int:
    """The start of the line's text, after indentation and list marker."""
    match = _INDENT.match(line)
    return match.end() if match else 0
