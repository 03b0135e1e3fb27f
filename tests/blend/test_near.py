"""Near-duplicates: which text of stored chunks is reused; values are in test_differential.py.

How the index of chunks follows its stores is in test_plain_stores.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend import donors as donors_module
from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.cost import CostModel
from blendserve.blend.near import (
    CONTEXT_MARGIN,
    MIN_RUN,
    STRIDE,
    SURE,
    NearDuplicates,
    best_donors,
    choose_runs,
    equal_runs,
)
from blendserve.config import BlendConfig, Method
from blendserve.core import Chunk, Prompt, Run, Span, TokenIds, run
from blendserve.fetch import TieredStore
from blendserve.store import MemoryStore
from blendserve.store.spans import SpanIndex
from tests.support.blending import PREFIX, check_report, some_ids, tiny_blender
from tests.support.links import slow_source
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


def runs(ids: TokenIds, *donors: TokenIds) -> list[Run]:
    """Of `ids`, what is reused of these donors."""
    index, text = SpanIndex(STRIDE, STRIDE), np.asarray(ids)
    index.add((bytes([n]), index.anchors(donor)) for n, donor in enumerate(donors))
    hits, tokens = index.find(text), {bytes([n]): donor for n, donor in enumerate(donors)}
    return list(choose_runs(equal_runs(text, hits, {key: tokens[key] for key in best_donors(hits)}, index)))


def spans(ids: TokenIds, *donors: TokenIds) -> list[Span]:
    return [run.span for run in runs(ids, *donors)]


def changed(ids: TokenIds, at: Sequence[int]) -> TokenIds:
    """With other tokens there."""
    return tuple(96 - i if n in at else i for n, i in enumerate(ids))


def test_tokens_around_an_edit_are_reused_but_for_a_margin_from_several_donors() -> None:
    assert spans(NEW, OLD) == [Span(0, 40), Span(41 + CONTEXT_MARGIN, 90)]
    cut = (*OLD[60:], *OLD[:30])  # its first half follows other text than in OLD; the second half starts OLD
    assert spans(cut, OLD) == [Span(CONTEXT_MARGIN, 30), Span(30, 60)]
    other = some_ids(50, 9)
    assert spans((*OLD[:30], *other[10:]), OLD, other) == [Span(0, 30), Span(30 + CONTEXT_MARGIN, 70)]


@given(st.lists(st.integers(0, 89), max_size=8), st.integers(0, 40))
def test_only_equal_tokens_behind_equal_tokens_are_reused(edits: list[int], moved: int) -> None:
    new = changed((*some_ids(moved, 5), *OLD), [moved + n for n in edits])
    differ = {n for n, (a, b) in enumerate(zip(new[moved:], OLD, strict=True), moved) if a != b}
    for span, _, at, *_ in runs(new, OLD):
        start = 0 if at < CONTEXT_MARGIN and new[span.start - at : span.start] == OLD[:at] else CONTEXT_MARGIN
        run = slice(span.start - start, span.stop)
        assert new[run] == OLD[at - start : at + len(span)]
        assert len(span) >= MIN_RUN
        assert not differ & set(range(run.start, run.stop)) or at - start != run.start - moved


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 1000))
def test_a_run_of_so_many_tokens_is_found_for_certain(before: int, after: int, seed: int) -> None:
    run = some_ids(SURE, seed)
    a = (*some_ids(before, 7), *run, *some_ids(after, 8))
    b = (*some_ids(after, 11), *run, *some_ids(before, 12))
    first = CONTEXT_MARGIN if after else 0
    assert any(span.start <= before + first and span.stop >= before + SURE for span in spans(a, b))


def test_of_chunks_that_begin_alike_the_latest_is_found() -> None:
    """It has all that any of them has."""
    header, keys = some_ids(100, 50), [bytes([n // 256, n % 256]) for n in range(10_000)]
    index = SpanIndex(STRIDE, STRIDE)
    index.add((key, index.anchors((*header, *some_ids(20, n)))) for n, key in enumerate(keys))
    assert best_donors(index.find(np.asarray((*header, *some_ids(40, 20_000))))) == keys[-1:]


def test_donors_are_of_the_same_reader_prefix_and_namespace() -> None:
    store = MemoryStore(ROOMY)
    of = {
        (model, prefix, name): tiny_blender(store, fingerprint=model, prefix=prefix, namespace=name)
        for model, prefix, name in product("ab", (PREFIX, SUFFIX), ("", "other"))
    }
    mine, *_ = of.values()
    mine.writer.precompute([OLD])
    for (_, prefix, _), by in of.items():
        by.near.refresh()
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
    by.near = NearDuplicates(store, by.key)
    by.near.refresh()
    done = ask(by, NEW, blend=NEAR.model_copy(update={"method": method}))
    assert len(donors_of(done)) == n
