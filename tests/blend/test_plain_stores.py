"""Plain prompts over stores of other processes and machines, of which some fail or are slow."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from blendserve.blend import donors as donors_module
from blendserve.blend.cost import CostModel
from blendserve.blend.runs import RunFinder
from blendserve.config import Method
from blendserve.core import run
from blendserve.fetch import KVFetcher, TieredStore
from blendserve.fetch.tiered import REST_S
from blendserve.store import LMDBStore, MemoryStore, read_record
from blendserve.store.codecs.int8 import Int8
from tests.support.blending import assert_near, missing, model_logits, tiny_blender
from tests.support.links import ScriptedSource, slow_source
from tests.support.plain import BLEND, END, TEXT, A, B, C, D, ask, donors_of, plain
from tests.support.stores import ROOMY, FaultyStore
from tests.support.waiting import ManualClock, eventually


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even on a busy machine a first request waits for the index."""
    monkeypatch.setattr(donors_module, "FIRST_WAIT_S", 60.0)


def test_an_index_made_from_a_store_is_the_one_that_was_updated(tmp_path: Path) -> None:
    prompt = plain(TEXT, A, TEXT, C, B, END)
    with LMDBStore(tmp_path, ROOMY) as store:
        by = tiny_blender(store, A, codec=Int8())
        ask(by, prompt)  # the index is updated from now on
        by.writer.precompute([B])
        run(by.writer.write_back(missing(C)))
        assert by.finder.index.keys == {by.key(ids) for ids in (A, B, C)}
        kept = ask(by, prompt).report.spans
        assert len(kept) == 3
    with LMDBStore(tmp_path, ROOMY) as store:
        made = tiny_blender(store)
        assert ask(made, prompt).report.spans == kept
        assert made.finder.index.keys == by.finder.index.keys


class Unlisted(FaultyStore):
    """Lists its keys when a test says so."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.listed = threading.Event()

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        assert name != "keys" or self.listed.wait(60)
        return super().call(name, *args, **options)


def test_a_prompt_does_not_wait_for_the_index_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donors_module, "FIRST_WAIT_S", 0.0)
    store = Unlisted(MemoryStore(ROOMY))
    by, prompt = tiny_blender(store, A), plain(TEXT, A, END)
    early = ask(by, prompt)
    assert early.report.spans == []
    assert_near(early.result.logits, model_logits(by.model, prompt))
    store.listed.set()
    eventually(lambda: by.finder.is_built)
    assert len(ask(by, prompt).report.spans) == 1
    by.writer.delete([A])
    assert ask(by, prompt).report.reason not in ("", early.report.reason)


def test_a_store_that_did_not_answer_is_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donors_module, "RETRY_S", 0.0)
    store, prompt = FaultyStore(MemoryStore(ROOMY)), plain(TEXT, A, END)
    tiny_blender(store, A)
    by, store.down = tiny_blender(store), True
    down = ask(by, prompt)
    assert (down.report.spans, by.finder.is_built) == ([], False)
    store.down = False
    eventually(lambda: ask(by, prompt).report.spans)
    by.writer.delete([A])
    assert ask(by, prompt).report.reason not in ("", down.report.reason)


def test_chunks_of_a_queued_prompt_are_prefetched() -> None:
    store = MemoryStore(ROOMY)
    tiny_blender(store, B)
    source = ScriptedSource(
        {key: {"raw": record} for key in [*store.keys()] if (record := read_record(store, key))}
    )
    fetcher = KVFetcher(TieredStore(MemoryStore(ROOMY), source), prefetch_bytes=ROOMY)
    by = tiny_blender(fetcher.store, fetcher=fetcher)
    by.finder = RunFinder(store, by.key)
    matched = by.match(plain(TEXT, B, END), BLEND)
    hold = by.prefetch(matched, BLEND)()
    eventually(lambda: source.came)
    assert set(source.came) == {by.key(B)}
    assert len(by.run(matched, BLEND).report.spans) == 1
    hold.close()
    assert source.asked[by.key(B)] == 1


def test_chunks_come_from_both_stores_and_survive_the_loss_of_one() -> None:
    clock, near, far = ManualClock(), MemoryStore(ROOMY), MemoryStore(ROOMY)
    remote, prompt = FaultyStore(far, clock), plain(TEXT, A, B, END)
    tiny_blender(far, B)
    tiny_blender(near, A)
    with TieredStore(near, remote, clock=clock) as store:
        by = tiny_blender(store)
        by.finder.refresh()
        here, there = by.key(A), by.key(B)
        done = ask(by, prompt)
        assert donors_of(done) == [here.hex(), there.hex()]
        assert set(done.report.tiers) == {"local", "remote"}
        by.fetcher.flush()
        near.delete([there])  # the copy that the request left
        remote.down = True
        assert donors_of(ask(by, prompt)) == [here.hex()]
        by.finder.refresh()
        assert by.finder.index.keys == {here, there}
        remote.down = False
        clock.advance(REST_S)
        assert there.hex() in donors_of(ask(by, prompt))


@pytest.mark.parametrize(("seconds", "method", "n"), [(0.1, "auto", 1), (9.0, "auto", 0), (9.0, "blend", 1)])
def test_auto_leaves_chunks_whose_fetching_takes_longer_than_computing(
    seconds: float, method: Method, n: int
) -> None:
    store = MemoryStore(ROOMY)
    tiny_blender(store, D)
    source = slow_source(store, seconds)
    by = tiny_blender(TieredStore(MemoryStore(0), source), costs=CostModel(1e-6, 1.0, 0.0, 1e-6))
    by.finder = RunFinder(store, by.key)
    by.finder.refresh()
    assert len(donors_of(ask(by, plain(TEXT, D, END), BLEND.with_values(method=method)))) == n


def test_a_store_that_fails_is_a_prompt_without_chunks() -> None:
    store = FaultyStore(MemoryStore(ROOMY))
    by, prompt = tiny_blender(store, A), plain(TEXT, A, END)
    matched = by.match(prompt, BLEND)
    store.down = True
    for each in (prompt, matched):
        done = by.run(each, BLEND)
        assert done.report.spans == []
        assert_near(done.result.logits, model_logits(by.model, prompt))
    store.down = False
    assert donors_of(ask(by, prompt))
