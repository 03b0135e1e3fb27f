"""The index of chunks by token windows, against plain comparison of windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import TokenIds
from blendserve.store import spans as module
from blendserve.store.spans import APART, MOST, STRIDE, WINDOW, Hasher, SpanIndex, Tokens
from tests.support.blending import some_ids

UNRELATED = np.asarray(some_ids(2000, 1000))


def array(*parts: TokenIds) -> Tokens:
    return np.asarray([i for part in parts for i in part], np.int64)


def key(n: int) -> bytes:
    return n.to_bytes(4, "big")


def index_of(chunks: list[TokenIds]) -> SpanIndex:
    index = SpanIndex()
    index.add((key(n), index.anchors(ids)) for n, ids in enumerate(chunks))
    return index


def anchors_in(chunks: list[TokenIds], ids: Tokens) -> set[tuple[int, bytes]]:
    """(place, key) of every anchor that is in a prompt, by comparing tokens."""
    text, found = ids.tolist(), set()
    for n, chunk in enumerate(chunks):
        for at in range(0, len(chunk) - WINDOW + 1, STRIDE):
            window = list(chunk[at : at + WINDOW])
            found |= {(i, key(n)) for i in range(len(text) - WINDOW + 1) if text[i : i + WINDOW] == window}
    return found


@given(st.lists(st.integers(0, 2), max_size=90), st.integers(1, 40))
def test_windows_have_equal_hashes_if_and_only_if_their_tokens_are_equal(ids: list[int], width: int) -> None:
    hashes = Hasher().windows(array(tuple(ids)), width).tolist()
    windows = [tuple(ids[i : i + width]) for i in range(len(ids) - width + 1)]
    assert len(hashes) == len(windows)
    assert len(set(hashes)) == len(set(windows)) == len(set(zip(hashes, windows, strict=True)))


def test_hashes_are_secret_and_do_not_depend_on_what_was_hashed_before() -> None:
    one, other, ids = Hasher(), Hasher(), array(some_ids(5000))
    first = one.windows(ids[:40], WINDOW)
    assert set(first.tolist()).isdisjoint(other.windows(ids[:40], WINDOW).tolist())
    assert one.windows(ids, WINDOW)[: len(first)].tolist() == first.tolist()  # more powers are made for it


def test_ids_of_any_vocabulary_have_hashes() -> None:
    assert len(Hasher().windows(array((0, 2**18 - 1, 2**18, 2**31)), 1)) == 4


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(20, 120)), max_size=6), st.integers(0, 60))
def test_every_anchor_is_found_at_any_offset_and_nothing_else(
    pieces: list[tuple[int, int]], moved: int
) -> None:
    chunks = [some_ids(n, 50 + n) for n in (20, 31, 32, 33, 64, 100, 101)]
    parts = [(some_ids(n, n), chunks[n % 7][:n], chunks[n % 7], chunks[n % 7][5:])[i] for i, n in pieces]
    ids = array(some_ids(moved, 3), *(ids for part in parts for ids in (part, some_ids(APART, 4))))
    found = {(hit.place, hit.key) for hit in index_of(chunks).find(ids)}
    assert found == anchors_in(chunks, ids)


def test_a_hit_names_the_places_of_its_anchor_in_the_chunk() -> None:
    chunk = (*some_ids(50, 1), *some_ids(50, 1), *some_ids(13, 2))  # with the same windows twice
    index, tokens = index_of([chunk]), array(chunk)
    for hit in index.find(array(some_ids(9, 3), chunk)):
        places = index.places(tokens)[hit.hash]
        assert places
        for at in places:
            assert tokens[at : at + WINDOW].tolist() == list(chunk[hit.place - 9 : hit.place - 9 + WINDOW])


def test_an_index_that_grew_and_shrank_finds_what_a_new_one_finds_in_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SPARE", 3)
    monkeypatch.setattr(module, "FILTER_BITS", 1 << 12)  # so that it grows
    chunks = [(*some_ids(40, n % 5), *some_ids(60, n), *some_ids(40, n % 7)) for n in range(60)]
    grown, new = SpanIndex(), SpanIndex()
    for n, ids in enumerate(chunks):
        grown.add([(key(n), grown.anchors(ids))])
        grown.add([(key(n), grown.anchors(chunks[0]))])  # known
        grown.discard([key(n - 4)] if n >= 4 else [])
    new.add([(key(n), new.anchors(chunks[n])) for n in range(56, 60)])
    assert grown.keys == new.keys
    assert len(grown) == 4
    assert grown.n_bytes < 5 * new.n_bytes
    for text in (*map(array, chunks), UNRELATED):
        assert grown.find(text) == new.find(text)
    assert new.find(array(chunks[-1]))
    assert grown.find(UNRELATED) == []


def test_at_one_place_the_latest_chunks_are_found() -> None:
    middle = some_ids(WINDOW, 1)
    chunks = [(*some_ids(STRIDE, n), *middle, *some_ids(9, n)) for n in range(3 * MOST)]
    index = index_of(chunks)
    latest = [3 * MOST - 1 - n for n in range(MOST)]
    index.discard([key(latest.pop(1))])
    hits = index.find(array(middle))
    assert {hit.place for hit in hits} == {0}
    assert [hit.key for hit in hits] == [key(n) for n in latest]


@pytest.mark.parametrize("period", [1, 3, 40])
def test_a_window_that_repeats_itself_at_once_counts_once(period: int) -> None:
    pattern = some_ids(period, 1)
    index = index_of([pattern * 200] * 3)
    windows = {at % period for at in range(0, 200 * period - WINDOW + 1, STRIDE)}
    hits = index.find(array(pattern * (20_000 // period)))
    assert [(hit.place, hit.key) for hit in hits] == [
        (at, key(n)) for at in sorted(windows) for n in (2, 1, 0)
    ]
    far = array(pattern * 200, some_ids(APART, 2), pattern * 200)
    assert len({hit.place for hit in index.find(far)}) == 2 * len(windows)


def test_there_is_at_most_one_hit_for_each_token_and_first_hits_come_first() -> None:
    text = some_ids(300, 1)
    chunks = [text[n : n + WINDOW] for n in range(300 - WINDOW + 1) for _ in range(MOST)]
    hits = index_of(chunks).find(array(text))
    assert len(hits) == 300
    assert {hit.place for hit in hits} == set(range(300 - WINDOW + 1))
    assert hits == sorted(hits, key=lambda hit: (hit.place, -int.from_bytes(hit.key, "big")))
