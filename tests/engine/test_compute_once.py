"""A missing chunk is computed once: by threads, by processes on one file, by machines before one remote store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from blendserve.blend import precompute
from blendserve.core import Passage, run
from blendserve.engine.engine import Engine
from blendserve.fetch import KVFetcher, TieredStore
from blendserve.fetch.source import StoreSource
from blendserve.store import KVStore, LMDBStore, MemoryStore
from tests.support.blending import missing
from tests.support.engines import PASSAGES, QUESTIONS, queued, toy_batch, toy_engine
from tests.support.stores import FaultyStore
from tests.support.valkey import needs_server, store_at
from tests.support.waiting import eventually

CAP, LONG_S = 1 << 30, 3600.0
CORPUS = [Passage(f"Passage {n} says {n * n}, and nothing else.") for n in range(12)]
QUESTION, N = QUESTIONS[0], len(PASSAGES)


@pytest.mark.parametrize(
    "open_store", [LMDBStore, pytest.param(store_at, marks=needs_server)], ids=["lmdb", "valkey"]
)
def test_workers_on_one_store_compute_each_chunk_once(
    open_store: Callable[[Path, int], KVStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some use it directly, some with an own store in front, whose writes come in the background."""
    monkeypatch.setattr(precompute, "MIN_WAIT_S", 100.0)  # however slow a worker is
    with ExitStack() as stack:
        stores = [open_store(tmp_path, CAP) for _ in range(4)]
        stores[2:] = [TieredStore(MemoryStore(CAP), far) for far in stores[2:]]
        made = [stack.enter_context(toy_engine(store)) for store in stores]
        with ThreadPoolExecutor(4) as pool:
            reports = list(pool.map(lambda one: one.precompute(CORPUS), made))
        assert sum(report.computed for report in reports) == len(CORPUS)
        assert {(report.left, report.computed + report.skipped) for report in reports} == {(0, 12)}
        assert (made[0].missing(CORPUS), made[0].store.stats().pins) == (0, len(CORPUS))
        answers = [one.answer(QUESTION, CORPUS[:6]) for one in made]
        alone = stack.enter_context(toy_engine())
        alone.precompute(CORPUS)
        assert {answer.token_ids for answer in answers} == {alone.answer(QUESTION, CORPUS[:6]).token_ids}
        assert [sum(answer.report.tiers.values()) for answer in answers] == [6] * 4


@pytest.mark.parametrize("place", ["memory", "before a source that is only read"])
def test_threads_that_miss_one_chunk_compute_it_once(place: str) -> None:
    store: KVStore = MemoryStore(CAP)
    if "source" in place:
        store = TieredStore(store, StoreSource(MemoryStore(CAP)))
    with toy_engine(store) as made, ThreadPoolExecutor(8) as pool:
        chunks = made.prompts.chunk_ids(CORPUS)
        assert sum(
            pool.map(lambda _: run(made.blender.writer.write_back(missing(*chunks))), range(8))
        ) == len(CORPUS)
        assert made.missing(CORPUS) == 0


@pytest.fixture
def far(tmp_path: Path) -> FaultyStore:
    """Another machine's."""
    return FaultyStore(LMDBStore(tmp_path / "far", CAP))


@pytest.fixture
def nodes(far: FaultyStore) -> Iterator[list[Engine]]:
    """Two machines before one remote store."""
    stores = [TieredStore(MemoryStore(CAP), far) for _ in range(2)]
    with toy_engine(stores[0]) as first, toy_engine(stores[1]) as second:
        yield [first, second]


def flush(made: Engine) -> None:
    made.fetcher.flush()


def test_no_request_and_no_job_waits_for_what_another_machine_computes(
    nodes: list[Engine], far: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while `precompute` computes what a machine that has died holds leases of."""
    a, b = nodes
    keys = [a.blender.key(ids) for ids in a.prompts.chunk_ids(PASSAGES)]
    assert a.store.lease(keys[1:], LONG_S) == set(keys[1:])
    assert b.answer(QUESTION, PASSAGES).report.chunks_missing == N
    assert b.missing(PASSAGES) == N - 1
    chunks = b.prompts.chunk_ids(PASSAGES)
    assert b.blender.writer.precompute(chunks[:3], on_leased="skip").left == 2
    assert b.blender.writer.precompute(chunks[:3], on_leased="compute").left == 0
    monkeypatch.setattr(precompute, "MIN_WAIT_S", 0.0)
    report = b.precompute(PASSAGES)
    assert (report.computed, report.left, b.missing(PASSAGES)) == (N - 3, 0, 0)


def test_the_chunks_of_a_queued_prompt_are_fetched_before_its_turn(
    nodes: list[Engine], far: FaultyStore
) -> None:
    nodes[0].precompute(PASSAGES)
    flush(nodes[0])
    store = TieredStore(MemoryStore(CAP), far)
    with toy_engine(store) as node:
        node.blender.fetcher = KVFetcher(store, prefetch_bytes=CAP)
        batch = toy_batch(node, slots=1)
        far.batches.clear()
        request, listener = queued(batch, QUESTION, PASSAGES)
        eventually(lambda: far.batches == [N])
        batch.scheduler.submit(request)
        while batch.scheduler.has_work:
            batch.scheduler.step()
        assert listener.answer().report.tiers == {"remote": N}
        assert far.batches == [N]
