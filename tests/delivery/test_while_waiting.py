"""Chunks computed by who waits for others. Links deliver when tests let them, estimates are made up: no clock matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.bench.link import Link, Weather
from blendserve.blend import slow_link
from blendserve.blend.blender import Blended, Blender
from blendserve.blend.cost import CostModel
from blendserve.blend.while_waiting import COMPUTED
from blendserve.config import BlendConfig, KdnConfig, changed
from blendserve.core import Prompt
from blendserve.delivery.publish import publish
from blendserve.engine.engine import Engine
from blendserve.store import ChunkKey, KVStore, LayeredStore, LMDBStore, MemoryStore, ReadAhead
from blendserve.store.base import REMOTE
from blendserve.store.kdn.collection import Collection
from blendserve.store.kdn.store import WORKERS, KdnStore
from tests.delivery.helpers import NAME, Known, Service, publisher, settings
from tests.engine.helpers import CONFIG, PASSAGES, reader

AUTO = BlendConfig(method="auto")
ROW_S = 100.0  # of computing, says the cost model: so long that no silence is worth noticing
FETCHED = 0.3  # times what computing takes, says the link's rate


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[KVStore, Collection]:
    """Uncoded alone."""
    store = MemoryStore(2**30)
    return store, publish(publisher(tmp_path_factory.mktemp("published"), store), NAME, ())


def rate(share: float = FETCHED) -> float:
    """At which a token's KV takes such a share of the time that computing it takes."""
    return reader().adapter.kv_bytes_per_token / (share * ROW_S)


def blender(
    store: KVStore,
    at_end: Callable[[int], None] = lambda n: None,
    at_start: Callable[[int], None] = lambda n: None,
) -> Blender:
    """at_end, at_start: told of a pass's last and first layer, by its number; the first pass is the prefix's."""
    like = Engine(CONFIG, reader(), store).blender
    passes, last = [0], reader().adapter.n_layers - 1

    def before_layer(l: int) -> None:
        if l == 0:
            passes[0] += 1
            at_start(passes[0])
        if l == last:
            at_end(passes[0])

    of = like.like(store, "", before_layer)
    of._costs = CostModel(0.0, ROW_S, 0.0, 0.0)
    return of


def at(link: Link, **options: Any) -> KdnConfig:
    return settings(f"http://127.0.0.1:{link.port}", **{"level": "auto", **options})


@contextmanager
def behind_a_link(
    service: Service, known: float, workers: int = 1, **options: Any
) -> Iterator[tuple[KdnStore, Link]]:
    with (
        Link(service.port) as link,
        KdnStore(at(link, **options), workers=workers, pace=Known(known)) as store,
    ):
        list(store.keys())  # description and directory are here
        yield store, link


def local(chunks: Any) -> MemoryStore:
    """A store with these chunks, and the prefix."""
    store = MemoryStore(2**30)
    blender(store).precompute([chunk.ids for chunk in chunks])
    return store


def asked(service: Service) -> float:
    """Chunks that were asked for so far."""
    (metric,) = service.inner.delivered.chunks.collect()
    return sum(float(sample.value) for sample in metric.samples if sample.name.endswith("_total"))


def tiers(done: Blended) -> list[str]:
    return [part.tier for part in done.explanation.parts if part.kind == "passage"]


def adds_up(done: Blended) -> bool:
    report = done.report
    return (
        sum(report.tiers.values()) == report.chunks_hit
        and report.chunks_hit + report.chunks_missing + report.chunks_corrupt == report.chunks
    )


def meeting(prompt: Prompt) -> int:
    """Chunks that are to be computed, by hand: from the last one on, while the rest takes longer to come."""
    sizes = [len(chunk) for chunk in prompt.chunks]
    first, taken = len(prompt.prefix), 0  # the prefix is computed before the first one
    while sizes and (sizes[-1] + first) < 0.9 * FETCHED * (sum(sizes) + len(prompt.prefix)):
        sizes.pop()
        first, taken = 0, taken + 1
    return taken


def test_link_and_reader_meet_and_the_answer_is_that_of_chunks_that_are_all_here(
    service: Service, prompt: Prompt
) -> None:
    expected = meeting(prompt)
    assert 2 <= expected <= len(prompt.chunks) - 2
    before = asked(service)
    with behind_a_link(service, rate()) as (store, link):
        link.weather = Weather(dead=True)

        def heal(passes: int) -> None:
            if passes == 1 + expected:
                link.weather = Weather()

        done = blender(store, heal).run(prompt, AUTO)
    fetched = len(prompt.chunks) - expected
    assert tiers(done) == [REMOTE] * fetched + [COMPUTED] * expected
    assert asked(service) - before == fetched + 1  # the prefix: no chunk that was computed, and none twice
    assert (done.report.method, dict(done.report.tiers)) == ("blend", {REMOTE: fetched, COMPUTED: expected})
    assert adds_up(done)
    assert not done.report.unusable
    here = blender(local(prompt.chunks)).run(prompt, BlendConfig(method="blend"))
    assert torch.equal(done.prefilled.logits, here.prefilled.logits)
    assert list(done.computed) == [chunk.ids for chunk in prompt.chunks[fetched:]] == list(done.absent)


def test_over_a_quick_link_nothing_is_computed(service: Service, prompt: Prompt) -> None:
    with behind_a_link(service, rate(0.01)) as (store, _):
        done = blender(store).run(prompt, AUTO)
    assert done.report.tiers == {REMOTE: len(prompt.chunks)}
    assert (done.absent, done.computed) == ((), {})


def test_over_a_link_that_stood_still_chunks_come_alone_and_the_last_is_computed_until_a_request_came_through(
    service: Service, prompt: Prompt
) -> None:
    before, early = asked(service), [0.0]
    with behind_a_link(service, rate(0.01), workers=2) as (store, link):
        store._pace.silence()
        link.weather = Weather(dead=True)

        def heal(passes: int) -> None:
            if passes == 3:  # two chunks, with the prefix before them
                early[0], link.weather = asked(service) - before, Weather()

        of = blender(store, heal)
        done, again = of.run(prompt, AUTO), of.run(prompt, AUTO)
    assert early[0] <= 1
    fetched = done.report.tiers[REMOTE]
    assert 1 <= fetched <= len(prompt.chunks) - 2
    assert tiers(done) == [REMOTE] * fetched + [COMPUTED] * (len(prompt.chunks) - fetched)
    here = blender(local(prompt.chunks)).run(prompt, BlendConfig(method="blend"))
    assert torch.equal(done.prefilled.logits, here.prefilled.logits)
    assert again.report.tiers == {REMOTE: len(prompt.chunks)}


def test_a_link_that_brings_nothing_is_asked_for_a_chunk_a_request_until_it_brings_some(
    service: Service, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_link.Link, "probe", lambda *_: None)  # which would ask as well
    with Link(service.port) as link, KdnStore(at(link)) as store:
        list(store.keys())
        of = blender(store)
        of._costs = CostModel(0.0, 1e-6, 0.0, 0.0)  # so that silence is noticed soon
        link.weather = Weather(dead=True)
        before = asked(service)
        for _ in range(3):
            done = of.run(prompt, AUTO)
            assert REMOTE not in done.report.tiers
            assert store._pace.wary
        assert asked(service) - before <= WORKERS + 2  # two by the first request, one by each that knew
        link.weather = Weather()
        of._costs = CostModel(0.0, ROW_S, 0.0, 0.0)
        of.run(prompt, AUTO)
        assert not store._pace.wary
        assert of.run(prompt, AUTO).report.tiers == {REMOTE: len(prompt.chunks)}


@pytest.mark.parametrize("method", ["blend", "reuse"])
def test_a_fixed_method_waits(service: Service, prompt: Prompt, method: Any) -> None:
    with behind_a_link(service, rate()) as (store, _):
        done = blender(store).run(prompt, changed(AUTO, method=method))
    assert done.report.tiers == {REMOTE: len(prompt.chunks)}


@pytest.mark.parametrize("method", ["blend", "reuse"])
def test_a_fixed_method_fetches_after_an_auto_request_that_left_every_chunk(
    service: Service, prompt: Prompt, method: Any
) -> None:
    """What one request weighs is no other request's: the how-to page says that a fixed method waits for its chunks."""
    with behind_a_link(service, rate(5.0)) as (store, _):
        of = blender(store)
        assert REMOTE not in of.run(prompt, AUTO).report.tiers
        of.wait_for_sample()
        done = of.run(prompt, changed(AUTO, method=method))
    assert done.report.tiers == {REMOTE: len(prompt.chunks)}
    assert not done.report.unusable


def test_a_prefetch_for_a_queued_prompt_leaves_the_request_in_flight_alone(
    service: Service, prompt: Prompt
) -> None:
    """With ratio 1 stored KV saves nothing, so the queued request fetches no chunk; the one in flight does."""
    queued, expected, prefetched = changed(AUTO, ratio=1.0), meeting(prompt), list[int]()
    with behind_a_link(service, rate()) as (store, link):
        link.weather = Weather(dead=True)

        def prefetch(passes: int) -> None:
            if passes == 1 + expected:
                of.prefetch(prompt, queued)
                prefetched.append(passes)
                link.weather = Weather()

        of = blender(store, prefetch)
        done = of.run(prompt, AUTO)
        assert prefetched
        assert tiers(done) == [REMOTE] * (len(prompt.chunks) - expected) + [COMPUTED] * expected
        assert REMOTE not in of.run(prompt, queued).report.tiers
        of.wait_for_sample()


@pytest.mark.parametrize("kind", ["ahead", "layered"])
def test_a_fixed_method_fetches_what_a_prefetch_for_auto_left(
    service: Service, prompt: Prompt, tmp_path: Path, kind: str
) -> None:
    with behind_a_link(service, rate(5.0)) as (far, _):
        here = LMDBStore(tmp_path / "kv", 2**28)
        with (
            here,
            ReadAhead(far, 2**28)
            if kind == "ahead"
            else LayeredStore(here, far, prefetch_bytes=2**28) as store,
        ):
            of = blender(store)
            of.prefetch(prompt, AUTO)
            done = of.run(prompt, BlendConfig(method="blend"))
    assert done.report.tiers == {REMOTE: len(prompt.chunks)}


def test_over_a_link_that_rises_what_is_being_computed_is_fetched_after_all(
    service: Service, prompt: Prompt
) -> None:
    assert meeting(prompt) > 1
    before = asked(service)
    with behind_a_link(service, rate()) as (store, link):
        link.weather, pace = Weather(dead=True), store._pace

        def rise(passes: int) -> None:
            if passes == 2:
                assert isinstance(pace, Known)
                pace.rate, link.weather = rate(1e-6), Weather()

        done = blender(store, at_start=rise).run(prompt, AUTO)
    assert (done.report.tiers, done.computed) == ({REMOTE: len(prompt.chunks)}, {})
    assert asked(service) - before == len(prompt.chunks) + 1
    here = blender(local(prompt.chunks)).run(prompt, BlendConfig(method="blend"))
    assert torch.equal(done.prefilled.logits, here.prefilled.logits)


def test_when_the_link_dies_what_was_computed_is_used_and_the_rest_is_fresh(
    service: Service, prompt: Prompt
) -> None:
    expected = meeting(prompt)
    with behind_a_link(service, rate()) as (store, link):
        link.weather = Weather(dead=True)

        def die(passes: int) -> None:
            if passes == 1 + expected:
                link.__exit__()

        done = blender(store, die).run(prompt, AUTO)
    assert adds_up(done)
    assert tiers(done) == [""] * (len(prompt.chunks) - expected) + [COMPUTED] * expected
    assert {unusable.kind for unusable in done.report.unusable} == {"unreachable"}
    here = local(prompt.chunks[-expected:])
    here.delete(blender(here).key(prompt.prefix, ()))
    same = blender(here).run(prompt, changed(AUTO, method=done.report.method))
    torch.testing.assert_close(  # alone, not together: torch's products of fewer rows may round otherwise
        done.prefilled.logits, same.prefilled.logits, rtol=1e-5, atol=1e-5
    )


def test_what_was_computed_is_stored_here_and_not_computed_again(
    service: Service, prompt: Prompt, tmp_path: Path
) -> None:
    expected, passes = meeting(prompt), [0]
    with behind_a_link(service, rate()) as (far, link):
        link.weather = Weather(dead=True)

        def heal(n: int) -> None:
            passes[0] = n
            if n == 1 + expected:
                link.weather = Weather()

        with LayeredStore(LMDBStore(tmp_path / "kv", 2**28), far) as store:
            of = blender(store, heal)
            done = of.run(prompt, AUTO)
            assert tiers(done).count(COMPUTED) == expected
            before = passes[0]
            assert of.remember(done.absent, done.computed) == expected
            assert passes[0] == before
            store.flush()
            assert stored(of, prompt) == {of.key(chunk.ids) for chunk in prompt.chunks}
            assert store.stats().remote.misses == 0  # type: ignore[union-attr]
            again = of.run(prompt, AUTO)
            assert torch.equal(again.prefilled.logits, done.prefilled.logits)
            assert tiers(again) == ["local"] * len(prompt.chunks)


def stored(of: Blender, prompt: Prompt) -> set[ChunkKey]:
    return of.store.present([of.key(chunk.ids) for chunk in prompt.chunks], remote=False)


def test_an_engine_hands_over_what_it_computed(service: Service, prompt: Prompt, tmp_path: Path) -> None:
    with (
        behind_a_link(service, rate()) as (far, _),
        LayeredStore(LMDBStore(tmp_path / "kv", 2**28), far) as store,
    ):
        engine = Engine(changed(CONFIG, blend=AUTO.model_dump()), reader(), store)
        engine.blender._costs = CostModel(0.0, ROW_S, 0.0, 0.0)
        report = engine.answer("Who sat on the mat?", PASSAGES).report
        store.flush()
        assert stored(engine.blender, prompt) == {engine.blender.key(chunk.ids) for chunk in prompt.chunks}
        assert report.tiers.get(REMOTE, 0) + report.tiers.get(COMPUTED, 0) == len(PASSAGES)
