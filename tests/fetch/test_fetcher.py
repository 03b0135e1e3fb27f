"""A prompt over a local store and a remote source, whatever the link does: the answer is that of its chunks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend.blender import Prefilled
from blendserve.blend.cost import CostModel
from blendserve.config import BlendConfig
from blendserve.core import run
from blendserve.errors import ChunkLost
from blendserve.fetch import KVFetcher, TieredStore
from blendserve.fetch.copies import Copies
from blendserve.fetch.fetcher import COMPUTED, Hold
from blendserve.fetch.incoming import ChunkRequest
from blendserve.fetch.source import StoreSource
from blendserve.kv import ChunkKV
from blendserve.store import ChunkKey, ChunkRecord, MemoryStore, read_record
from blendserve.store.base import LOCAL, REMOTE
from blendserve.store.codecs.base import SLOW
from blendserve.store.codecs.int8 import Int8
from blendserve.store.codecs.raw import Raw
from tests.support.blending import check_report, some_prompt, tiny_blender
from tests.support.links import Fault, ScriptedSource
from tests.support.stores import CAP, UNIT, FaultyStore, cache, copy_of, key_of, kv, put_kv, requests, same
from tests.support.waiting import ManualClock

PROMPT = some_prompt([9, 14, 3, 20, 7])
KEYS = [tiny_blender().key(c.ids) for c in PROMPT.chunks]
LEVELS = {"raw": Raw(), "int8": Int8()}
N_LAYERS = tiny_blender().model.n_layers
CHUNKS = tiny_blender().writer.chunks.compute([c.ids for c in PROMPT.chunks])
RECORDS = {
    key: {level: ChunkRecord.encode(key, kv, codec) for level, codec in LEVELS.items()}
    for key, kv in zip(KEYS, CHUNKS, strict=True)
}
COSTS = CostModel(0.0, 0.1, 0.0, 0.0)  # a row takes 100 ms: computing is worth avoiding
ROOM = 1 << 30
PATIENT_S = 60.0
PLACES = st.sampled_from(["local", "remote", "remote", "both", "absent", "local damaged", "damaged, remote"])
FAULTS = st.sampled_from(["damage", "stall", "slow", "cut"])


def used_records(done: Prefilled, local: FaultyStore, source: ScriptedSource) -> dict[ChunkKey, ChunkRecord]:
    """The records that the report names, and a reason for every other chunk."""
    check_report(done.report, PROMPT)
    found, missing = dict[ChunkKey, ChunkRecord](), {chunk.ids: chunk for chunk in done.missing}
    passages = [span for span in done.report.layout if span.kind == "passage"]
    unusable = {miss["chunk"]: miss["kind"] for miss in done.report.unusable}
    for i, (key, span) in enumerate(zip(KEYS, passages, strict=True)):
        ids = PROMPT.chunks[i].ids
        if span.is_read and span.source == COMPUTED:
            computed = missing[ids].kv
            assert computed
            found[key] = ChunkRecord.encode(key, computed, Raw())
        elif span.is_read and span.source == REMOTE:
            found[key] = RECORDS[key][source.came[key]]
        elif span.is_read:
            assert span.source in (LOCAL, "memory")
            record = read_record(local, key)
            found[key] = record or RECORDS[key][source.came[key]]
        elif done.report.method == "blend":
            assert ids in missing
            may_be_there = source.contains([key]) or local.contains([key])
            assert not may_be_there or i in unusable or done.report.chunks_corrupt
            assert unusable.get(i) != SLOW or key in local.damaged or not local.contains([key])
    return found


@given(
    places=st.lists(PLACES, min_size=len(KEYS), max_size=len(KEYS)),
    faults=st.dictionaries(
        st.tuples(st.integers(0, len(KEYS) - 1), st.integers(0, N_LAYERS - 1)), FAULTS, max_size=3
    ),
    method=st.sampled_from(["blend", "auto"]),
    workers=st.integers(1, 2),
    rate=st.sampled_from([None, 1e3, 1e4, 1e9]),
    early_start=st.booleans(),
    prefetched=st.booleans(),
    deleted=st.sets(st.integers(0, len(KEYS) - 1), max_size=2),
)
def test_an_answer_is_that_of_the_chunks_that_the_report_names_and_every_other_one_has_a_reason(
    places: list[str],
    faults: dict[tuple[int, int], Fault],
    method: Any,
    workers: int,
    rate: float | None,
    early_start: bool,
    prefetched: bool,
    deleted: set[int],
) -> None:
    """Of the next request, too, once what was fetched or missed is stored here."""
    there = {KEYS[i] for i, place in enumerate(places) if "remote" in place or place == "both"}
    source = ScriptedSource(
        {key: levels for key, levels in RECORDS.items() if key in there},
        {(KEYS[i], l): fault for (i, l), fault in faults.items()},
        workers,
        rate,
    )
    local, blend = FaultyStore(MemoryStore(ROOM)), BlendConfig(method=method)
    for key, place in zip(KEYS, places, strict=True):
        if place in ("local", "both") or "damaged" in place:
            local.put(key, RECORDS[key]["raw"])
    local.damaged = {key for key, place in zip(KEYS, places, strict=True) if "damaged" in place}
    with TieredStore(local, source) as store:
        copies = Copies([cache(ROOM, name="memory")])
        fetcher = KVFetcher(store, copies, prefetch_bytes=ROOM, early_start=early_start)
        by = tiny_blender(store, costs=COSTS, fetcher=fetcher)
        hold = by.prefetch(PROMPT, blend)() if prefetched else None
        if deleted:
            source.absent = {KEYS[i] for i in deleted}
            by.writer.delete(PROMPT.chunks[i].ids for i in deleted)
        for _ in range(2):
            done = by.run(PROMPT, blend)
            store.flush()
            stored = MemoryStore(ROOM)
            for key, record in used_records(done, local, source).items():
                stored.put(key, record)
            expected = tiny_blender(stored, costs=COSTS).run(
                PROMPT, blend.with_values(method=done.report.method)
            )
            assert torch.equal(done.result.logits, expected.result.logits)
            run(by.writer.write_back(done.missing))
            missed = {by.key(chunk.ids) for chunk in done.missing}
            assert local.contains(missed) == missed
            if hold:
                hold.close()
        fetcher.close()


def test_a_link_is_measured_by_any_chunk_if_none_is_named() -> None:
    clock = ManualClock()
    store = FaultyStore(MemoryStore(CAP), clock)
    store.latency_s = 2.0
    source = StoreSource(store, clock=clock)
    for rate in (None, pytest.approx(UNIT / 2.0)):
        KVFetcher(TieredStore(MemoryStore(0), source)).warm_up()
        assert source.link.rate == rate
        put_kv(store, key_of(0), kv(0))


def test_a_prompt_over_a_local_store_makes_nothing_for_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """No transfer, no thread pool, no estimates."""
    made: list[object] = []
    for place in ("fetcher.Transfer", "transfer.ThreadPoolExecutor", "link.LinkEstimator"):
        monkeypatch.setattr(f"blendserve.fetch.{place}", lambda *options, **_: made.append(options))
    store = MemoryStore(ROOM)
    by = tiny_blender(store, *(c.ids for c in PROMPT.chunks))
    by.prefetch(PROMPT, BlendConfig(method="auto"))().close()
    assert by.run(PROMPT, BlendConfig(method="blend")).report.tiers == {LOCAL: len(KEYS)}
    assert made == []


# Transfers


def far(faults: dict[tuple[ChunkKey, int], Fault] | None = None, **options: Any) -> ScriptedSource:
    """Another machine with chunks 0 to 5."""
    there = {key_of(n): {"raw": ChunkRecord.encode(key_of(n), kv(n), Raw())} for n in range(6)}
    return ScriptedSource(there, faults or {}, **options)


def over(source: ScriptedSource, **options: Any) -> KVFetcher:
    return KVFetcher(MemoryStore(0), source=source, prefetch_bytes=ROOM, **options)


def test_the_cpu_computes_the_last_chunks_while_the_link_brings_the_first() -> None:
    """Of n chunks that are left the link takes .35 n seconds: of 6, 5 and 4 the last is computed in 1 s meanwhile.

    A queued prompt to which stored KV is worth nothing changes none of it.
    """
    gate, computed, holds = threading.Event(), list[ChunkKey](), list[Hold]()
    source = far(workers=1, rate=UNIT / 0.35, before=lambda key, l: gate.wait(PATIENT_S))
    fetcher = over(source)

    def compute(request: ChunkRequest) -> ChunkKV:
        holds.append(fetcher.prefetch(requests(*range(6), saved_s=0.0)))
        computed.append(request.key)
        if len(computed) == 3:
            gate.set()
        return kv(6)

    with fetcher.fetch(requests(*range(6), saved_s=1.0, compute_s=1.0), compute) as fetch:
        assert [fetch.source[key_of(n)] for n in range(6)] == [REMOTE] * 3 + [COMPUTED] * 3
        assert computed == [key_of(n) for n in (5, 4, 3)]
        for n, expected in enumerate([0, 1, 2, 6, 6, 6]):
            assert same(copy_of(fetch.views[key_of(n)]), kv(expected))
    assert source.asked == {key_of(n): 1 for n in range(3)}
    for hold in holds:
        hold.close()


def test_a_link_that_stands_still_is_soon_given_up_and_used_again_when_it_answers() -> None:
    source, found = far({(key_of(0), 1): "stall"}), list[dict[ChunkKey, str]]()
    fetcher, began = over(source, early_start=False), source.clock.now
    for _ in range(2):
        with fetcher.fetch(requests(0, saved_s=1e-6)) as fetch:
            found.append(fetch.source)
    assert found == [{}, {key_of(0): REMOTE}]
    assert source.clock.now - began < source.deadline_s / 2


def test_threads_share_chunks_that_are_in_transit() -> None:
    both = threading.Barrier(2)
    source = far(before=lambda key, l: both.wait(PATIENT_S))  # the layers of both chunks come in turns
    with over(source).fetch(requests(0, 1)) as fetch, ThreadPoolExecutor(2) as pool:
        read = pool.map(lambda _: [copy_of(fetch.views[key_of(n)]) for n in range(2)], range(2))
        assert [same(copy, kv(n)) for copies in read for n, copy in enumerate(copies)] == [True] * 4


@pytest.mark.parametrize("how", ["the fetch ends", "another chunk is lost"])
def test_a_thread_that_waits_for_a_layer_is_released_when(how: str) -> None:
    gates = {key_of(n): threading.Event() for n in range(2)}
    source = far({(key_of(1), 2): "damage"}, before=lambda key, l: l < 2 or gates[key].wait(PATIENT_S))
    with ThreadPoolExecutor(1) as pool:
        with over(source).fetch(requests(0, 1)) as fetch:
            late, other = fetch.views[key_of(0)], fetch.views[key_of(1)]
            late.layer(1)
            waits = pool.submit(late.layer, 2)
            if how == "another chunk is lost":
                gates[key_of(1)].set()
                with pytest.raises(ChunkLost) as lost:
                    other.layer(2)
                with pytest.raises(ChunkLost):
                    waits.result(PATIENT_S / 2)
                gates[key_of(0)].set()
                fetch.drop(lost.value)
                assert fetch.misses[key_of(1)].kind == "corrupt"
                assert same(copy_of(fetch.views[key_of(0)]), kv(0))
        if how == "the fetch ends":
            with pytest.raises(ChunkLost):
                waits.result(PATIENT_S / 2)
        for gate in gates.values():
            gate.set()
