"""Metadata is kept as it was given, and a search with a filter is a search among the documents that have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendserve.core import Document, PassageFilter
from blendserve.errors import CorpusError
from blendserve.retrieve import TokenCounter, VectorIndex, as_documents
from blendserve.retrieve.published import parse_files, to_files, write_index
from tests.retrieve.conftest import toy_embedder
from tests.retrieve.conftest import words as count

EMBEDDER, COUNTER = toy_embedder(), TokenCounter("tiny", "abcdefghij", count)
VALUES: list[Any] = [1, 1.5, True, "a", "true", ["a", "b"], {"deep": [1]}]


def create(path: Path, *documents: Document) -> VectorIndex:
    index = VectorIndex.create(path, EMBEDDER, COUNTER, chunk_tokens=20)
    index.add(documents)
    return index


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    given=st.lists(st.dictionaries(st.sampled_from("xy"), st.sampled_from(VALUES)), min_size=1, max_size=8),
    wanted=st.dictionaries(st.sampled_from("xy"), st.sampled_from([*VALUES, 1.0])),
    tags=st.none() | st.just(("a",)),
)
def test_a_filtered_search_is_one_of_the_documents_that_have_it(
    given: list[dict[str, Any]], wanted: dict[str, Any], tags: tuple[str, ...] | None, tmp_path: Path
) -> None:
    def has(metadata: dict[str, Any], name: str, values: Any) -> bool:
        own = metadata.get(name, [])
        some = values if isinstance(values, list) else [values]
        return any(
            each == value and isinstance(each, bool) == isinstance(value, bool)
            for each in (own if isinstance(own, list) else [own])
            for value in some
        )

    made = [{**each, "tags": ["a"]} if n % 2 else each for n, each in enumerate(given)]
    documents = [Document(f"w{n} text", id=f"d{n}", metadata=each) for n, each in enumerate(made)]
    index = create(tmp_path / "index", *documents)
    selection = PassageFilter(filter=wanted, tags=tags)
    conditions = [*wanted.items(), *([("tags", list(tags))] if tags else [])]
    left = [d for d in documents if all(has({**d.metadata}, *each) for each in conditions)]
    found = index.search("w1 text", 9, selection)
    alone = create(tmp_path / "alone", *left).search("w1 text", 9) if left else []
    assert [p.id for p in found] == [p.id for p in alone]
    assert [p.score for p in found] == pytest.approx([p.score for p in alone], abs=1e-5)
    assert [row[0] for row in index.documents(selection)] == [d.id for d in left]
    scanned = [p.doc_id for some in index.scan(3, selection) for p in some]
    assert scanned == [d.id for d in left]


def test_metadata_is_replaced_deleted_and_published(tmp_path: Path) -> None:
    draft, final = ({"state": state, "tags": ["x", "y"]} for state in ("draft", "final"))
    index = create(tmp_path / "index", Document("one", id="d", metadata=draft), Document("two", id="e"))
    assert index.add([Document("one", id="d", metadata=final)])[0] == 1
    assert index.add([Document("one", id="d", metadata=final)])[0] == 0
    write_index(tmp_path / "copy", parse_files(to_files(index)))
    for each in (index, VectorIndex.open(tmp_path / "copy", EMBEDDER, COUNTER)):
        assert each.search("one", 9, PassageFilter(filter={"state": "draft"})) == []
        for selection in (PassageFilter(filter={"state": "final"}), PassageFilter(tags=("y", "z"))):
            assert [p.doc_id for p in each.search("one", 9, selection)] == ["d"]
    index.delete("d")
    assert index.search("one", 9, PassageFilter(filter={"state": "final"})) == []


def test_records_have_metadata() -> None:
    (found,) = as_documents([{"page_content": "x", "metadata": {"title": "T", "page": 3, "none": None}}])
    assert (found.title, found.metadata) == ("T", {"page": 3})
    (same,) = as_documents([found])
    assert same == found
    with pytest.raises(CorpusError) as error:
        list(as_documents([{"text": "x", "metadata": [1]}]))
    assert error.value.setting == "metadata"
