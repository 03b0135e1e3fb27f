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
DEMO_CHARACTERS = 74_000  # about 18,000 tokens of SmolLM2

_WRAPPED_AT = 70  # columns, the width of the reference's text
_INDENT = re.compile(r" *(?:(?:\*|\d+\.|\[\d+\]) +)?")  # with a list marker


def language_reference(topics: Sequence[str] = DEMO_TOPICS, limit: int = DEMO_CHARACTERS) -> list[Document]:
    """Topics of `pydoc_data` as documents, at most `limit` characters together.

    Topics that this Python does not have, or that exceed the limit, are skipped.
    """
    from pydoc_data.topics import topics as texts  # start-up: half a megabyte

    documents: dict[str, Document] = {}  # by text: `else` has that of `if`
    for topic in topics:
        title, _, underlined = texts.get(topic, "").strip("\n").partition("\n")
        text = unwrap(underlined.partition("\n")[2].strip("\n")).rstrip()
        if text and text not in documents and len(text) <= limit:
            limit -= len(text)
            documents[text] = Document(text=text, title=title.replace('"', ""), id=topic)
    return list(documents.values())


def unwrap(text: str) -> str:
    """Undo hard wrapping: a line break inside a paragraph goes, one in code, tables or grammar stays.

    Wrapping made a break if the next line's first word would not have fitted, and both lines start at the same column (a
    list marker counts as indentation).
    """
    lines = text.split("\n")
    out = lines[:1]
    for line, after in pairwise(lines):
        if _was_wrapped(line, after):
            out[-1] += " " + after.strip()
        else:
            out.append(after)
    return "\n".join(out)


def _was_wrapped(line: str, after: str) -> bool:
    if not line.strip() or not after.strip() or "::=" in line or line.lstrip().startswith(("|", "+-", ">>>")):
        return False
    first_word = after.split(maxsplit=1)[0]
    indent = _INDENT.match(line)
    same_column = (indent.end() if indent else 0) == len(after) - len(after.lstrip())
    return same_column and len(line.rstrip()) + 1 + len(first_word) > _WRAPPED_AT
