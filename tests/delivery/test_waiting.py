"""Chunks that are computed while others come. The peer sends when a test lets it, and estimates are given: no clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.cost import CostModel
from blendserve.config import BlendConfig, changed
from blendserve.core import Prompt
from blendserve.engine.engine import Engine
from blendserve.fetch import KVFetcher, TieredStore
from blendserve.fetch.fetcher import COMPUTED
from blendserve.fetch.kdn.source import WORKERS
from blendserve.store import ChunkKey, KVStore, LMDBStore
from blendserve.store.base import REMOTE
from tests.support import peers
from tests.support.engines import CONFIG, PASSAGES
from tests.support.engines import toy_reader as reader
from tests.support.peers import INSTANT, LAYERS, PATIENT_S, SLOW, Known, Paced, Service, check, delivered

AUTO = BlendConfig(method="auto")
SHARE = 0.35  # seconds on the link / seconds of computing


class Gate(threading.Event):
    """Pieces of chunks wait until it is open; where it is cut, each connection ends instead."""

    is_cut = False

    def __call__(self, key: ChunkKey, l: int, part: bytearray) -> None:
        assert self.wait(2 * PATIENT_S)
        if self.is_cut:
            raise ConnectionError

    def open(self, _: int = 0) -> None:
        self.set()

    def cut(self, _: int = 0) -> None:
        self.is_cut = True
        self.set()


@contextmanager
def link(
    service: Service, gate: Gate | None = None, share: float = SHARE, workers: int = 1
) -> Iterator[tuple[TieredStore, Paced]]:
    """Open without a gate; of an unknown rate for share 0. share: of the seconds of computing, on the link."""
    before, config = gate or peers.anything, {"collection": peers.PLAIN, "level": "auto"}
    known = Known(reader().adapter.kv_bytes_per_token / (share * 100.0)) if share else None
    with delivered(service, before, config, workers=workers, link=known) as found:
        yield found
        (gate or Gate()).open()


def blender(
    store: KVStore,
    at_end: dict[int, Callable[[int], Any]] | None = None,
    costs: CostModel = SLOW,
    **options: Any,
) -> Blender:
    """at_end: called before the last layer of a pass, by its number."""
    passes = count(1)

    def before_layer(l: int) -> None:
        if l == LAYERS - 1:
            (at_end or {}).get(n := next(passes), int)(n)

    return peers.blender(store, before_layer, costs=costs, **options)


def tiers(done: Prefilled) -> list[str]:
    return [part.tier for part in done.explanation.parts if part.kind == "passage"]


@pytest.fixture(scope="module")
def meeting(prompt: Prompt) -> int:
    """The number of chunks to compute, by hand: from the last one on, while the rest takes longer to come."""
    sizes = [len(chunk) for chunk in prompt.chunks]
    n = 0
    while sizes and sizes[-1] < 0.9 * SHARE * sum(sizes):
        sizes.pop()
        n += 1
    assert 2 <= n <= len(prompt.chunks) - 2
    return n


def test_link_and_reader_meet(service: Service, prompt: Prompt, meeting: int) -> None:
    gate, fetched = Gate(), len(prompt.chunks) - meeting
    with link(service, gate) as (store, paced):
        done = blender(store, {meeting: gate.open}).run(prompt, AUTO)
    assert tiers(done) == [REMOTE] * fetched + [COMPUTED] * meeting
    assert sum(paced.asked.values()) == fetched  # no chunk twice
    assert (done.report.method, dict(done.report.tiers)) == ("blend", {REMOTE: fetched, COMPUTED: meeting})
    assert not done.report.unusable
    assert [chunk.ids for chunk in done.missing] == [chunk.ids for chunk in prompt.chunks[fetched:]]
    assert all(chunk.kv is not None for chunk in done.missing)
    check(done, prompt)


def test_a_prefetch_for_a_queued_prompt_leaves_the_request_in_flight_alone(
    service: Service, prompt: Prompt, meeting: int
) -> None:
    """With ratio 1 stored KV saves nothing, so the queued request fetches no chunk; the one in flight does."""
    queued, gate, prefetched = changed(AUTO, ratio=1.0), Gate(), list[int]()

    def prefetch(passes: int) -> None:
        of.prefetch(prompt, queued)
        prefetched.append(passes)
        gate.open()

    with link(service, gate) as (store, _):
        of = blender(store, {meeting: prefetch})
        assert tiers(of.run(prompt, AUTO)).count(COMPUTED) == meeting
        assert prefetched
        assert REMOTE not in of.run(prompt, queued).report.tiers


def test_a_link_that_stood_still_is_used_again_when_it_answers(service: Service, prompt: Prompt) -> None:
    gate = Gate()
    with link(service, gate, 0.0, WORKERS) as (store, _):
        impatient = blender(store, costs=INSTANT)  # computing is quick: silence is soon noticed
        for _ in range(3):
            assert REMOTE not in impatient.run(prompt, AUTO).report.tiers
        gate.open()
        done = blender(store).run(prompt, AUTO)
    assert done.report.tiers == {REMOTE: len(prompt.chunks)}
    assert done.missing == ()


@pytest.mark.parametrize("before", ["", "run", "prefetch", "prefetch behind a local store"])
@pytest.mark.parametrize("method", ["blend", "reuse"])
def test_a_fixed_method_waits_for_every_chunk_whatever_auto_left(
    service: Service, prompt: Prompt, tmp_path: Path, before: str, method: Any
) -> None:
    """before: what an `auto` request did that left every chunk on the slow link."""
    with link(service, share=5.0) as (store, _), LMDBStore(tmp_path / "kv", 2**28) as here:
        if "local" in before:
            store = TieredStore(here, store.source)
        of = blender(store, fetcher=KVFetcher(store, prefetch_bytes=2**28))
        if before == "run":
            assert REMOTE not in of.run(prompt, AUTO).report.tiers
        hold = of.prefetch(prompt, AUTO) if "prefetch" in before else None
        done = of.run(prompt, changed(AUTO, method=method))
        if hold:
            hold.close()
        store.flush()
    assert done.report.tiers == {REMOTE: len(prompt.chunks)}
    assert not done.report.unusable


def test_when_the_link_dies_computed_chunks_are_used_and_the_rest_is_fresh(
    service: Service, prompt: Prompt, meeting: int
) -> None:
    gate = Gate()
    with link(service, gate) as (store, _):
        done = blender(store, {meeting: gate.cut}).run(prompt, AUTO)
    assert tiers(done) == [""] * (len(prompt.chunks) - meeting) + [COMPUTED] * meeting
    assert {unusable.kind for unusable in done.report.unusable} == {"unreachable"}
    same = peers.local(prompt, done).run(prompt, changed(AUTO, method=done.report.method))
    torch.testing.assert_close(  # computed alone, not in a stack: products of fewer rows may round otherwise
        done.result.logits, same.result.logits, rtol=1e-5, atol=1e-5
    )


def test_an_engine_stores_what_it_computed_and_does_not_compute_it_again(
    service: Service, prompt: Prompt, meeting: int, tmp_path: Path
) -> None:
    gate, config = Gate(), changed(CONFIG, blend=AUTO.model_dump())
    passes = list[int]()
    with link(service, gate) as (far, _), LMDBStore(tmp_path / "kv", 2**28) as near:
        store = TieredStore(near, far.source)
        engine = Engine(config, reader(), store)
        engine.blender = of = blender(
            store, {**dict.fromkeys(range(1, 20), passes.append), meeting: gate.open}
        )
        report = engine.answer("Who sat on the mat?", PASSAGES).report
        assert report.tiers == {REMOTE: len(PASSAGES) - meeting, COMPUTED: meeting}
        store.flush()
        keys = {of.key(chunk.ids) for chunk in prompt.chunks}
        assert near.contains(keys) == keys
        n_passes = len(passes)
        assert tiers(of.run(prompt, AUTO)) == ["local"] * len(prompt.chunks)
        assert len(passes) - n_passes <= 2  # a prefill, and the policy's
        remote = of.fetcher.stats().remote
        assert remote
        assert remote.misses == 0
