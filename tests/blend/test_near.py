"""Chunks that are nearly there: what is reused of them, and what is not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.blend.blender import Blended, Blender
from blendserve.blend.near import LEAST, MARGIN, matches
from blendserve.config import BlendConfig
from blendserve.core import Chunk, NearChunk, Prompt, Span, TokenIds
from blendserve.store import KVStore, LMDBStore, MemoryStore
from blendserve.store import near as near_index
from blendserve.store.codecs.base import forget_ready
from blendserve.store.codecs.int8 import Int8
from blendserve.store.near import SURE, NearIndex, fingerprints
from tests.store.helpers import flip, tamper
from tests.store.toy_codec import Toy
from tests.support.blending import distance, model_kv, some_ids
from tests.support.models import tiny_adapter

GIB = 1 << 30
PREFIX, SUFFIX = some_ids(5), some_ids(4, 1)
OLD = some_ids(90, 2)
FIRST = some_ids(12, 3)  # a chunk that is stored, so that others are not first
NEW = (*OLD[:40], 96, *OLD[41:])
RUNS = [Span(0, 40), Span(41 + MARGIN, 90)]  # of NEW that OLD has
NEAR = BlendConfig(method="blend", policy="none", correction="none", near=True)


def changed_blend(**options: bool) -> BlendConfig:
    return NEAR.model_copy(update=options)


def blender(store: KVStore, prefix: TokenIds = PREFIX, namespace: str = "") -> Blender:
    return Blender(tiny_adapter("llama"), "fingerprint", store, prefix, prefix, namespace)


def knowing(*chunks: TokenIds, store: KVStore | None = None) -> Blender:
    """Has stored these."""
    made = blender(store or MemoryStore(GIB))
    made.precompute(chunks)
    return made


def ask(by: Blender, *chunks: TokenIds, prefix: TokenIds = PREFIX, blend: BlendConfig = NEAR) -> Blended:
    return by.run(Prompt(prefix, tuple(map(Chunk, chunks)), SUFFIX), blend)


def donors_of(done: Blended) -> list[str]:
    """Keys of all that something was read from."""
    return [donor for chunk in done.report.near for donor in chunk.donors]


def reused(done: Blended) -> int:
    return done.report.tokens_reused


def spans(ids: TokenIds, *donors: TokenIds) -> list[Span]:
    """Of `ids`, what is reused of these donors."""
    left, found = [Span(0, len(ids))], []
    for donor in donors:
        some, left = matches(ids, donor, left)
        for span, at in some:
            assert ids[span.start : span.stop] == donor[at : at + len(span)]
        found += [span for span, _ in some]
    return sorted(found, key=lambda span: span.start)


def changed(ids: TokenIds, at: Sequence[int]) -> TokenIds:
    """With other tokens there."""
    return tuple(96 - i if n in at else i for n, i in enumerate(ids))


def test_what_stands_around_an_edit_is_reused_but_for_a_margin() -> None:
    assert spans(NEW, OLD) == RUNS


def test_a_piece_of_a_donor_is_found_anywhere_and_several_donors_fill_a_chunk() -> None:
    cut = (*OLD[60:], *OLD[:30])  # its first half has read OLD's beginning; the second half starts the donor
    assert spans(cut, OLD) == [Span(MARGIN, 30), Span(30, 60)]
    other = some_ids(50, 9)
    assert spans((*OLD[:30], *other[10:]), OLD, other) == [Span(0, 30), Span(30 + MARGIN, 70)]


@given(st.lists(st.integers(0, 89), max_size=8), st.integers(0, 40))
def test_only_equal_tokens_behind_equal_tokens_are_reused(edits: list[int], moved: int) -> None:
    new = changed((*some_ids(moved, 5), *OLD), [moved + n for n in edits])
    differ = {n for n, (a, b) in enumerate(zip(new[moved:], OLD, strict=True), moved) if a != b}
    assert differ <= {moved + n for n in edits}
    for span, at in matches(new, OLD, [Span(0, len(new))])[0]:
        start = 0 if at < MARGIN and new[span.start - at : span.start] == OLD[:at] else MARGIN
        run = slice(span.start - start, span.stop)
        assert new[run] == OLD[at - start : at + len(span)]
        assert len(span) >= LEAST
        assert not differ & set(range(run.start, run.stop)) or at - start != run.start - moved


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 1000))
def test_chunks_with_a_run_in_common_share_a_fingerprint(before: int, after: int, seed: int) -> None:
    run = some_ids(SURE, seed)
    a = (*some_ids(before, 7), *run, *some_ids(after, 8))
    b = (*some_ids(after, 11), *run, *some_ids(before, 12))
    assert set(fingerprints(a).tolist()) & set(fingerprints(b).tolist())


def test_unrelated_chunks_share_none_and_have_no_donors() -> None:
    index = NearIndex()
    index.add((bytes([n]), fingerprints(some_ids(100, n))) for n in range(200))
    assert all(index.find(fingerprints(some_ids(100, 1000 + n)), 4) == [] for n in range(200))
    assert all(index.find(fingerprints(some_ids(100, n)), 4) == [bytes([n])] for n in range(200))


def test_an_index_that_grew_and_shrank_finds_what_a_new_one_finds() -> None:
    texts = {bytes([n]): fingerprints((*some_ids(40, n % 5), *some_ids(40, n))) for n in range(60)}
    grown = NearIndex()
    for item in texts.items():
        grown.add([item])
    gone = [bytes([n]) for n in range(0, 60, 3)]
    grown.discard(gone)
    new = NearIndex()
    new.add((key, marks) for key, marks in texts.items() if key not in gone)
    assert grown.keys == new.keys
    for marks in texts.values():
        assert grown.find(marks, 4) == new.find(marks, 4)


def test_an_edited_chunk_starts_from_the_old_one() -> None:
    done = ask(knowing(FIRST, OLD), FIRST, NEW)
    assert reused(done) == sum(map(len, RUNS))
    assert done.report.tokens_computed == 1 + MARGIN
    (near,) = done.report.near
    assert near == replace(near, chunk=1, tokens_stored=81, tokens_fresh=9)
    assert len(near.donors) == 1
    part = done.explanation.parts[2]
    assert (part.tier, part.passage) == ("near", 1)
    assert part.reason == near.reason.capitalize() + "."
    assert done.report.to_dict()["near"][0]["reason"] == near.reason
    assert (done.report.chunks_hit, done.report.chunks_missing) == (1, 1)


def test_reused_tokens_have_the_donors_own_kv_and_fresh_ones_do_not() -> None:
    done = ask(knowing(FIRST, OLD), FIRST, NEW)
    alone = ask(knowing(FIRST, OLD), FIRST, OLD)  # the donor as an exact hit in the same place
    at = len(PREFIX) + len(FIRST)
    for mine, theirs in ((c.prefilled.cache, o.prefilled.cache) for c, o in [(done, alone)]):
        for x, y in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            for run in RUNS:
                here = slice(at + run.start, at + run.stop)
                assert torch.equal(x[:, :, here], y[:, :, here])
            assert distance(x[1:, :, at + 40], y[1:, :, at + 40]) > 1e-3


def test_the_run_that_starts_the_first_chunk_is_exact() -> None:
    done = ask(knowing(OLD), NEW)
    assert done.report.tokens_first == 40
    keys, values = model_kv(tiny_adapter("llama"), (*PREFIX, *NEW))
    cache, here = done.prefilled.cache, slice(0, len(PREFIX) + 40)
    assert distance(cache.keys[:, :, here], keys[:, :, here]) < 1e-4
    assert distance(cache.values[:, :, here], values[:, :, here]) < 1e-4


def test_all_recomputed_equals_full_prefill() -> None:
    by = knowing(FIRST, OLD)
    whole = ask(by, FIRST, NEW, blend=BlendConfig(method="blend", policy="all", correction="none", near=True))
    full = ask(by, FIRST, NEW, blend=BlendConfig(method="full"))
    assert distance(whole.prefilled.logits, full.prefilled.logits) < 1e-4


@pytest.mark.parametrize("policy", ["query", "deviation", "chunk_head", "random"])
def test_every_policy_and_correction_takes_runs(policy: str) -> None:
    for correction in ("none", "shift", "ridge", "prior"):
        blend = BlendConfig(method="blend", policy=policy, correction=correction, ratio=0.2, near=True)
        done = ask(knowing(FIRST, OLD), FIRST, NEW, blend=blend)
        assert done.report.tokens_recomputed
        assert done.report.near
        assert done.prefilled.logits.isfinite().all()


def test_what_is_not_asked_for_is_not_done() -> None:
    by = knowing(FIRST, OLD)
    for blend in (NEAR.model_copy(update={"near": False}), BlendConfig(method="prefix", near=True)):
        assert not donors_of(ask(by, FIRST, NEW, blend=blend))


def test_donors_are_of_the_same_namespace_and_prefix() -> None:
    store = MemoryStore(GIB)
    knowing(FIRST, OLD, store=store)
    assert donors_of(ask(blender(store), FIRST, NEW))
    assert not donors_of(ask(blender(store, namespace="other"), FIRST, NEW))
    longer = (*PREFIX, 7)
    assert not donors_of(ask(blender(store, prefix=longer), FIRST, NEW, prefix=longer))
    other = Blender(tiny_adapter("llama"), "another reader", store, PREFIX, PREFIX)
    assert not donors_of(ask(other, FIRST, NEW))


def test_a_donor_that_has_gone_is_a_miss_and_forgotten() -> None:
    by = knowing(FIRST, OLD)
    assert donors_of(ask(by, FIRST, NEW))
    by.store.delete(by.key(OLD))
    assert not donors_of(ask(by, FIRST, NEW))
    by.precompute([OLD])
    assert donors_of(ask(by, FIRST, NEW))


def test_a_donor_that_goes_between_looking_and_reading_is_a_miss() -> None:
    by = knowing(FIRST, OLD)
    assert donors_of(ask(by, FIRST, NEW))
    assert by.donors.find({3: NEW}, lambda donors: {}) == {3: ((), (by.key(OLD),))}


def test_a_damaged_donor_is_a_miss_and_said() -> None:
    store = MemoryStore(GIB, codec=Int8())
    by = knowing(FIRST, OLD, store=store)
    kept = store._chunks[by.key(OLD)]
    kept.segments[1] = bytes(len(kept.segments[1]))  # type: ignore[union-attr]
    done, without = ask(by, FIRST, NEW), ask(by, FIRST, NEW, blend=changed_blend(near=False))
    assert not donors_of(done)
    assert done.report.tokens_computed == len(NEW)
    assert torch.equal(done.prefilled.logits, without.prefilled.logits)
    (chunk,) = done.report.near
    assert "it is damaged (" in chunk.reason
    assert done.explanation.parts[2].reason.endswith(chunk.reason[1:] + ".")
    full = ask(by, FIRST, NEW, blend=BlendConfig(method="blend", policy="all", near=True))
    assert full.report.chunks_missing == 1


def test_a_donor_with_a_damaged_header_is_none(tmp_path: Path) -> None:
    with LMDBStore(tmp_path / "kv", GIB) as store:
        key = knowing(FIRST, OLD, store=store).key(OLD)
    tamper(tmp_path / "kv", flip(b"h" + key, 20))
    with LMDBStore(tmp_path / "kv", GIB) as store:
        done, without = (
            ask(blender(store), FIRST, NEW, blend=changed_blend(near=near)) for near in (True, False)
        )
        assert not donors_of(done)
        assert torch.equal(done.prefilled.logits, without.prefilled.logits)


def test_one_chunk_over_and_over_with_a_token_changed_each_time_reads_its_donor_once() -> None:
    by, chunks = knowing(FIRST, OLD), [changed(OLD, [2 * n + 10]) for n in range(30)]
    done = ask(by, FIRST, *chunks)
    assert set(donors_of(done)) == {by.key(OLD).hex()}
    assert len(done.report.near) == 30
    assert done.report.bytes_loaded == sum(
        by.adapter.kv_bytes_per_token * n for n in (len(PREFIX), len(FIRST), len(OLD))
    )
    assert by.remember(done.absent) == 30
    again = ask(by, FIRST, *chunks).report
    assert (again.chunks_hit, again.near) == (31, ())


def test_text_that_repeats_itself_is_given_up_and_an_empty_chunk_is_none() -> None:
    long, short = (7,) * 2000, (7,) * 200
    assert matches(long, long[:-1], [Span(0, 2000)]) == ([], [Span(0, 2000)])
    assert spans(short, short[:-1]) == [Span(0, 199)]
    done = ask(knowing(FIRST, OLD, (7,) * 300), FIRST, (), NEW, (7,) * 301)
    assert [chunk.chunk for chunk in done.report.near] == [2, 3]
    assert done.prefilled.logits.isfinite().all()


def test_boilerplate_in_every_chunk_has_a_bounded_number_of_donors(monkeypatch: pytest.MonkeyPatch) -> None:
    header, store = some_ids(100, 50), MemoryStore(GIB)
    by = knowing(*((*header, *some_ids(40, n)) for n in range(100, 110)), store=store)
    by.donors.refresh()
    marks, own = fingerprints(header), np.arange(10_000, dtype=np.uint64)
    by.donors.index.add((bytes([1, n // 256, n % 256]), np.unique((*marks, own[n]))) for n in range(10_000))
    asked: list[list[bytes]] = []

    def ids(keys: Iterable[bytes]) -> Iterator[tuple[bytes, TokenIds]]:
        asked.append(list(keys))
        return iter(())

    monkeypatch.setattr(store, "ids", ids)
    new = (*header, *some_ids(40, 200))
    assert by.donors.find({0: new, 1: new}, lambda donors: {}) == {0: ((), ()), 1: ((), ())}
    assert [len(keys) for keys in asked] == [1]  # the latest has all that any has


def test_what_has_gone_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_index, "SPARE", 3)
    index, texts = NearIndex(), {bytes([n]): fingerprints(some_ids(80, n)) for n in range(60)}
    for n, item in enumerate(texts.items()):
        index.add([item])
        index.discard([bytes([n - 4])] if n >= 4 else [])
    new = NearIndex()
    new.add(list(texts.items())[-4:])
    assert index.keys == new.keys
    assert index.n_bytes < 5 * new.n_bytes
    assert [index.find(marks, 4) for marks in texts.values()] == [
        new.find(marks, 4) for marks in texts.values()
    ]


WHOSE = [(reader, prefix, name) for reader in "ab" for prefix in (PREFIX, SUFFIX) for name in ("", "other")]


@settings(max_examples=25)
@given(st.sets(st.sampled_from(WHOSE)), st.sampled_from(WHOSE))
def test_donors_are_ones_own_whoever_else_stored_the_same(
    stored: set[tuple[str, TokenIds, str]], asking: tuple[str, TokenIds, str]
) -> None:
    store = MemoryStore(GIB)
    of = {
        (reader, prefix, name): Blender(tiny_adapter("llama"), reader, store, prefix, prefix, name)
        for reader, prefix, name in WHOSE
    }
    for whose in stored:
        of[whose].precompute([OLD])
    mine = [of[asking].key(OLD).hex()] if asking in stored else []
    assert donors_of(ask(of[asking], FIRST, NEW, prefix=asking[1])) == mine
    of[asking].remember([NEW])
    for whose, by in of.items():  # what is stored for one is nobody else's donor, either
        theirs = {by.key(ids).hex() for ids in (OLD, NEW)}
        assert set(donors_of(ask(by, FIRST, (*NEW, 3), prefix=whose[1]))) <= theirs


def test_a_donor_by_tables_that_are_not_here_is_a_miss_and_said(
    toy_codec: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    by = knowing(FIRST, OLD, store=MemoryStore(GIB, codec=Toy()))
    assert donors_of(ask(by, FIRST, NEW))
    forget_ready()
    monkeypatch.setattr(Toy, "tables_here", {})
    done = ask(by, FIRST, NEW)
    assert not donors_of(done)
    assert "tables" in done.report.near[1].reason


def test_written_back_it_is_a_hit() -> None:
    by = knowing(FIRST, OLD)
    done = ask(by, FIRST, NEW)
    assert done.absent == (NEW,)
    by.remember(done.absent)
    again = ask(by, FIRST, NEW).report
    assert (again.chunks_hit, again.near) == (2, ())
    newer = (*NEW[:70], 95, *NEW[71:])  # and the newest revision is the donor of the next one
    (near,) = ask(by, FIRST, newer).report.near
    assert near.donors == (by.key(NEW).hex(),)


def test_an_index_made_of_a_file_is_the_one_that_was_kept(tmp_path: object) -> None:
    with LMDBStore(str(tmp_path), GIB, codec=Int8()) as store:
        by = knowing(FIRST, store=store)
        ask(by, FIRST, NEW)  # the index is kept from now on
        by.precompute([OLD])
        by.remember([some_ids(80, 20)])
        assert by.donors.index.keys == {by.key(x) for x in (FIRST, OLD, some_ids(80, 20))}
        kept = ask(by, FIRST, NEW).report.near
    with LMDBStore(str(tmp_path), GIB) as store:
        made = blender(store)
        assert ask(made, FIRST, NEW).report.near == kept != ()
        assert made.donors.index.keys == by.donors.index.keys


def test_the_gate_counts_what_is_nearly_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from blendserve.blend.cost import CostModel

    by = knowing(FIRST, OLD)
    by._costs = CostModel(1e-6, 1.0, 0.0, 1e-6)  # rows cost all
    auto = BlendConfig(method="auto", ratio=0.1, near=True)
    assert ask(by, FIRST, NEW, blend=auto).report.method == "blend"
    by._costs = CostModel(1.0, 1e-6, 0.0, 1.0)  # and here passes and loading do
    assert ask(by, FIRST, NEW, blend=auto).report.method != "blend"


def test_a_report_of_nothing_near_says_nothing() -> None:
    assert ask(knowing(FIRST, OLD), FIRST, OLD).report.near == ()
    assert NearChunk(0, (), 0, 0, "").donors == ()
