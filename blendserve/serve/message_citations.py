"""Citations in Anthropic's format, of the documents and search results of a request that asks for citations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from blendserve.core import Passage
from blendserve.retrieve.citations import Citer
from blendserve.retrieve.structure import sentences
from blendserve.serve.message_schemas import (
    CountRequest,
    DocumentBlock,
    SearchResult,
    TextBlock,
    ToolResult,
)

PIECE = 1500  # characters of a text, which is cited for what stands close together


class Piece(NamedTuple):
    """A part of a source."""

    passage: Passage
    place: dict[str, Any]  # the fields of its citations, but for the quote
    offset: int | None  # in characters of the source; None: its blocks are cited


class MessageCiter:
    """Cites the sources of a request."""

    def __init__(self, body: CountRequest) -> None:
        blocks = [block for message in body.messages for block in message.content]
        inner = [each for b in blocks for each in (b.content if isinstance(b, ToolResult) else [b])]
        results = [block for block in inner if isinstance(block, SearchResult)]
        documents = [block for block in inner if isinstance(block, DocumentBlock)]
        self._pieces = [piece for n, block in enumerate(results) for piece in _of_result(block, n)]
        self._pieces += [piece for n, block in enumerate(documents) for piece in _of_document(block, n)]
        question = [block.text for block in body.messages[-1].content if isinstance(block, TextBlock)]
        self._citer = Citer([piece.passage for piece in self._pieces], " ".join(question))

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def of_sentence(self, sentence: str) -> list[dict[str, Any]]:
        """Return the citations of a sentence."""
        found = list[dict[str, Any]]()
        for citation in self._citer.of_sentence(sentence):
            _, place, offset = self._pieces[citation.passage]
            chars = {}
            if offset is not None:
                start = offset + citation.quote_start
                chars = {"start_char_index": start, "end_char_index": start + len(citation.quote)}
            found.append({**place, "cited_text": citation.quote, **chars})
        return found

    def blocks(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield a text block for each sentence, with its citations."""
        starts = [start for start, _ in sentences(text)][1:]
        for start, end in zip([0, *starts], [*starts, len(text)], strict=True):
            cited = self.of_sentence(text[start:end])
            yield {"type": "text", "text": text[start:end], "citations": cited or None}


def _of_result(result: SearchResult, n: int) -> Iterator[Piece]:
    """Return the parts of a search result. n: its number among the search results."""
    place = {"type": "search_result_location", "search_result_index": n}
    if result.citations.enabled:
        named = {**place, "source": result.source, "title": result.title}
        yield from _by_blocks(result.content, result.title, named)


def _of_document(document: DocumentBlock, n: int) -> Iterator[Piece]:
    """Return the parts of a document. n: its number among the documents."""
    place = {"document_index": n, "document_title": document.title, "file_id": None}
    title = document.title or ""
    blocks = document.source.data
    if not document.citations.enabled:
        return
    if document.source.has_blocks:
        yield from _by_blocks(blocks, title, {"type": "content_block_location", **place})
    elif blocks:
        for start, end in _cut(blocks[0].text):
            passage = Passage(blocks[0].text[start:end], title)
            yield Piece(passage, {"type": "char_location", **place}, start)


def _by_blocks(blocks: Sequence[TextBlock], title: str, place: dict[str, Any]) -> Iterator[Piece]:
    for n, block in enumerate(blocks):
        at = {"start_block_index": n, "end_block_index": n + 1}
        yield Piece(Passage(block.text, title), {**place, **at}, None)


def _cut(text: str) -> Iterator[tuple[int, int]]:
    """Cut a text into parts of about PIECE characters, which end with sentences."""
    start = 0
    for _, end in sentences(text):
        if end - start >= PIECE:
            yield start, end
            start = end
    if text[start:].strip():
        yield start, len(text)
