"""Splits documents into passages of at most N tokens of the language model; each becomes one chunk.

A passage ends at the coarsest boundary that leaves it well filled: of a paragraph, else of a sentence, a line, a word,
else between two characters. Only white space at the cuts is dropped.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from blendserve.core import Document, Passage
from blendserve.errors import ConfigError
from blendserve.retrieve.documents import document_id

# Tokens of a passage in the prompt, title line and separators included.
Count = Callable[[Passage], int]


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """The model that passages are split for."""

    model: str  # name and dtype
    fingerprint: str
    count: Count


# Boundaries, from the coarsest kind, each with the share of the room that a passage ending there must fill. A boundary
# lies before the white space, so that a code block's indentation stays with the code.
_ENDS: tuple[tuple[str, float], ...] = (
    (r"(?=\n[^\S\n]*\n)", 0.8),  # paragraphs
    (
        r"(?<=[.!?…])(?=\s+[^a-z\s])|(?<=[.!?…][\"')\]”’»])(?=\s+[^a-z\s])|(?<=[。！？])(?![。！？」』”’])",
        0.6,
    ),
    (r"(?=\n)", 0.5),  # lines
    (r"(?<=\S)(?=\s)", 0.2),  # words
)
_SPACE = re.compile(r"\s*\n|\s+")
_CHARACTERS_PER_TOKEN = 4.0  # a first guess, corrected by every passage


def split(document: Document, max_tokens: int, count: Count) -> Iterator[Passage]:
    """The document's passages in order, `count(passage) <= max_tokens` for each; ids are "<doc id>:<n>".

    `count` need not be additive: every returned passage has been counted as it is. It runs about eight times a passage,
    on texts of a passage's length (once on an empty one): linear in the document. Raises ConfigError when the title and
    separators leave no room for text, or for a part of it.
    """
    return _Splitter(document, max_tokens, count).run()


class _Splitter:
    """Splits one document."""

    def __init__(self, document: Document, max_tokens: int, count: Count) -> None:
        self.document, self.max_tokens, self.count = document, max_tokens, count
        self.text, self.doc_id = document.text.rstrip(), document_id(document)
        self.density = _CHARACTERS_PER_TOKEN
        self.overhead = count(self._passage("", 0))
        self.room = max_tokens - self.overhead
        if self.room <= 0:
            raise self._no_room()
        self.ends: list[tuple[Sequence[int], float]] = [
            ([match.start() for match in re.finditer(pattern, self.text)], fill) for pattern, fill in _ENDS
        ]
        self.ends.append((range(len(self.text)), 0.0))  # between two characters

    def run(self) -> Iterator[Passage]:
        end = n = 0
        while (start := self._skip_space(end)) < len(self.text):
            end = self._end(start)
            if text := self.text[start:end].rstrip():
                yield self._passage(text, n)
                n += 1

    def _end(self, start: int) -> int:
        """The end of the passage that begins at `start`."""

        def tokens(end: int) -> int:
            return self.count(self._passage(self.text[start:end].rstrip(), 0))

        horizon = self._horizon(start, tokens)
        if horizon > len(self.text):
            return len(self.text)
        for ends, fill in self.ends:
            end = self._furthest(ends, start, horizon, tokens)
            filled = tokens(end) - self.overhead
            if end > start and filled >= fill * self.room:
                self.density = (end - start) / max(1, filled)
                return end
        raise self._no_room()

    def _horizon(self, start: int, tokens: Callable[[int], int]) -> int:
        """An end up to which the text does not fit, not much too far; beyond the text if all of it fits."""
        reach = 2 + int(1.1 * self.density * self.room)
        while tokens(start + reach) <= self.max_tokens:
            if start + reach >= len(self.text):
                return len(self.text) + 1
            reach *= 2
        return min(start + reach, len(self.text))

    def _furthest(self, ends: Sequence[int], start: int, horizon: int, tokens: Callable[[int], int]) -> int:
        """The last of the ends inside (start, horizon) up to which the text fits, or `start`.

        Assumes that the token count grows with the text. Where BPE breaks that by a token, the passage is a little
        shorter than it could be, never too long: bisection has counted the end that it returns.
        """
        first, last = bisect_right(ends, start), bisect_left(ends, horizon)
        behind = bisect_right(ends, self.max_tokens, first, max(first, last), key=tokens)
        return ends[behind - 1] if behind > first else start

    def _skip_space(self, start: int) -> int:
        """The position after the white space at `start`, but before the indentation of the first line with text."""
        space = _SPACE.match(self.text, start)
        return space.end() if space else start

    def _passage(self, text: str, n: int) -> Passage:
        return Passage(text=text, title=self.document.title, id=f"{self.doc_id}:{n}", doc_id=self.doc_id)

    def _no_room(self) -> ConfigError:
        return ConfigError(
            f"chunk_tokens={self.max_tokens} leaves no room for text: the title and separators of document "
            f"{self.doc_id!r} take {self.overhead} tokens: raise chunk_tokens or shorten the title",
            setting="retrieve.chunk_tokens",
        )
