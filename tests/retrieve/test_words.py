"""Words find what vectors blur; the index of words is the same whatever its history."""

from __future__ import annotations

import sqlite3
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import Document, PassageFilter
from blendserve.errors import IndexDamaged
from blendserve.retrieve import TokenCounter, VectorIndex, words
from blendserve.retrieve.database import FILE
from blendserve.retrieve.index import fuse
from blendserve.retrieve.terms import pack, unpack, words_of
from tests.retrieve.conftest import toy_embedder
from tests.retrieve.conftest import words as count

EMBEDDER, COUNTER = toy_embedder(), TokenCounter("tiny", "abcdefghij", count)


def create(path: Path) -> VectorIndex:
    return VectorIndex.create(path, EMBEDDER, COUNTER, chunk_tokens=20)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The Pump's serve.max_body_kb=64", "the pump s serve max body kb 64"),
        ("Über CAFÉ naïve İ ﬁne", "uber cafe naive i fine"),
        ("水泵加油", "水泵 泵加 加油"),
        ("第3章 水", "第 3 章 水"),
        ("펌프는 물을", "펌프는 물을"),
        ("насос Ёлка", "насос елка"),
        ("_ - \n", ""),
    ],
)
def test_words_are_told_apart(text: str, found: str) -> None:
    assert [unicodedata.normalize("NFC", word) for word in words_of(text)] == found.split()


@given(st.text())
def test_words_of_any_text_are_packed(text: str) -> None:
    content = pack(text)
    hashes, counts = unpack(content)
    assert len(hashes) == 4 * len(counts)
    assert sum(counts) == len(words_of(text)) or 255 in counts
    with pytest.raises(ValueError):  # noqa: PT011  allow: it has no message that matters
        unpack(content[:-1] + bytes([content[-1] ^ 1]))


def test_a_name_is_found_that_vectors_do_not_know(tmp_path: Path) -> None:
    index = create(tmp_path / "index")
    index.add([Document(f"Part SKU-{n} costs {n % 7} dollars.", id=f"d{n}") for n in range(4000, 4100)])
    near = index.candidates("How much is SKU-4071?", 6).near
    assert "d4071" not in [passage.doc_id for passage in near[:6]]
    assert "d4071" in [passage.doc_id for passage in index.search("How much is SKU-4071?", 2)]
    assert len(index.search("nothing of this", 6)) == 6  # by vectors alone


def test_a_selection_leaves_out_what_is_less_similar(tmp_path: Path) -> None:
    """By whichever of the two it was found."""
    index = create(tmp_path / "index")
    index.add([Document(f"Part SKU-{n} costs {n % 7} dollars.", id=f"d{n}") for n in range(4000, 4100)])
    found = index.search("How much is SKU-4071?", 100)
    least = sorted(passage.score or 0.0 for passage in found)[60]
    kept = [passage for passage in found if (passage.score or 0.0) >= least]
    selected = index.search("How much is SKU-4071?", 100, PassageFilter(least))
    assert {p.id for p in selected} == {p.id for p in kept}
    assert index.search("How much is SKU-4071?", 100, PassageFilter(1.0)) == []


def test_damaged_words_are_noticed(tmp_path: Path) -> None:
    index = create(tmp_path / "index")
    index.add(["some text"])
    index.close()
    with sqlite3.connect(tmp_path / "index" / FILE) as rows:
        rows.execute("UPDATE passages SET words = substr(words, 2)")
    with pytest.raises(IndexDamaged):
        VectorIndex.open(tmp_path / "index", EMBEDDER, COUNTER)


def test_words_of_most_passages_count_only_in_small_indexes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = create(tmp_path / "index")
    index.add([Document(f"pump {'oil' * (n == 3)} {n}", id=f"d{n}") for n in range(9)])
    assert len(index.candidates("pump oil", 6).by_words) == 9
    monkeypatch.setattr(words, "MANY", 9)
    assert [p.doc_id for _, p in index.candidates("pump oil", 6).by_words] == ["d3"]
    assert index.candidates("What is the pump?", 6).by_words == []


def test_several_indexes_are_ranked_together(tmp_path: Path) -> None:
    texts = [f"Part SKU-{n} costs {n % 7} dollars." for n in range(4000, 4040)]
    indexes = [create(tmp_path / name) for name in "ab"]
    for n, index in enumerate(indexes):
        index.add(
            [Document(text, id=f"{n}-{at}") for at, text in enumerate(texts[n::2])]
            + [Document("Twin.", id="t")]
        )
    for number in (4010, 4031):
        found = fuse([index.candidates(f"How much is SKU-{number}?", 6) for index in indexes], 6)
        assert f"SKU-{number}" in found[0].text + found[1].text
    everything = fuse([index.candidates("Twin", 99) for index in indexes], 99)
    assert sorted(passage.text for passage in everything) == sorted([*texts, "Twin."])
