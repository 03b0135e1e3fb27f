"""Runs of stored text: which are found in a text, and which are reused of missing chunks (near-duplicates).

Values are in test_differential.py, plain prompts in test_plain.py; how the index follows its stores is in
test_plain_stores.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend import donors as donors_module
from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.cost import CostModel
from blendserve.blend.runs import (
    MARGIN,
    MIN_RUN,
    MIN_SPAN,
    ROUNDS,
    SURE,
    WORK,
    RunFinder,
    best_cover,
    choose_runs,
    find_runs,
)
from blendserve.config import BlendConfig, Method
from blendserve.core import Chunk, Prompt, Run, Span, TokenIds, run
from blendserve.fetch import TieredStore
from blendserve.store import MemoryStore
from blendserve.store.spans import MOST, SpanIndex
from tests.support.blending import PREFIX, check_report, some_ids, tiny_blender
from tests.support.links import slow_source
from tests.support.plain import other
from tests.support.stores import ROOMY, FaultyStore

SUFFIX = some_ids(4, 1)
OLD = some_ids(90, 2)
FIRST = some_ids(12, 3)  # a chunk that is stored, so that others are not first
NEW = (*OLD[:40], 96, *OLD[41:])
NEAR = BlendConfig(method="blend", policy="none", correction="none", near=True)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even on a busy machine a first request waits for the index."""
    monkeypatch.setattr(donors_module, "FIRST_WAIT_S", 60.0)


def ask(by: Blender, *chunks: TokenIds, prefix: TokenIds = PREFIX, blend: BlendConfig = NEAR) -> Prefilled:
    prompt = Prompt(prefix, tuple(map(Chunk, chunks)), SUFFIX)
    done = by.run(prompt, blend)
    check_report(done.report, prompt)
    return done


def donors_of(done: Prefilled) -> list[str]:
    """Keys of all that something was read from."""
    return [donor for chunk in done.report.near for donor in chunk["donors"]]


def found_in(ids: TokenIds, *donors: TokenIds) -> list[Run]:
    """All runs of a text that are found, by number of the donor."""
    index = SpanIndex()
    index.add((number(n), index.anchors(donor)) for n, donor in enumerate(donors))
    return find_runs(
        np.asarray(ids, np.int64),
        index,
        lambda keys: {key: donors[int.from_bytes(key, "big")] for key in keys},
    )


def number(n: int) -> bytes:
    return n.to_bytes(4, "big")


def runs(ids: TokenIds, *donors: TokenIds) -> tuple[Run, ...]:
    """What is reused of a chunk."""
    return choose_runs(found_in(ids, *donors), MIN_RUN)


def spans(ids: TokenIds, *donors: TokenIds) -> list[Span]:
    return [run.span for run in runs(ids, *donors)]


def changed(ids: TokenIds, at: Sequence[int]) -> TokenIds:
    """With other tokens there."""
    return tuple(96 - i if n in at else i for n, i in enumerate(ids))


# What is found


def naive_runs(ids: TokenIds, donors: Sequence[TokenIds], least: int) -> set[Run]:
    """Every longest run of at least `least` tokens, by comparing every token with every token."""
    found = set()
    for n, donor in enumerate(donors):
        for i, j in product(range(len(ids)), range(len(donor))):
            if i and j and ids[i - 1] == donor[j - 1]:
                continue  # it begins before
            length = 0
            while i + length < len(ids) and j + length < len(donor) and ids[i + length] == donor[j + length]:
                length += 1
            if length >= least:
                found.add(Run(Span(i, i + length), number(n), j, len(donor) - j - length))
    return found


@st.composite
def texts(draw: st.DrawFn) -> tuple[TokenIds, list[TokenIds]]:
    """A text that is made of pieces of chunks by edits, cuts and joins; some chunks have parts in common."""
    base = some_ids(200, draw(st.integers(0, 3)))
    cuts = draw(st.lists(st.tuples(st.integers(0, 150), st.integers(30, 120)), min_size=1, max_size=5))
    chunks = [base[start : start + n] for start, n in cuts]
    chunks += [(*base[:40], *some_ids(50, n), *base[:40]) for n in range(draw(st.integers(0, 3)))]
    ids = list[int]()
    for _ in range(draw(st.integers(0, 4))):
        piece = draw(st.sampled_from([*chunks, base]))
        start, stop = sorted(draw(st.tuples(*[st.integers(0, len(piece))] * 2)))
        edits = draw(st.lists(st.integers(0, 119), max_size=2))
        ids += [*changed(piece[start:stop], edits), *some_ids(draw(st.integers(0, 30)), 77)]
    return tuple(ids), list(dict.fromkeys(chunks))


@given(texts())
def test_runs_are_equal_and_as_long_as_they_can_be_and_none_of_three_anchors_is_missed(
    case: tuple[TokenIds, list[TokenIds]],
) -> None:
    ids, chunks = case
    found, naive = set(found_in(ids, *chunks)), naive_runs(ids, chunks, MIN_RUN)
    assert found <= naive
    covered = {i for each in found for i in range(each.span.start, each.span.stop)}
    for each in naive:
        if len(each.span) >= MIN_SPAN:
            assert set(range(each.span.start, each.span.stop)) <= covered


@given(texts(), st.sampled_from([MIN_RUN, MIN_SPAN]), st.integers(0, MARGIN))
def test_a_cover_has_no_gap_in_its_tokens_and_leaves_margins(
    case: tuple[TokenIds, list[TokenIds]], least: int, n_merged: int
) -> None:
    ids, chunks = case
    done = 0
    for span, donor, offset, n_after, *_ in choose_runs(found_in(ids, *chunks), least, n_merged=n_merged):
        chunk = chunks[int.from_bytes(donor, "big")]
        assert ids[span.start : span.stop] == chunk[offset : offset + len(span)]
        assert offset + len(span) + n_after == len(chunk)
        assert span.start >= done
        assert len(span) >= least
        is_behind_margin = ids[span.start - MARGIN : span.start] == chunk[max(0, offset - MARGIN) : offset]
        assert offset <= n_merged or span.start == done or is_behind_margin
        done = span.stop


def most_tokens(runs: set[Run], n: int, least: int) -> tuple[int, int]:
    """(tokens, -runs) of the best cover by ends of runs, from each position's best."""
    best = [(0, 0)] * (n + 1)
    for at in range(1, n + 1):
        ends = [run.span for run in runs if run.span.stop == at]
        starts = {s.start for s in ends} | {cut for s in ends for cut in range(s.start, at - least + 1)}
        covers = [(best[cut][0] + at - cut, best[cut][1] - 1) for cut in starts]
        best[at] = max([best[at - 1], *covers])
    return best[n]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=12))
def test_the_best_cover_is_the_best_of_all(spans: list[tuple[int, int]]) -> None:
    runs = {Run(Span(start, start + n), bytes([n]), 0, 0) for start, n in spans}
    chosen = best_cover(runs, least=3)
    assert all(a.span.stop <= b.span.start for a, b in pairwise(chosen))
    assert (sum(len(run.span) for run in chosen), -len(chosen)) == most_tokens(runs, 60, least=3)


def test_tokens_around_an_edit_are_reused_but_for_a_margin_from_several_donors() -> None:
    assert spans(NEW, OLD) == [Span(0, 40), Span(41 + MARGIN, 90)]
    cut = (*OLD[60:], *OLD[:30])  # its first half follows other text than in OLD; the second half starts OLD
    assert spans(cut, OLD) == [Span(MARGIN, 30), Span(30, 60)]
    other = some_ids(50, 9)
    assert spans((*OLD[:30], *other[10:]), OLD, other) == [Span(0, 30), Span(30 + MARGIN, 70)]


@given(st.lists(st.integers(0, 89), max_size=8), st.integers(0, 40))
def test_only_equal_tokens_behind_equal_tokens_are_reused(edits: list[int], moved: int) -> None:
    new = changed((*some_ids(moved, 5), *OLD), [moved + n for n in edits])
    differ = {n for n, (a, b) in enumerate(zip(new[moved:], OLD, strict=True), moved) if a != b}
    for span, _, at, *_ in runs(new, OLD):
        start = 0 if at < MARGIN and new[span.start - at : span.start] == OLD[:at] else MARGIN
        run = slice(span.start - start, span.stop)
        assert new[run] == OLD[at - start : at + len(span)]
        assert len(span) >= MIN_RUN
        assert not differ & set(range(run.start, run.stop)) or at - start != run.start - moved


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 1000))
def test_a_run_of_so_many_tokens_is_found_for_certain(before: int, after: int, seed: int) -> None:
    run = some_ids(SURE, seed)
    a = (*some_ids(before, 7), *run, *some_ids(after, 8))
    b = (*some_ids(after, 11), *run, *some_ids(before, 12))
    first = MARGIN if after else 0
    assert any(span.start <= before + first and span.stop >= before + SURE for span in spans(a, b))


def test_a_chunk_that_begins_with_another_ones_end_starts_behind_it() -> None:
    first = some_ids(100, 30)
    second = (*first[-20:], *some_ids(80, 31))
    found = runs((*some_ids(9, 9), *first, *second[20:], *some_ids(9, 8)), first, second)
    assert [(run.span, run.offset) for run in found] == [(Span(9, 109), 0), (Span(109, 189), 20)]


def test_of_chunks_that_begin_alike_the_latest_one_is_found() -> None:
    """It has all that any of them has."""
    header, n = some_ids(100, 50), 10_000
    (first, *_) = runs((*header, *some_ids(40, n)), *((*header, *some_ids(20, i)) for i in range(n)))
    assert (first.span, first.donor) == (Span(0, 100), number(n - 1))


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
def test_text_that_repeats_itself_is_found_right_from_few_chunks(name: str) -> None:
    chunks, ids = REPEATS[name]
    asked = list[bytes]()
    index = SpanIndex()
    index.add((number(n), index.anchors(chunk)) for n, chunk in enumerate(chunks))

    def read(keys: Iterable[bytes]) -> dict[bytes, TokenIds]:
        asked.extend(keys)
        return {key: chunks[int.from_bytes(key, "big")] for key in keys}

    found = find_runs(np.asarray(ids, np.int64), index, read)
    assert len(asked) == len(set(asked)) <= ROUNDS * (len(ids) // MIN_SPAN + MOST)
    assert sum(map(run_length, found)) <= WORK * len(ids)
    for span, donor, offset, *_ in found:
        assert (
            ids[span.start : span.stop] == chunks[int.from_bytes(donor, "big")][offset : offset + len(span)]
        )
    for a, b in pairwise(choose_runs(found, MIN_SPAN)):
        assert a.span.stop <= b.span.start


def run_length(run: Run) -> int:
    return len(run.span)


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_a_chunk_is_found_however_many_have_a_part_of_it(shared: int) -> None:
    """Boilerplate at the beginning, in the middle or at the end of 250 chunks."""
    boilerplate, chunks = some_ids(60, 999), list[TokenIds]()
    for n in range(250):
        parts = [some_ids(44, 2 * n), some_ids(44, 2 * n + 1)]
        parts.insert(shared, boilerplate)
        chunks.append(tuple(i for part in parts for i in part))
    asked = [3, 100, 7, 249, 180]
    found = runs(tuple(i for n in asked for i in chunks[n]), *chunks)
    assert [run.donor for run in found] == [number(n) for n in asked]
    assert sum(map(run_length, found)) == 5 * 148


# What is reused of chunks that are not stored


def test_donors_are_of_the_same_reader_prefix_and_namespace() -> None:
    store = MemoryStore(ROOMY)
    of = {
        (model, prefix, name): tiny_blender(store, fingerprint=model, prefix=prefix, namespace=name)
        for model, prefix, name in product("ab", (PREFIX, SUFFIX), ("", "other"))
    }
    mine, *_ = of.values()
    mine.writer.precompute([OLD])
    for (_, prefix, _), by in of.items():
        by.finder.refresh()
        donors = donors_of(ask(by, FIRST, NEW, prefix=prefix))
        assert donors == ([mine.key(OLD).hex()] if by is mine else [])


def test_prefix_caching_moves_no_text_of_a_donor() -> None:
    by = tiny_blender(None, OLD)
    assert donors_of(ask(by, NEW))
    done, full = (ask(by, NEW, blend=NEAR.model_copy(update={"method": m})) for m in ("prefix", "full"))
    assert (done.report.tokens_reused, done.report.near) == (0, [])
    torch.testing.assert_close(done.result.logits, full.result.logits)


def test_a_donor_that_is_damaged_or_deleted_is_a_miss_until_it_is_stored_again() -> None:
    store = FaultyStore(MemoryStore(ROOMY))
    by = tiny_blender(store, FIRST, OLD)
    without = ask(by, FIRST, NEW, blend=NEAR.model_copy(update={"near": False}))
    store.damaged.add(by.key(OLD))
    done = ask(by, FIRST, NEW)
    assert torch.equal(done.result.logits, without.result.logits)
    assert done.report.tokens_computed == len(NEW)
    (damaged,) = done.report.near
    store.delete([by.key(OLD)])
    (deleted,) = ask(by, FIRST, NEW).report.near
    assert damaged["donors"] == deleted["donors"] == []
    assert damaged["reason"] != deleted["reason"]
    by.writer.precompute([OLD])
    assert donors_of(ask(by, FIRST, NEW))


def test_thirty_edits_of_a_chunk_read_their_donor_once_and_are_hits_once_stored() -> None:
    by, chunks = tiny_blender(None, FIRST, OLD), [changed(OLD, [2 * n + 10]) for n in range(30)]
    done = ask(by, FIRST, *chunks)
    assert set(donors_of(done)) == {by.key(OLD).hex()}
    assert len(done.report.near) == 30
    n_read = len(FIRST) + len(OLD)
    assert done.report.bytes_loaded == by.model.kv_bytes_per_token * n_read
    assert run(by.writer.write_back(done.missing)) == 30
    again = ask(by, FIRST, *chunks).report
    assert (again.chunks_hit, again.near) == (31, [])
    (near,) = ask(by, FIRST, (*chunks[7][:70], 95, *chunks[7][71:])).report.near
    assert near["donors"] == [by.key(chunks[7]).hex()]  # the newest revision is the donor of the next one


def test_text_that_repeats_itself_is_reused_once_and_empty_chunks_have_no_donor() -> None:
    long, short = (7,) * 2000, (7,) * 200
    assert spans(long, long[:-1]) == [Span(0, 1999)]
    assert spans(short, short[:-1]) == [Span(0, 199)]
    done = ask(tiny_blender(None, FIRST, OLD, (7,) * 300), FIRST, (), NEW, (7,) * 301)
    assert [chunk["chunk"] for chunk in done.report.near] == [2, 3]
    assert done.result.logits.isfinite().all()


@pytest.mark.parametrize(("seconds", "method", "n"), [(0.1, "auto", 1), (9.0, "auto", 0), (9.0, "blend", 1)])
def test_auto_leaves_donors_whose_fetching_takes_longer_than_computing(
    seconds: float, method: Method, n: int
) -> None:
    store = MemoryStore(ROOMY)
    tiny_blender(store, OLD)
    source = slow_source(store, seconds)
    by = tiny_blender(TieredStore(MemoryStore(0), source), costs=CostModel(1e-6, 1.0, 0.0, 1e-6))
    by.finder = RunFinder(store, by.key)
    by.finder.refresh()
    done = ask(by, NEW, blend=NEAR.model_copy(update={"method": method}))
    assert len(donors_of(done)) == n
