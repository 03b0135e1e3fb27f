"""A missing chunk is computed once: by threads, by processes on one file, by machines before one remote store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from blendserve.blend import single_flight
from blendserve.core import Passage
from blendserve.engine.engine import Engine
from blendserve.errors import StoreUnavailable
from blendserve.store import KVStore, LayeredStore, LMDBStore, MemoryStore
from tests.support.engines import PASSAGES, QUESTIONS, queued, toy_batch, toy_engine
from tests.support.stores import FaultyStore
from tests.support.valkey import needs_server, store_at
from tests.support.waiting import eventually, is_blocked

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
    monkeypatch.setattr(single_flight, "LEAST_PATIENCE_S", 100.0)  # however slow a worker is
    with ExitStack() as stack:
        stores = [open_store(tmp_path, CAP) for _ in range(4)]
        stores[2:] = [LayeredStore(MemoryStore(CAP), far) for far in stores[2:]]
        made = [stack.enter_context(toy_engine(store)) for store in stores]
        with ThreadPoolExecutor(4) as pool:
            reports = list(pool.map(lambda one: one.precompute(CORPUS), made))
        assert sum(report.computed for report in reports) == len(CORPUS) + 1  # and the prefix
        assert {(report.left, report.computed + report.skipped) for report in reports} == {(0, 13)}
        assert (made[0].missing(CORPUS), made[0].store.stats().pins) == (0, len(CORPUS) + 1)
        answers = [one.answer(QUESTION, CORPUS[:6]) for one in made]
        alone = stack.enter_context(toy_engine())
        alone.precompute(CORPUS)
        assert {answer.token_ids for answer in answers} == {alone.answer(QUESTION, CORPUS[:6]).token_ids}
        assert [sum(answer.report.tiers.values()) for answer in answers] == [6] * 4


def test_threads_that_miss_one_chunk_compute_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go, computed = threading.Event(), threading.Event(), list[Any]()
    with toy_engine() as made:
        ids = made.prompts.chunk_ids(PASSAGES)[0]
        computer = made.blender.computer(made.prompts.kv_context)
        compute = computer.compute

        def slow(chunks: Any) -> Any:
            computed.extend(chunks)
            began.set()
            assert go.wait(60)
            return compute(chunks)

        monkeypatch.setattr(computer, "compute", slow)
        first = threading.Thread(target=made.blender.remember, args=([ids],))
        first.start()
        assert began.wait(60)
        assert made.blender.remember([ids]) == 0  # at once
        go.set()
        first.join()
        assert made.blender.remember([ids]) == 0  # it is stored
        assert computed == [ids]


def test_a_claim_that_could_not_be_asked_for_is_none() -> None:
    flight, far, key = single_flight.SingleFlight(), FaultyStore(MemoryStore(CAP)), b"key"
    far.down = True
    with pytest.raises(StoreUnavailable):
        flight.claim(far, {key: 10})
    assert flight.claim(MemoryStore(CAP), {key: 10})
    assert not flight.claim(MemoryStore(CAP), {key: 10})


class FarStore(FaultyStore):
    """Another machine's store. `may_write` holds up what is written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(LMDBStore(path, CAP))
        self.may_write = threading.Event()
        self.may_write.set()

    def put_coded(self, *args: Any, **options: Any) -> bool:
        assert self.may_write.wait(60)
        return super().put_coded(*args, **options)


@pytest.fixture
def far(tmp_path: Path) -> FarStore:
    return FarStore(tmp_path / "far")


@pytest.fixture
def nodes(far: FarStore) -> Iterator[list[Engine]]:
    """Two machines before one remote store; the first writes through a queue of one chunk."""
    stores = [LayeredStore(MemoryStore(CAP), far, waiting_bytes=1), LayeredStore(MemoryStore(CAP), far)]
    with toy_engine(stores[0]) as first, toy_engine(stores[1]) as second:
        yield [first, second]
        far.may_write.set()


def flush(made: Engine) -> None:
    assert isinstance(made.store, LayeredStore)
    made.store.flush()


def test_precompute_waits_for_room_in_the_write_queue(nodes: list[Engine], far: FarStore) -> None:
    a, b = nodes
    far.may_write.clear()
    thread = threading.Thread(target=a.precompute, args=(PASSAGES,))
    thread.start()
    eventually(lambda: is_blocked(thread) or not thread.is_alive())
    far.may_write.set()
    thread.join()
    flush(a)
    assert b.missing(PASSAGES) == 0
    assert far.stats().pins == N + 1


def test_a_chunk_is_not_computed_again_while_it_is_on_the_wire(nodes: list[Engine], far: FarStore) -> None:
    a, b = nodes
    chunk = a.prompts.chunk_ids(PASSAGES)[:1]
    far.may_write.clear()
    assert b.blender.remember(chunk) == 1
    assert a.blender.remember(chunk) == 0
    far.may_write.set()
    flush(b)
    assert a.blender.remember(chunk) == 0
    assert far.calls["put_coded"] == 1


def test_no_request_and_no_job_waits_for_what_another_machine_computes(
    nodes: list[Engine], far: FarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while `precompute` computes what a machine that has died holds leases of."""
    a, b = nodes
    keys = [a.blender.key(ids) for ids in a.prompts.chunk_ids(PASSAGES)]
    assert all(a.store.lease(key, LONG_S) for key in keys[1:])
    assert b.answer(QUESTION, PASSAGES).report.chunks_missing == N
    assert b.missing(PASSAGES) == N - 1
    chunks = b.prompts.chunk_ids(PASSAGES)
    assert b.blender.precompute(chunks[:3], others="leave").left == 2
    assert b.blender.precompute(chunks[:3], others="ignore").left == 0
    monkeypatch.setattr(single_flight, "LEAST_PATIENCE_S", 0.0)
    report = b.precompute(PASSAGES)
    assert (report.computed, report.left, b.missing(PASSAGES)) == (N - 3, 0, 0)


def test_damage_is_mended_though_the_record_is_there(nodes: list[Engine], far: FarStore) -> None:
    a, b = nodes
    a.precompute(PASSAGES)
    flush(a)
    far.damaged.add(a.blender.key(a.prompts.chunk_ids(PASSAGES)[1]))
    report = b.answer(QUESTION, PASSAGES).report
    assert (report.chunks_hit, report.chunks_corrupt) == (N - 1, 1)
    assert report.unusable[0].kind == "corrupt"
    flush(b)
    assert b.answer(QUESTION, PASSAGES).report.chunks_hit == N
    assert far.damaged == set()


def test_the_chunks_of_a_queued_prompt_are_fetched_before_its_turn(
    nodes: list[Engine], far: FarStore
) -> None:
    nodes[0].precompute(PASSAGES)
    flush(nodes[0])
    with toy_engine(LayeredStore(MemoryStore(CAP), far, prefetch_bytes=CAP)) as node:
        batch = toy_batch(node, slots=1)
        far.batches.clear()
        request, listener = queued(batch, QUESTION, PASSAGES)
        eventually(lambda: far.batches == [N + 1])
        batch.scheduler.submit(request)
        while batch.scheduler.has_work:
            batch.scheduler.step()
        assert listener.answer().report.tiers == {"remote": N}
        assert far.batches == [N + 1]
