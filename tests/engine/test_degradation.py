"""Requests outlive their store, and tenants learn nothing of each other: through the whole engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from blendserve import Config, Engine, Passage
from blendserve.config import BlendConfig, DecodeConfig, StoreConfig
from tests.engine.helpers import reader

PASSAGES = [
    Passage(title=f"Note {n}", text=" ".join(f"Item {n * 10 + k} lies in drawer {k * n}." for k in range(9)))
    for n in range(4)
]
QUESTION = "Where does item 21 lie?"
BLEND = {"method": "blend"}


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blendserve.engine.engine.load_reader", lambda config, say: reader())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    config = Config(
        store=StoreConfig(path=tmp_path / "kv", cap_gb=1.0), decode=DecodeConfig(max_new_tokens=6)
    )
    with Engine.open(config) as engine:
        engine.precompute(PASSAGES)
        yield engine


def test_a_store_that_disappears_costs_time_not_answers(engine: Engine, tmp_path: Path) -> None:
    full = engine.answer(QUESTION, PASSAGES, method="full")
    shutil.rmtree(tmp_path / "kv")
    answer = engine.answer(QUESTION, PASSAGES, **BLEND)
    assert answer.text
    if not answer.report.blended:  # the open map may outlive its file; then blending goes on
        assert answer.report.reason
        assert answer.text == full.text


def test_a_closed_store_is_a_reason_not_an_error(engine: Engine) -> None:
    full = engine.answer(QUESTION, PASSAGES, method="full")
    engine.store.close()
    answer = engine.answer(QUESTION, PASSAGES, **BLEND)
    assert answer.token_ids == full.token_ids
    assert not answer.report.blended
    assert "store cannot be read" in answer.report.reason


def test_a_store_that_refuses_writes_costs_a_warning(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine.store.close()
    read_only = engine.config.store
    from blendserve.store import open_store

    engine.store = engine.blender.store = open_store(read_only, tmp_path, read_only=True)
    fresh = [*PASSAGES, Passage(title="New", text="Item 99 lies under the stairs.")]
    answer = engine.answer(QUESTION, fresh, **BLEND)
    assert answer.report.blended
    assert answer.report.chunks_missing == 1
    assert "not stored" in caplog.text


def test_a_tenant_neither_hits_nor_lists_nor_counts_what_another_stored(engine: Engine) -> None:
    mine, other = engine, engine.tenant("other")
    before = mine.store.stats("")
    first = other.answer(QUESTION, PASSAGES, **BLEND)
    assert (first.report.chunks_hit, first.report.tokens_reused, first.report.bytes_loaded) == (0, 0, 0)
    assert first.token_ids == mine.answer(QUESTION, PASSAGES, method="full").token_ids
    again = other.answer(QUESTION, PASSAGES, **BLEND)  # stored by now, under his own keys
    assert again.report.chunks_hit == len(PASSAGES)
    assert set(mine.store.keys("")).isdisjoint(mine.store.keys("other"))
    assert len(list(mine.store.keys("other"))) == len(list(mine.store.keys(""))) == 5
    after = mine.store.stats("")
    assert (after.chunks, after.bytes, after.misses) == (before.chunks, before.bytes, before.misses)
    assert (after.evictions, after.admissions_refused) == (None, None)


def test_deleting_for_one_tenant_leaves_the_other(engine: Engine) -> None:
    other = engine.tenant("other")
    other.precompute(PASSAGES)
    ids = [other.prompts.chunk(p).ids for p in PASSAGES]
    assert other.blender.forget(ids, []) == len(PASSAGES)
    assert engine.missing(PASSAGES) == 0


def test_what_is_replaced_leaves_no_kv_behind(tmp_path: Path) -> None:
    config = Config(blend=BlendConfig(method="blend"))
    docs = [{"id": f"d{n}", "text": p.text} for n, p in enumerate(PASSAGES)]
    with Engine.build(tmp_path / "index", docs, config) as engine:
        engine.precompute()
        assert (engine.store.stats().chunks, engine.store.stats().pins) == (5, 5)
        assert engine.add([{"id": "d0", "text": "Item 1 was moved to the attic."}]) == 1
        assert engine.store.stats().chunks == 4
        engine.precompute()
    with Engine.build(tmp_path / "index", docs[1:2], config) as engine:
        assert engine.missing() == 0
        assert (engine.store.stats().chunks, engine.store.stats().pins) == (5, 2)  # and the prefix


def test_timings_say_where_the_time_went(engine: Engine) -> None:
    timings = engine.answer(QUESTION, PASSAGES, **BLEND).timings
    assert min(timings.load, timings.select, timings.correct) > 0
    assert timings.load + timings.select + timings.correct < timings.prefill < timings.ttft
