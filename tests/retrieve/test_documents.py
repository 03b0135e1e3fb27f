"""Objects become documents or are refused by place; their passages fit, are well filled and lose nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import Document, Passage
from blendserve.errors import ConfigError, CorpusError
from blendserve.retrieve import Embedder, as_documents, document_id, split
from blendserve.retrieve.demo_corpus import DEMO_CHARACTERS, language_reference
from tests.retrieve.conftest import words


def test_python_objects_become_documents() -> None:
    objects: list[Any] = [Document("a", "t"), "b", {"text": "c", "id": "i"}]
    assert list(as_documents(objects)) == [Document("a", "t"), Document("b"), Document("c", id="i")]
    assert list(as_documents("alone")) == [Document("alone")]
    for broken, field in ((3, None), (Document(" "), "text")):
        with pytest.raises(CorpusError) as error:
            list(as_documents(["fine", broken]))  # type: ignore[list-item]
        assert (error.value.line, error.value.setting) == (2, field)


def test_ids_follow_title_and_text() -> None:
    documents = [Document("a", "tb"), Document("ba", "t"), Document("a", "t"), Document("a")]
    assert len(set(map(document_id, documents))) == len(documents)
    assert document_id(Document("a", "t", "mine")) == "mine"


def test_the_language_reference_holds_its_topics_and_fits() -> None:
    documents = {d.id: d for d in language_reference()}
    assert len(documents) > 20
    assert sum(len(d.text) for d in documents.values()) <= DEMO_CHARACTERS
    assert documents["with"].title == "The with statement"
    assert "\n   manager = (EXPRESSION)\n   enter = type(manager).__enter__\n" in documents["with"].text
    assert [d.id for d in language_reference(["if", "no such topic", "else", "while"])] == ["if", "while"]


PIECES = "word|Two words.|Ends here! |\n\n|\n|   |    code()|naïve|漢字。|🙂🏽|\u2028|\x85|\t|" + "x" * 90
texts = st.lists(st.sampled_from(PIECES.split("|")) | st.text(max_size=8), max_size=60).map("".join)


def utf8(passage: Passage) -> int:
    """A byte-level tokenizer without merges: 4 tokens for an emoji."""
    return len(f"{passage.title}\n{passage.text}".encode())


@given(texts, st.integers(8, 60), st.sampled_from([words, utf8]), st.integers(20, 200))
def test_passages_fit_and_nothing_is_lost(
    embedder: Embedder, text: str, limit: int, count: Callable[[Passage], int], real: int
) -> None:
    def word_pieces(passage: Passage) -> int:
        shown = f"{passage.title}\n{passage.text}\n\n"
        return len(embedder.encoder.tokenizer.encode(shown, add_special_tokens=False).ids)

    for most, counted in ((limit, count), (real, word_pieces)):  # the second as a real tokenizer counts
        passages = list(split(Document(text, title="T", id="d"), most, counted))
        assert all(counted(p) <= most for p in passages)
        assert all(p.text in text for p in passages)
        kept = "".join(p.text for p in passages)
        assert "".join(kept.split()) == "".join(text.split())  # but for white space
        assert [(p.id, p.title, p.doc_id) for p in passages] == [
            (f"d:{n}", "T", "d") for n in range(len(passages))
        ]


@pytest.mark.parametrize(
    ("text", "limit", "passages"),
    [
        ("One two. Six.\n\nOne two. Six seven. Nine", 5, "One two. Six.|One two. Six seven.|Nine"),
        ("a b c d. E f g h i j k l", 7, "a b c d.|E f g h i j|k l"),
        ("Dr. who said e.g. this and that", 5, "Dr. who said e.g.|this and that"),
        ("if a:\n    b c\n    d e f g h", 6, "if a:\n    b c|    d e f g h"),
        ("文。字文字。", 9, "文。字文字。"),
        (" \n", 10, ""),
    ],
)
def test_a_passage_ends_at_the_coarsest_end_that_fills_it(text: str, limit: int, passages: str) -> None:
    assert [p.text for p in split(Document(text), limit, words)] == [p for p in passages.split("|") if p]


def test_cost_is_linear() -> None:
    """Characters handed to `count` per character of text; recounting the rest each time would be thousands."""
    text = ("x" * 40_000) + " word" * 20_000 + ". A sentence." * 4_000 + "\n" * 20_000 + "." * 20_000
    count = Mock(wraps=utf8)
    assert all(split(Document(text), 300, count))
    assert sum(len(call.args[0].text) for call in count.call_args_list) < 40 * len(text)


def test_a_title_that_leaves_no_room_is_refused() -> None:
    for text, title, limit, count in (("text", "a long title", 4, words), ("🙂", "", 4, utf8)):
        with pytest.raises(ConfigError) as error:
            list(split(Document(text, title=title, id="d"), limit, count))
        assert error.value.setting == "retrieve.chunk_tokens"
