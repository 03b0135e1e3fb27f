"""Splits documents into passages of at most N tokens of the language model; each becomes one chunk.

A passage ends at the coarsest boundary that still fills it well (structure.py): the end of a section, else of a
paragraph, a sentence, a line or a word, else any character. It never ends with a heading. Its title is the document's
with the path of its section. A passage that begins among the rows of a table repeats the table's header. Only white
space at the cuts is dropped.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from blendserve.core import Document, Passage
from blendserve.errors import ConfigError
from blendserve.retrieve.documents import document_id
from blendserve.retrieve.structure import parse

# Counts the tokens of a passage in the prompt, with its title line and separators.
Count = Callable[[Passage], int]


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """The model that passages are split for."""

    model: str  # name and dtype
    fingerprint: str
    count: Count


_SPACE = re.compile(r"\s*\n|\s+")
_CHARACTERS_PER_TOKEN = 4.0  # a first guess, corrected by every passage
_MAX_CONTEXT = 1 / 3  # of a passage's tokens, for the path of its section and a table's header


@dataclass(frozen=True, slots=True)
class _PassageHead:
    """What a passage has besides its own text: a title, and the header of the table that it begins in."""

    title: str
    head: str
    overhead: int  # tokens


def split(document: Document, max_tokens: int, count: Count) -> Iterator[Passage]:
    """Yield the document's passages in order, each of at most `max_tokens` tokens; ids are "<doc id>:<n>".

    `count` need not be additive: every passage is counted whole. It is called about eight times per passage, on texts of
    a passage's length, so the time is linear in the document. Raises ConfigError when title and separators leave no room
    for text.
    """
    return _Splitter(document, max_tokens, count).run()


class _Splitter:
    """Splits one document."""

    def __init__(self, document: Document, max_tokens: int, count: Count) -> None:
        self.document = document
        self.max_tokens = max_tokens
        self.count = count
        self.text = document.text.rstrip()
        self.doc_id = document_id(document)
        self.density = _CHARACTERS_PER_TOKEN
        self.structure = parse(document, self.text)
        between_characters: tuple[Sequence[int], float] = (range(len(self.text)), 0.0)
        self.ends = [*self.structure.ends, between_characters]
        self.overheads = dict[tuple[str, str], int]()
        self.context = self._context(0)

    def run(self) -> Iterator[Passage]:
        end = n = 0
        while (start := self._skip_space(end)) < len(self.text):
            self.context = self._context(start)
            end = self._end(start)
            if self.text[start:end].strip():
                yield self._passage(start, end, n)
                n += 1

    def _context(self, start: int) -> _PassageHead:
        """Return title and table header of a passage that begins at `start`.

        The header, then the section's path, is left out if it would take more than _MAX_CONTEXT of the tokens.
        """
        names = (self.document.title, *self.structure.path(start))
        path = " > ".join(name for name in dict.fromkeys(names) if name)
        for title, head in ((path, self.structure.head(start)), (path, "")):
            context = self._measured(title, head)
            if context.overhead <= _MAX_CONTEXT * self.max_tokens:
                return context
        context = self._measured(self.document.title, "")
        if context.overhead >= self.max_tokens:
            raise self._no_room(context)
        return context

    def _measured(self, title: str, head: str) -> _PassageHead:
        if (title, head) not in self.overheads:
            self.overheads[title, head] = self.count(Passage(head, title, f"{self.doc_id}:0", self.doc_id))
        return _PassageHead(title, head, self.overheads[title, head])

    def _end(self, start: int) -> int:
        """Return the end of the passage that begins at `start`."""

        def tokens(end: int) -> int:
            return self.count(self._passage(start, end, 0))

        horizon = self._horizon(start, tokens)
        if horizon > len(self.text):
            return len(self.text)
        room = self.max_tokens - self.context.overhead
        for ends, fill in self.ends:
            end = self._furthest(ends, start, horizon, tokens)
            if self.structure.start_of_whole(end) > start:  # else the part that must stay whole is too long
                end = self.structure.start_of_whole(end)
            filled = tokens(end) - self.context.overhead
            if end > start and filled >= fill * room:
                self.density = (end - start) / max(1, filled)
                return end
        raise self._no_room(self.context)

    def _horizon(self, start: int, tokens: Callable[[int], int]) -> int:
        """Return a position up to which the text is a little too long; len(text) + 1 if all of the text fits."""
        reach = 2 + int(1.1 * self.density * (self.max_tokens - self.context.overhead))
        while tokens(start + reach) <= self.max_tokens:
            if start + reach >= len(self.text):
                return len(self.text) + 1
            reach *= 2
        return min(start + reach, len(self.text))

    def _furthest(self, ends: Sequence[int], start: int, horizon: int, tokens: Callable[[int], int]) -> int:
        """Return the last of `ends` in (start, horizon) up to which the text fits; `start` if none fits.

        This assumes that the token count grows with the text. Where BPE breaks that by a token, the passage is a little
        shorter than it could be, but never too long: bisection has counted the end that it returns.
        """
        first, last = bisect_right(ends, start), bisect_left(ends, horizon)
        after = bisect_right(ends, self.max_tokens, first, max(first, last), key=tokens)
        return ends[after - 1] if after > first else start

    def _skip_space(self, start: int) -> int:
        """Return the position after white space at `start`, but before the indentation of the first line with text."""
        space = _SPACE.match(self.text, start)
        return space.end() if space else start

    def _passage(self, start: int, end: int, n: int) -> Passage:
        text = self.context.head + self.text[start:end].rstrip()
        return Passage(text, self.context.title, f"{self.doc_id}:{n}", self.doc_id)

    def _no_room(self, context: _PassageHead) -> ConfigError:
        return ConfigError(
            f"chunk_tokens={self.max_tokens} leaves no room for text: the title and separators of document "
            f"{self.doc_id!r} take {context.overhead} tokens: raise chunk_tokens or shorten the title",
            setting="retrieve.chunk_tokens",
        )
