"""The matcher of plain prompts against a naive one: every whole chunk, the best cover, in bounded work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend.match import MIN_SPAN, WORK, Cover, best_cover, find_chunks
from blendserve.core import Run, Span, TokenIds
from blendserve.store.spans import EDGE, MOST, WINDOW, SpanIndex
from tests.support.blending import some_ids
from tests.support.plain import CHUNKS, A, B, Copy, other


def cover(ids: Sequence[int], chunks: Sequence[TokenIds]) -> Cover:
    """By the matcher, over an index of these chunks."""
    index = SpanIndex()
    index.add((bytes([n]), index.anchors(chunk)) for n, chunk in enumerate(chunks))
    return find_chunks(np.asarray(ids, np.int64), index, lambda keys: {key: chunks[key[0]] for key in keys})


def naive_runs(ids: Sequence[int], chunks: Sequence[TokenIds]) -> set[Run]:
    """Every whole chunk, but for its ends, by trying each at each place: grown from its middle, token by token."""
    found = set()
    for n, chunk in enumerate(chunks):
        middle = (len(chunk) - WINDOW) // 2
        for start in range(-EDGE, len(ids) - len(chunk) + EDGE + 1):
            equal = [0 <= start + i < len(ids) and ids[start + i] == chunk[i] for i in range(len(chunk))]
            if len(chunk) < WINDOW or not all(equal[middle : middle + WINDOW]):
                continue
            head, tail = middle, len(chunk) - middle - WINDOW
            while head and equal[head - 1]:
                head -= 1
            while tail and equal[len(chunk) - tail]:
                tail -= 1
            if max(head, tail) <= EDGE and len(chunk) - head - tail >= MIN_SPAN:
                span = Span(start + head, start + len(chunk) - tail)
                found.add(Run(span, bytes([n]), head, tail))
    return found


def most_tokens(runs: set[Run], n: int, least: int) -> tuple[int, int]:
    """(tokens, -runs) of the best cover by ends of runs, from each position's best."""
    best = [(0, 0)] * (n + 1)
    for at in range(1, n + 1):
        ends = [run.span for run in runs if run.span.stop == at]
        starts = {s.start for s in ends} | {cut for s in ends for cut in range(s.start, at - least + 1)}
        covers = [(best[cut][0] + at - cut, best[cut][1] - 1) for cut in starts]
        best[at] = max([best[at - 1], *covers])
    return best[n]


def check_cover(found: Cover, ids: Sequence[int], chunks: Sequence[TokenIds]) -> None:
    """Runs equal their donors, do not overlap, miss few tokens, and little was compared."""
    done = 0
    for span, donor, offset, n_after, *_ in found.runs:
        chunk = chunks[donor[0]]
        assert tuple(ids[span.start : span.stop]) == chunk[offset : offset + len(span)]
        assert offset + len(span) + n_after == len(chunk)
        assert n_after <= EDGE
        assert offset <= EDGE or span.start == done
        assert span.start >= done
        assert len(span) >= MIN_SPAN
        done = span.stop
    assert found.n_compared <= WORK * len(ids)


@st.composite
def texts(draw: st.DrawFn) -> tuple[TokenIds, list[TokenIds]]:
    """A prompt of pieces of chunks, some of which overlap each other or have parts in common."""
    base = some_ids(200, draw(st.integers(0, 3)))
    cuts = draw(st.lists(st.tuples(st.integers(0, 150), st.integers(30, 120)), min_size=1, max_size=6))
    chunks = [base[start : start + n] for start, n in cuts]
    chunks += [(*base[:40], *some_ids(50, n), *base[:40]) for n in range(draw(st.integers(0, 3)))]
    chunks = list(dict.fromkeys(chunks))
    edge, piece = st.integers(0, EDGE + 2), st.sampled_from([*chunks, base])
    copies = draw(st.lists(st.builds(Copy, piece, edge, edge), max_size=5))
    gaps = draw(st.lists(st.integers(WINDOW // 2, 60), min_size=5, max_size=5))
    parts = [(*copy.text, *some_ids(n, n)) for copy, n in zip(copies, gaps, strict=False)]
    return tuple(i for part in parts for i in part), chunks


@given(texts())
def test_the_cover_has_as_many_tokens_in_as_few_runs_as_a_naive_matchers(
    case: tuple[TokenIds, list[TokenIds]],
) -> None:
    ids, chunks = case
    found, runs = cover(ids, chunks), naive_runs(ids, chunks)
    check_cover(found, ids, chunks)
    wholes = {(run.donor, run.span.start - run.offset, run.n_after) for run in runs}
    assert {(run.donor, run.span.start - run.offset, run.n_after) for run in found.runs} <= wholes
    tokens = sum(len(run.span) for run in found.runs)
    assert (tokens, -len(found.runs)) == most_tokens(runs, len(ids), MIN_SPAN)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=12))
def test_the_best_cover_is_the_best_of_all(spans: list[tuple[int, int]]) -> None:
    runs = {Run(Span(start, start + n), bytes([n]), 0, 0) for start, n in spans}
    chosen = best_cover(runs, least=3)
    assert all(a.span.stop <= b.span.start for a, b in pairwise(chosen))
    assert (sum(len(run.span) for run in chosen), -len(chosen)) == most_tokens(runs, 60, least=3)


@pytest.mark.parametrize("at", range(0, 200, 13))
def test_a_chunk_is_found_at_any_offset_and_as_often_as_it_stands_there(at: int) -> None:
    ids = (*some_ids(at, 9), *A, *A, *B, *some_ids(at % 7, 8), *A)
    starts = [at, at + 64, at + 128, at + 198 + at % 7]
    assert [run.span.start for run in cover(ids, CHUNKS).runs] == starts


def test_a_chunk_that_begins_with_another_ones_end_starts_behind_it() -> None:
    first = some_ids(100, 30)
    second = (*first[-20:], *some_ids(80, 31))
    ids = (*some_ids(9, 9), *first, *second[20:], *some_ids(9, 8))
    found = cover(ids, [first, second])
    check_cover(found, ids, [first, second])
    assert [(run.span.start, run.span.stop, run.offset) for run in found.runs] == [
        (9, 109, 0),
        (109, 189, 20),
    ]


HEADER = some_ids(90, 20)
REPEATS: dict[str, tuple[list[TokenIds], TokenIds]] = {
    "one token": ([(7,) * 300], (7,) * 5000),
    "a period of three": ([(7, 8, 9) * 100] * 3, (7, 8, 9) * 2000),
    "a header of all chunks": ([(*HEADER, *some_ids(60, n), *HEADER) for n in range(60)], HEADER * 30),
    "an equal middle": ([(*some_ids(90, n), *HEADER, *some_ids(90, n)) for n in range(200)], HEADER * 50),
    "each place's chunk": ([HEADER[n : n + 50] for n in range(41)], HEADER * 30),
    "one text many times": ([(7, *HEADER, n) for n in range(80)], (*other(HEADER), *HEADER) * 20),
}


@pytest.mark.parametrize("name", REPEATS)
def test_text_that_repeats_itself_is_matched_right_in_bounded_work(name: str) -> None:
    chunks, ids = REPEATS[name]
    check_cover(cover(ids, chunks), ids, chunks)


def test_few_chunks_are_read_and_each_places_latest_one_first() -> None:
    """However many have their middle in common with a chunk of the prompt."""
    middles, asked = [some_ids(WINDOW, n) for n in range(20)], list[bytes]()
    chunks = {
        n.to_bytes(2, "big"): (*some_ids(40, n), *middles[n % 20], *some_ids(40, n)) for n in range(500)
    }
    index, latest = SpanIndex(), list(chunks.values())[-20:]
    index.add((key, index.anchors(ids)) for key, ids in chunks.items())

    def read(keys: Sequence[bytes]) -> dict[bytes, TokenIds]:
        asked.extend(keys)
        return {key: chunks[key] for key in keys}

    text = [i for ids in latest for i in ids]
    found = find_chunks(np.asarray(text, np.int64), index, read)
    assert [chunks[run.donor] for run in found.runs] == latest
    assert len(asked) == len(set(asked)) <= len(text) // MIN_SPAN + MOST


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_a_chunk_is_found_however_many_have_a_part_of_it(shared: int) -> None:
    """Boilerplate at the beginning, in the middle or at the end of 250 chunks."""
    boilerplate, chunks = some_ids(60, 999), list[TokenIds]()
    for n in range(250):
        parts = [some_ids(44, 2 * n), some_ids(44, 2 * n + 1)]
        parts.insert(shared, boilerplate)
        chunks.append(tuple(i for part in parts for i in part))
    asked = [3, 100, 7, 249, 180]
    ids = tuple(i for n in asked for i in chunks[n])
    assert [run.donor[0] for run in cover(ids, chunks).runs] == asked
