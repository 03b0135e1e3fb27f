"""A store on another machine: method "auto" fetches over a fast link and computes over a slow one; the prefix is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.cost import CostModel
from blendserve.config import BlendConfig, changed
from blendserve.core import run as run_steps
from blendserve.fetch.fetcher import ChunkRequest, KVFetcher
from blendserve.fetch.link import DEAD_LINK_S, PROBE_PAUSE, PROBE_S, LinkEstimator
from blendserve.store import ChunkRecord, KVStore, LayeredStore, MemoryStore, chunk_key
from blendserve.store.codecs.raw import Raw
from blendserve.store.request_reads import LOCAL
from tests.support.blending import check_report, some_prompt, tiny_blender
from tests.support.links import FarStore

CAP = 1 << 30
PROMPT = some_prompt([14, 9, 0, 20, 1, 9])
CHUNKS = [chunk.ids for chunk in PROMPT.chunks]
FILLED, TOKENS = 5, sum(map(len, CHUNKS))  # chunks that are not empty, and their tokens
AUTO, BLEND = BlendConfig(method="auto"), BlendConfig(method="blend", ratio=0.2)
SLOW = "slow link"
ROW_S = 1e-3  # computing the whole prompt takes 62 ms
SLOW_S = 1.0  # a token, over a slow link


def blender(store: KVStore, row_s: float = ROW_S, link: LinkEstimator | None = None) -> Blender:
    clock = store.clock if isinstance(store, FarStore) else None
    made = link or (LinkEstimator(clock) if clock else LinkEstimator())
    return tiny_blender(store, costs=CostModel(0.0, row_s, 0.0, 0.0), fetcher=KVFetcher(store, made))


@pytest.fixture
def far() -> FarStore:
    """Holds every chunk."""
    store = FarStore(MemoryStore(CAP))
    blender(store).writer.precompute(CHUNKS)
    return store


def probe(by: Blender) -> None:
    by.fetcher.warm_up([ChunkRequest(by.key(CHUNKS[0]), len(CHUNKS[0]))])


def run(by: Blender, blend: BlendConfig = AUTO) -> Prefilled:
    done = by.run(PROMPT, blend)
    check_report(done.report, PROMPT)
    return done


def kinds(done: Prefilled) -> list[str]:
    return [unusable.kind for unusable in done.report.unusable]


def test_chunks_that_are_slower_to_fetch_are_computed_but_for_a_fixed_method_or_a_local_store(
    far: FarStore,
) -> None:
    made, far.token_s = blender(far), SLOW_S
    first = run(made).report  # the rate of the link is not known yet
    assert (first.method, first.chunks_hit) == ("blend", FILLED)
    asked = far.expected
    done = run(made)
    made.fetcher.wait()
    assert far.expected == asked
    assert kinds(done) == [SLOW] * FILLED
    assert (done.report.method, done.report.chunks_hit, done.report.chunks_missing) == ("prefix", 0, FILLED)
    here = MemoryStore(CAP)
    fresh = blender(here).run(PROMPT, BlendConfig())
    assert torch.equal(done.result.logits, fresh.result.logits)
    assert run_steps(made.writer.write_back(done.missing)) == 0  # they are stored there
    fixed = run(made, BlendConfig(method="blend"))
    assert (fixed.report.chunks_hit, kinds(fixed)) == (FILLED, [])
    far.is_far = False
    assert kinds(run(made)) == []


def test_requests_tell_what_their_chunks_save_and_take_to_compute(far: FarStore) -> None:
    """With a row a second: the rows that a prefill does not run, and those of the chunk alone."""
    made, blend = blender(far, row_s=1.0), BlendConfig(method="blend", ratio=0.5)
    keys = {i: made.key(ids) for i, ids in enumerate(CHUNKS) if ids}
    auto = changed(blend, method="auto")
    requests = made.planner.requests(PROMPT, auto, keys, PROMPT.prefix)
    ran = run(made, blend).result.cost * len(PROMPT)
    assert sum(r.saved_s or 0.0 for r in requests.values()) == pytest.approx(
        TOKENS + len(PROMPT.suffix) - ran
    )
    assert [(r.key, r.n_tokens, r.compute_s) for r in requests.values()] == [
        (keys[i], len(CHUNKS[i]), len(CHUNKS[i])) for i in keys
    ]


def test_chunks_of_this_machine_are_used_over_a_slow_link_too(far: FarStore) -> None:
    near = MemoryStore(CAP)
    blender(near).writer.precompute([ids for ids in CHUNKS if ids != CHUNKS[3]])
    far.token_s = SLOW_S
    with LayeredStore(near, far) as both:
        made = blender(both, link=LinkEstimator(far.clock))
        probe(made)
        done = run(made)
        made.fetcher.wait()
    assert [(unusable.chunk, unusable.kind) for unusable in done.report.unusable] == [(3, SLOW)]
    assert (done.report.chunks_hit, done.report.tiers) == (FILLED - 1, {LOCAL: FILLED - 1})


def test_chunks_that_no_machine_has_are_stored_over_a_slow_link_too() -> None:
    far = FarStore(MemoryStore(CAP))
    far.latency_s = 100.0
    made = blender(far)
    probe(made)
    assert run_steps(made.writer.write_back(run(made).missing)) == FILLED
    assert len(list(far.keys())) == FILLED


def test_a_link_that_became_fast_is_used_again(far: FarStore) -> None:
    """Each request over a slow link starts a sample, once the last one is old enough."""
    made, far.token_s = blender(far), SLOW_S
    probe(made)
    assert kinds(run(made)) == [SLOW] * FILLED
    far.token_s = 0.0
    for _ in range(30):
        made.fetcher.wait()
        far.clock.advance(PROBE_PAUSE)
        done = run(made)
    assert (done.report.chunks_hit, kinds(done)) == (FILLED, [])


@pytest.mark.parametrize(
    ("latency_s", "down", "pause_s"),
    [(0.0, False, PROBE_S), (4.0, False, 4.0 * PROBE_PAUSE), (4.0, True, DEAD_LINK_S)],
)
def test_samples_use_a_fiftieth_of_a_link_and_a_dead_one_is_tried_each_minute(
    far: FarStore, latency_s: float, down: bool, pause_s: float
) -> None:
    far.latency_s, far.down, began = latency_s, down, far.clock.now
    link, keys = LinkEstimator(far.clock), [blender(far).key(CHUNKS[0])]
    for later_s, n in ((0.0, 1), (pause_s - 0.5, 1), (pause_s + 0.5, 2)):
        far.clock.advance(began + later_s - far.clock.now)
        link.probe_later(far, keys)
        link.wait()
        assert len(far.sampled) == n
    assert far.sampled[1] == 2 * far.sampled[0]
    assert far.expected == 0


def test_a_round_trip_counts_once_a_request(far: FarStore) -> None:
    link, far.latency_s = LinkEstimator(far.clock), 0.01
    assert link.seconds(1) is None
    probe(blender(far, link=link))
    assert link.seconds(TOKENS) == pytest.approx(0.01)
    link.record(0.01 + 2.0, TOKENS)
    assert link.seconds(TOKENS) == pytest.approx(0.01 + 2.0 / 2)  # the mean of both rates
    link.record_decoding(3.0, TOKENS)
    assert link.seconds(TOKENS) == pytest.approx(0.01 + 2.0 / 2 + 3.0)


def test_no_store_is_asked_for_a_prefix(far: FarStore) -> None:
    """It is computed once and kept in memory, for all namespaces; a record that an older release stored is ignored."""
    made = blender(far)
    old = chunk_key("reader", (), PROMPT.prefix, str(made.adapter.dtype))
    far.put(old, ChunkRecord.encode(old, made.writer.chunks.compute([CHUNKS[0]])[0], Raw()))
    whole = run(blender(MemoryStore(CAP)), BLEND)
    for by, prompt in (
        (made, PROMPT),
        (made.over(far, "another"), PROMPT),
        (made, replace(PROMPT, prefix=(7, 8))),
    ):
        done = by.run(prompt, BLEND)
        assert done.report.tokens_exact >= len(prompt.prefix)
        assert done.explanation.parts[0].tier == LOCAL
    assert far.fetched[old] == 0
    assert far.expected == len([ids for ids in CHUNKS if ids]) * 3
    assert whole.report.tokens_exact == len(PROMPT.prefix)
