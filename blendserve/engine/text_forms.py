"""Forms that clients give a text before they put it in a prompt: what is stored in one form is not found in another.

A tool's result is often a JSON string, a file that an agent reads has line numbers, a quoted mail has "> " before each
line. Token runs end at every character that was changed, so a text with short lines has no run that is long enough.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Literal

from blendserve.core import Passage

TextForm = Literal["plain", "json", "ascii_json", "crlf", "quoted", "numbered"]


def _numbered(text: str) -> str:
    """Lines as `cat -n` and the file readers of agents number them."""
    return "\n".join(f"{n:6d}\t{line}" for n, line in enumerate(text.split("\n"), 1))


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.split("\n"))


FORMS: dict[TextForm, Callable[[str], str]] = {
    "plain": str,
    "json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],  # as JavaScript writes it
    "ascii_json": lambda text: json.dumps(text)[1:-1],  # as Python does
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "quoted": _quoted,
    "numbered": _numbered,
}


def in_forms(passage: Passage, forms: Sequence[TextForm]) -> list[Passage]:
    """The passage in each of these forms, its title included, without those that are equal."""
    texts = dict.fromkeys(FORMS[form](passage.chunk_text) for form in forms)
    return [passage if text == passage.chunk_text else Passage(text) for text in texts]
