"""Corpora are read whole, or refused with the place that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import Document
from blendserve.errors import CorpusError
from blendserve.retrieve import as_documents, document_id, read_documents

some_text = st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)


def test_jsonl_gives_a_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "one", "title": " T ", "id": "a", "year": 3}\r\n\n'
        b'{"text": "two", "id": 7, "title": null}\n{"text":"3"}'
    )
    assert list(read_documents(path)) == [Document("one", "T", "a"), Document("two", "", "7"), Document("3")]


@given(st.lists(st.builds(Document, text=some_text, title=some_text.map(str.strip)), min_size=1, max_size=5))
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, documents: list[Document]
) -> None:
    path = tmp_path_factory.mktemp("corpus") / "c.jsonl"
    lines = [json.dumps({"text": d.text, "title": d.title}, ensure_ascii=False) for d in documents]
    path.write_text("\n".join(lines), encoding="utf-8", newline="")
    assert list(read_documents(path)) == documents


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{text: 1}", "line 2: not JSON"),
        (b"[" * 100_000, "line 2: not JSON"),
        (b'["text"]', "line 2: .* is not an object"),
        (b'{"title": "x"}', "line 2: has no `text`"),
        (b'{"text": null}', "line 2: has no `text`"),
        (b'{"text": 5}', "line 2: its `text` must be a string, not 5"),
        (b'{"text": " \\n"}', "line 2: its `text` is blank"),
        (b'{"text": "a", "title": []}', "line 2: its `title` must be a string"),
        (b'{"text": "a", "id": true}', "line 2: its `id` must be a string"),
        (b'{"text": "\\ud83d"}', "line 2: its `text` holds half a character"),
        (b'{"text": "caf\xe9"}', "line 2: not UTF-8 .*0xe9"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(CorpusError, match=rf"broken\.jsonl, {problem}"):
        list(read_documents(path))


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
        ("a/plain.md", "a/plain"),
        ("a/z.md", "The *Zed*"),
        ("a.TXT", "a"),
        ("b.txt", "b"),
    ]
    assert [d.text for d in found if d.id in ("a.TXT", "b.txt")] == ["bom", "bee\nline"]
    assert list(read_documents(tmp_path / "b.txt")) == [Document("bee\nline", "b", "b.txt")]


def test_missing_empty_and_unknown_corpora_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "book.pdf").write_text("x")
    for name, problem in {
        "nowhere.jsonl": "does not exist",
        "empty.jsonl": "is empty: write one JSON object a line",
        "empty.txt": "is empty",
        "book.pdf": "is of a kind that is not read: bring .jsonl",
    }.items():
        with pytest.raises(CorpusError, match=rf"{name} {problem}"):
            list(read_documents(tmp_path / name))
    (tmp_path / "folder").mkdir()
    with pytest.raises(CorpusError, match=r"folder is empty: it holds no \.txt"):
        list(read_documents(tmp_path / "folder"))


def test_python_objects_become_documents() -> None:
    given_objects: list[Any] = [Document("a", "t"), "b", {"text": "c", "id": "i"}]
    assert list(as_documents(given_objects)) == [Document("a", "t"), Document("b"), Document("c", id="i")]
    assert list(as_documents("alone")) == [Document("alone")]
    with pytest.raises(CorpusError, match=r"documents\[1\]: 3 is not an object"):
        list(as_documents(["fine", 3]))  # type: ignore[list-item]
    with pytest.raises(CorpusError, match=r"documents\[0\]: its `text` is blank"):
        list(as_documents([Document(" ")]))


@given(some_text, some_text, some_text, some_text)
def test_ids_follow_title_and_text(title: str, text: str, other_title: str, other_text: str) -> None:
    same = (title, text) == (other_title, other_text)
    assert (document_id(Document(text, title)) == document_id(Document(other_text, other_title))) == same
    assert document_id(Document(text, title, "mine")) == "mine"


def test_title_and_text_do_not_run_together() -> None:
    assert document_id(Document("bc", "a")) != document_id(Document("c", "ab"))
