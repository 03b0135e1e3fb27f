"""Corpora are read whole or refused by place; their passages fit, are well filled and lose nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import Document, Passage
from blendserve.errors import ConfigError, CorpusError
from blendserve.retrieve import Embedder, Skipped, as_documents, document_id, read_documents, split
from blendserve.retrieve.demo_corpus import DEMO_CHARACTERS, language_reference
from tests.retrieve.conftest import words


def test_jsonl_gives_a_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "one", "title": " T ", "id": "a", "year": 3}\r\n\n'
        b'{"text": "two", "id": 7, "title": null}\n' + '{"text":"3\u2028\x85 漢"}'.encode()
    )
    third = Document("3\u2028\x85 漢")
    assert list(read_documents(path)) == [Document("one", "T", "a"), Document("two", "", "7"), third]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (b"{text: 1}", None),
        (b"[" * 100_000, None),
        (b'["text"]', None),
        (b'{"text": "caf\xe9"}', None),
        (b'{"title": "x"}', "text"),
        (b'{"text": null}', "text"),
        (b'{"text": 5}', "text"),
        (b'{"text": " \\n"}', "text"),
        (b'{"text": "\\ud83d"}', "text"),
        (b'{"text": "t\\u0000e\\u0000"}', "text"),
        (b'{"text": "a\0"}', None),
        (b'{"text": "a", "title": []}', "title"),
        (b'{"text": "a", "id": true}', "id"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, field: str | None) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(CorpusError) as error:
        list(read_documents(path))
    assert (error.value.path, error.value.line, error.value.setting) == (str(path), 2, field)


def test_a_folder_is_read_in_order_with_headings_as_titles(tmp_path: Path) -> None:
    for name, text in {
        "b.txt": "bee\r\nline",
        "a/z.md": "```\n# code\n```\n## The *Zed* ##\ntext",
        "a/plain.md": "no heading",
        "a.TXT": "\ufeffbom",
        "blank.txt": " \n",
        "picture.png": "not read",
        ".hidden/x.txt": "hidden",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    found = list(read_documents(tmp_path))
    assert [(d.id, d.title) for d in found] == [
        *(("a/plain.md", "a/plain"), ("a/z.md", "The *Zed*"), ("a.TXT", "a"), ("b.txt", "b"))
    ]
    assert [d.text for d in found if d.id in ("a.TXT", "b.txt")] == ["bom", "bee\nline"]
    assert list(read_documents(tmp_path / "b.txt")) == [Document("bee\nline", "b", "b.txt")]


FILES = {  # name -> content; where `Skipped` counts it
    b"read.txt": (b"text", "read"),
    b"bad\xff\xfename.md": (b"text", "read"),
    b"sub/\xc3\x9cber.txt": (b"\xef\xbb\xbftext", "read"),
    b"latin1.txt": (b"caf\xe9", "unreadable"),
    b"utf16.txt": ("text".encode("utf-16"), "unreadable"),
    b"utf16-without-mark.md": ("text".encode("utf-16-le"), "unreadable"),
    b"cut.txt": ("漢".encode()[:2], "unreadable"),
    b"blank.txt": (b" \n", "blank"),
    b"a.pdf": (b"%PDF-1.7", "other_kinds"),
    b"b.PDF": (b"%PDF-1.7", "other_kinds"),
    b"page.html": (b"<p>", "other_kinds"),
    b"LICENSE": (b"text", "other_kinds"),
    b"odd.\xff": (b"text", "other_kinds"),
    b".git/x.txt": (b"text", "hidden"),
    b".env": (b"text", "hidden"),
}
LINKS = {b"linked": b"sub", b"loop": b".", b"broken.txt": b"nowhere.txt"}


@given(st.sets(st.sampled_from(sorted(FILES))), st.sets(st.sampled_from(sorted(LINKS))))
def test_every_file_of_a_folder_is_read_or_counted(names: set[bytes], links: set[bytes]) -> None:
    with TemporaryDirectory() as made:
        folder, skipped = os.fsencode(made), Skipped()
        for name in names:
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(os.fsdecode(path)).write_bytes(FILES[name][0])
        for name in links:
            os.symlink(LINKS[name], os.path.join(folder, name))
        found = list[Document]()
        with suppress(CorpusError):  # nothing was read
            found = list(read_documents(made, skipped))
        wanted = Counter(FILES[name][1] for name in names)
        assert len(found) == len({d.id for d in found}) == skipped.read == wanted["read"]
        assert (skipped.hidden, skipped.blank) == (wanted["hidden"], wanted["blank"])
        assert sum(skipped.other_kinds.values()) == wanted["other_kinds"]
        assert skipped.links == sorted(link.decode() for link in links)
        assert sorted(skipped.unreadable) == sorted(n.decode() for n in names if FILES[n][1] == "unreadable")
        assert all(name in why for name, why in skipped.unreadable.items())
        for text in (str(skipped), *(d.id + d.title for d in found)):
            text.encode()  # as UTF-8, whatever the file's name is


@pytest.mark.parametrize("name", [name for name, (_, where) in FILES.items() if where == "unreadable"])
def test_a_file_that_is_no_utf8_text_is_refused_by_name(name: bytes, tmp_path: Path) -> None:
    path = tmp_path / name.decode()
    path.write_bytes(FILES[name][0])
    with pytest.raises(CorpusError) as error:
        list(read_documents(path))
    assert (error.value.path, error.value.line) == (str(path), 1)


def test_missing_empty_and_unknown_corpora_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "book.pdf").write_text("x")
    (tmp_path / "folder").mkdir()
    for name in ("nowhere.jsonl", "empty.jsonl", "empty.txt", "book.pdf", "folder"):
        with pytest.raises(CorpusError) as error:
            list(read_documents(tmp_path / name))
        assert error.value.path == str(tmp_path / name)


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
