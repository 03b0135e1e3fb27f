"""A missing chunk is computed once: by threads, by processes on one file, by machines before one remote store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from blendserve.blend import single_flight
from blendserve.blend.blender import Blender
from blendserve.core import Passage
from blendserve.engine.batching import BatchEngine
from blendserve.engine.engine import Engine
from blendserve.engine.request import Request
from blendserve.errors import StoreUnavailable
from blendserve.serve.metrics import Metrics
from blendserve.store import KVStore, LayeredStore, LMDBStore, MemoryStore
from blendserve.store.base import Lease
from blendserve.store.key import ChunkKey
from tests.engine.helpers import CONFIG, PASSAGES, QUESTIONS, Listener, reader
from tests.support.stores import RemoteStore, key_of
from tests.support.valkey import needs_server, store_at

CAP = 1 << 30
CORPUS = [Passage(f"Passage {n} says {n * n}, and nothing beside it.") for n in range(12)]


def engine(store: KVStore) -> Engine:
    return Engine(CONFIG, reader(), store)


def chunks_of(made: Engine) -> list[tuple[int, ...]]:
    return [made.prompts.chunk(passage).ids for passage in PASSAGES]


def test_engines_on_one_file_compute_each_chunk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_flight, "LEAST_PATIENCE_S", 100.0)  # however long one is kept from working
    with ExitStack() as stack:
        made = [stack.enter_context(engine(LMDBStore(tmp_path, CAP))) for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            reports = list(pool.map(lambda one: one.precompute(CORPUS), made))
        assert sum(report.computed for report in reports) == len(CORPUS) + 1  # and the prefix
        assert [(report.left, report.computed + report.skipped) for report in reports] == [(0, 13)] * 3
        assert made[0].missing(CORPUS) == 0
        assert made[0].store.stats().pins == len(CORPUS) + 1


def test_what_the_dead_left_is_computed_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_flight, "LEAST_PATIENCE_S", 0.0)
    with engine(LMDBStore(tmp_path, CAP)) as made:
        for ids in chunks_of(made)[:2]:
            assert made.store.lease(made.blender.key(ids), 3600)
        report = made.precompute(PASSAGES)
        assert (report.computed, report.left, made.missing(PASSAGES)) == (len(PASSAGES) + 1, 0, 0)


def test_a_lease_ends_by_release_by_put_and_by_itself(tmp_path: Path) -> None:
    with engine(LMDBStore(tmp_path / "a", CAP)) as made, LMDBStore(tmp_path / "a", CAP) as other:
        key, second = (made.blender.key(ids) for ids in chunks_of(made)[:2])
        lease = made.store.lease(key, 3600)
        assert lease is not None
        assert other.lease(key, 3600) is None
        assert made.store.lease(key, 3600) is None
        lease.release()
        later = other.lease(key, -1.0)  # over when it is made
        assert later is not None
        assert made.store.lease(key, 3600) is not None
        later.release()  # not its own any more
        assert other.lease(key, 3600) is None
        assert made.store.lease(second, 3600) is not None
        made.blender.remember([])
        kv = made.blender.computer(()).compute([(5, 6, 7)])[0]
        made.store.put(key, kv)
        assert other.lease(key, 3600) is not None


class Slow:
    """Computing waits until it is let go, and is counted."""

    def __init__(self, blender: Blender, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go, self.computed = threading.Event(), threading.Event(), list[Any]()
        computer = blender.computer(blender._context)
        compute = computer.compute

        def waiting(chunks: Any) -> Any:
            self.computed += chunks
            self.began.set()
            assert self.go.wait(60)
            return compute(chunks)

        monkeypatch.setattr(computer, "compute", waiting)


def test_threads_that_miss_one_chunk_compute_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(MemoryStore(CAP)) as made:
        ids, slow = chunks_of(made)[0], Slow(made.blender, monkeypatch)
        first = threading.Thread(target=made.blender.remember, args=([ids],))
        first.start()
        assert slow.began.wait(60)
        assert made.blender.remember([ids]) == 0  # at once
        slow.go.set()
        first.join()
        assert made.blender.remember([ids]) == 0  # it is there
        assert slow.computed == [ids]


@pytest.fixture
def remote() -> RemoteStore:
    return RemoteStore(MemoryStore(CAP))


@pytest.fixture
def nodes(remote: RemoteStore) -> Iterator[list[Engine]]:
    """Two machines before one remote store."""
    with ExitStack() as stack:
        yield [stack.enter_context(engine(LayeredStore(MemoryStore(CAP), remote))) for _ in range(2)]
        remote.gate.set()


def test_what_one_machine_computed_every_other_uses(nodes: list[Engine], remote: RemoteStore) -> None:
    a, b = nodes
    first = a.answer(QUESTIONS[0], PASSAGES)
    a.store.flush()  # type: ignore[attr-defined]
    second, third = (b.answer(QUESTIONS[0], PASSAGES) for _ in range(2))
    assert first.report.tiers == {}
    assert second.report.tiers == {"remote": len(PASSAGES)}
    assert second.text == third.text == a.answer(QUESTIONS[0], PASSAGES).text
    b.store.flush()  # type: ignore[attr-defined]
    assert b.answer(QUESTIONS[0], PASSAGES).report.tiers == {"local": len(PASSAGES)}
    assert remote.puts == len(PASSAGES) + 1


def test_a_chunk_is_not_computed_again_while_it_is_on_its_way(
    nodes: list[Engine], remote: RemoteStore
) -> None:
    a, b = nodes
    chunks = chunks_of(a)
    assert a.blender.remember(chunks[:1]) == 1
    a.store.flush()  # type: ignore[attr-defined]
    lock = threading.Event()
    a.store._backlog.add(b"", 0, lambda: lock.wait(60))  # type: ignore[attr-defined]
    assert a.blender.remember(chunks[1:2]) == 1
    assert b.blender.remember(chunks[1:2]) == 0  # here and stored, but not there yet
    assert remote.refused == 1
    lock.set()
    a.store.flush()  # type: ignore[attr-defined]
    assert b.blender.remember(chunks[1:2]) == 0
    assert remote.leased == set()
    assert remote.puts == 2


def test_no_request_waits_for_what_another_machine_computes(nodes: list[Engine], remote: RemoteStore) -> None:
    a, b = nodes
    a.precompute([])
    a.store.flush()  # type: ignore[attr-defined]
    leased = [a.store.lease(a.blender.key(ids), 3600) for ids in chunks_of(a)]
    answer = b.answer(QUESTIONS[0], PASSAGES)
    assert answer.report.chunks_missing == len(PASSAGES)
    assert (len(leased), remote.refused, b.missing(PASSAGES)) == (6, 6, 6)


def test_damage_is_mended_though_the_record_is_there(nodes: list[Engine], remote: RemoteStore) -> None:
    a, b = nodes
    a.precompute(PASSAGES)
    a.store.flush()  # type: ignore[attr-defined]
    key = a.blender.key(chunks_of(a)[1])
    record = remote._store._chunks[key]  # type: ignore[attr-defined]
    record.segments[2] = bytes(len(record.segments[2]))
    answer = b.answer(QUESTIONS[0], PASSAGES)
    assert (answer.report.chunks_hit, answer.report.chunks_corrupt) == (5, 1)
    assert answer.report.unusable[0].kind == "corrupt"
    b.store.flush()  # type: ignore[attr-defined]
    assert b.answer(QUESTIONS[0], PASSAGES).report.chunks_hit == 6
    assert remote._store.coded(key) is not None


def test_the_report_says_that_the_remote_store_could_not_be_reached(
    nodes: list[Engine], remote: RemoteStore
) -> None:
    remote.down = True
    a, _ = nodes
    a.precompute(PASSAGES[:2])
    report = a.answer(QUESTIONS[0], PASSAGES).report
    assert report.tiers == {"local": 2}
    assert {why.kind for why in report.unusable} == {"unreachable"}
    assert (report.chunks_missing, len(report.unusable)) == (4, 4)
    assert a.missing(PASSAGES) == 0  # computed here


def test_warming_waits_for_nobody_and_leaves_nothing_out(
    nodes: list[Engine], remote: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = nodes
    chunks = chunks_of(a)
    assert a.store.lease(a.blender.key(chunks[0]), 3600)
    report = b.blender.precompute(chunks, others="leave")
    assert (report.left, report.computed) == (1, len(chunks))  # with the prefix
    assert b.blender.precompute(chunks, others="ignore").left == 0
    assert b.missing(PASSAGES) == 0


def test_what_waiting_requests_lack_is_read_ahead(nodes: list[Engine], remote: RemoteStore) -> None:
    a, _ = nodes
    a.precompute(PASSAGES)
    a.store.flush()  # type: ignore[attr-defined]
    with engine(LayeredStore(MemoryStore(CAP), remote, prefetch_bytes=CAP)) as node:
        metrics = Metrics()
        batch = BatchEngine(
            node,
            metrics,
            slots=1,
            slot_tokens=None,
            queue=9,
            gap_s=0.0,
            prefill_share=0.0,
            share_bytes=0,
            prefix_bytes=0,
            job_share=0.5,
        )
        metrics.watch(lambda: batch.scheduler.load, 1, node.store)
        listener = Listener()
        remote.trips.clear()
        queued = batch.queued(node.plan(Request(QUESTIONS[0], PASSAGES)), listener)
        ahead = node.store._fetcher._ahead  # type: ignore[attr-defined]
        assert len(ahead) == len(PASSAGES) + 1
        for read in list(ahead.values()):
            read.read.result()
        batch.scheduler.start()
        batch.scheduler.submit(queued)
        assert listener.answer().report.tiers == {"remote": len(PASSAGES)}
        assert remote.trips == [len(PASSAGES) + 1]
        batch.scheduler.stop()
        text = metrics.text().decode()
        assert f'blendserve_chunks_hit_by_tier_total{{tier="remote"}} {len(PASSAGES)}.0' in text
        assert f"blendserve_store_remote_hits_total {len(PASSAGES) + 1}.0" in text


@needs_server
def test_workers_on_one_server_compute_each_chunk_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some before it, some with a store of their own in front; what the latter write comes in the background."""
    monkeypatch.setattr(single_flight, "LEAST_PATIENCE_S", 100.0)
    with ExitStack() as stack:
        made = [stack.enter_context(engine(store_at(tmp_path, CAP))) for _ in range(2)]
        made += [
            stack.enter_context(engine(LayeredStore(MemoryStore(CAP), store_at(tmp_path, CAP))))
            for _ in range(2)
        ]
        with ThreadPoolExecutor(4) as pool:
            reports = list(pool.map(lambda one: one.precompute(CORPUS), made))
        assert sum(report.computed for report in reports) == len(CORPUS) + 1
        answers = [one.answer(QUESTIONS[0], CORPUS[:6]) for one in made]
        alone = stack.enter_context(engine(MemoryStore(CAP)))
        alone.precompute(CORPUS)
        assert {answer.token_ids for answer in answers} == {alone.answer(QUESTIONS[0], CORPUS[:6]).token_ids}
        assert answers[0].report.tiers == {"remote": 6}
        assert sum(answers[2].report.tiers.values()) == 6


class Mute(MemoryStore):
    def lease(self, key: ChunkKey, seconds: float) -> Lease | None:
        raise StoreUnavailable("it does not answer")


def test_who_could_not_ask_for_a_lease_has_no_claim() -> None:
    flight, key = single_flight.SingleFlight(), key_of(0)
    with pytest.raises(StoreUnavailable):
        flight.claim(Mute(CAP), {key: 10})
    assert flight.claim(MemoryStore(CAP), {key: 10})
    assert not flight.claim(MemoryStore(CAP), {key: 10})
