"""A prompt over a local store and a remote source, whatever the link does: the answer is that of its chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.cost import CostModel
from blendserve.config import BlendConfig, changed
from blendserve.fetch import KVFetcher, TieredStore
from blendserve.fetch.fetcher import COMPUTED
from blendserve.fetch.incoming import ChunkRequest
from blendserve.fetch.transfer import TransferOptions
from blendserve.store import ChunkKey, ChunkRecord, KVStore, MemoryStore
from blendserve.store.base import LOCAL, REMOTE
from blendserve.store.codecs.int8 import Int8
from blendserve.store.codecs.raw import Raw
from blendserve.store.view import decode
from tests.support.blending import check_report, some_prompt, tiny_blender
from tests.support.links import FarSource, Fault, ScriptedSource
from tests.support.stores import CAP, FaultyStore, chunk, key_of, put_kv

PROMPT = some_prompt([9, 14, 3, 20, 7])
KEYS = [tiny_blender().key(c.ids) for c in PROMPT.chunks]
LEVELS = {"raw": Raw(), "int8": Int8()}
N_LAYERS = tiny_blender().model.n_layers
COSTS = CostModel(0.0, 0.1, 0.0, 0.0)  # a row takes 100 ms: computing is worth avoiding
ROOM = 1 << 30
PLACES = st.sampled_from(["local", "remote", "remote", "both", "absent", "local damaged", "damaged, remote"])
FAULTS = st.sampled_from(["damage", "stall", "slow", "cut"])


def records() -> dict[ChunkKey, dict[str, ChunkRecord]]:
    """Every chunk by level."""
    whole = tiny_blender(None, *(c.ids for c in PROMPT.chunks))
    found: dict[ChunkKey, dict[str, ChunkRecord]] = {}
    with whole.store.snapshot() as snapshot:
        for key in KEYS:
            record = snapshot.get(key)
            assert record
            kv = decode(record)
            found[key] = {level: ChunkRecord.encode(key, kv, codec) for level, codec in LEVELS.items()}
    return found


RECORDS = records()


def blender(store: KVStore, source: ScriptedSource | None = None, **options: Any) -> Blender:
    fetcher = KVFetcher(store, source=source, prefetch_bytes=ROOM, **options)
    return tiny_blender(store, costs=COSTS, fetcher=fetcher)


def same_as_stored(done: Prefilled, used: dict[ChunkKey, ChunkRecord], blend: BlendConfig) -> None:
    """The answer is, to the bit, the one over a memory store that holds these chunks."""
    store = MemoryStore(ROOM)
    for key, record in used.items():
        store.put(key, record)
    expected = tiny_blender(store, costs=COSTS).run(PROMPT, changed(blend, method=done.report.method))
    assert torch.equal(done.result.logits, expected.result.logits)


@given(
    places=st.lists(PLACES, min_size=len(KEYS), max_size=len(KEYS)),
    faults=st.dictionaries(
        st.tuples(st.integers(0, len(KEYS) - 1), st.integers(0, N_LAYERS - 1)), FAULTS, max_size=3
    ),
    method=st.sampled_from(["blend", "auto"]),
    workers=st.integers(1, 2),
    prefetched=st.booleans(),
    deleted=st.sets(st.integers(0, len(KEYS) - 1), max_size=2),
    options=st.builds(
        TransferOptions,
        interleave=st.booleans(),
        early_start=st.booleans(),
        restart=st.booleans(),
        compute=st.booleans(),
    ),
)
def test_an_answer_is_that_of_the_chunks_that_the_report_names_and_every_other_one_has_a_reason(
    places: list[str],
    faults: dict[tuple[int, int], Fault],
    method: Any,
    workers: int,
    prefetched: bool,
    deleted: set[int],
    options: TransferOptions,
) -> None:
    there = {KEYS[i] for i, place in enumerate(places) if "remote" in place or place == "both"}
    source = ScriptedSource(
        {key: levels for key, levels in RECORDS.items() if key in there},
        {(KEYS[i], l): fault for (i, l), fault in faults.items()},
        workers=workers,
    )
    local, blend = FaultyStore(MemoryStore(ROOM)), BlendConfig(method=method)
    for key, place in zip(KEYS, places, strict=True):
        if place in ("local", "both") or "damaged" in place:
            local.put(key, RECORDS[key]["raw"])
    local.damaged = {key for key, place in zip(KEYS, places, strict=True) if "damaged" in place}
    with TieredStore(local, source) as store:
        by = blender(store, options=options)
        hold = by.prefetch(PROMPT, blend) if prefetched else None
        if deleted:
            source.absent = {KEYS[i] for i in deleted}
            by.writer.delete(PROMPT.chunks[i].ids for i in deleted)
        done = by.run(PROMPT, blend)
        check_report(done.report, PROMPT)
        if hold:
            hold.close()
        used = dict[ChunkKey, ChunkRecord]()
        missing = {chunk.ids: chunk for chunk in done.missing}
        parts = [part for part in done.explanation.parts if part.kind == "passage"]
        unusable = {miss.chunk: miss for miss in done.report.unusable}
        for i, (key, ids) in enumerate(zip(KEYS, (c.ids for c in PROMPT.chunks), strict=True)):
            tier = parts[i].tier
            if tier == COMPUTED:
                computed = missing[ids].kv
                assert computed
                used[key] = ChunkRecord.encode(key, computed, Raw())
            elif tier == REMOTE:
                assert key in there
                used[key] = RECORDS[key][source.came[key]]
            elif tier:
                assert tier in (LOCAL, "memory")
                used[key] = RECORDS[key]["raw"]
            elif done.report.method == "blend":
                assert ids in missing
                may_be_there = key in source.contains([key]) or key in local.contains([key])
                assert not may_be_there or i in unusable or done.report.chunks_corrupt
        same_as_stored(done, used, blend)
        by.fetcher.close()


def test_a_store_that_cannot_be_read_is_a_miss_of_every_chunk() -> None:
    store = FaultyStore(MemoryStore(CAP))
    put_kv(store, key_of(0), chunk(10))
    store.down = True
    with KVFetcher(store).fetch([ChunkRequest(key_of(n), 10) for n in range(2)]) as fetch:
        assert {miss.kind for miss in fetch.misses.values()} == {"unreachable"}
        assert not fetch.views


def test_a_link_is_measured_by_any_chunk_if_none_is_named() -> None:
    store = MemoryStore(CAP)
    source = FarSource(store)
    fetcher = KVFetcher(TieredStore(MemoryStore(0), source))
    source.latency_s = 0.5
    fetcher.warm_up()
    assert source.link.rate is None
    put_kv(store, key_of(0), chunk(10))
    fetcher.warm_up()
    assert source.link.rate
    assert source.link.round_trip_s == 0.5


def test_a_prompt_over_a_local_store_makes_nothing_for_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """No transfer, no plan, no deadline, no thread pool."""
    made: list[object] = []
    for place in (
        "fetcher.Transfer",
        "transfer.ThreadPoolExecutor",
        "transfer.Deadline",
        "link.LinkEstimator",
    ):
        monkeypatch.setattr(f"blendserve.fetch.{place}", lambda *options, **_: made.append(options))
    store = MemoryStore(ROOM)
    by = tiny_blender(store, *(c.ids for c in PROMPT.chunks))
    by.prefetch(PROMPT, BlendConfig(method="auto")).close()
    assert by.run(PROMPT, BlendConfig(method="blend")).report.tiers == {LOCAL: len(KEYS)}
    assert made == []
