"""Chunks on another machine: method "auto" fetches over a fast link and computes over a slow one; prefixes stay here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.cost import CostModel
from blendserve.config import BlendConfig, changed
from blendserve.core import TokenIds
from blendserve.core import run as run_steps
from blendserve.fetch import TieredStore
from blendserve.fetch.link import PROBE_PAUSE
from blendserve.store import ChunkRecord, KVStore, MemoryStore, chunk_key
from blendserve.store.base import LOCAL
from blendserve.store.codecs.base import SLOW
from blendserve.store.codecs.raw import Raw
from tests.support.blending import check_report, some_prompt, tiny_blender
from tests.support.links import FarSource

CAP = 1 << 30
PROMPT = some_prompt([14, 9, 0, 20, 1, 9])
CHUNKS = [chunk.ids for chunk in PROMPT.chunks]
FILLED, TOKENS = 5, sum(map(len, CHUNKS))  # chunks that are not empty, and their tokens
AUTO, BLEND = BlendConfig(method="auto"), BlendConfig(method="blend", ratio=0.2)
ROW_S = 1e-3  # computing the whole prompt takes 62 ms
SLOW_S = 1.0  # a token, over a slow link


class Machine:
    """Without chunks of its own, unless `local` is given; another machine has every chunk."""

    def __init__(self, local: KVStore | None = None, chunks: Sequence[TokenIds] = CHUNKS) -> None:
        self.stored = MemoryStore(CAP)
        tiny_blender(self.stored, *chunks)
        self.source = FarSource(self.stored)
        self.store = TieredStore(local or MemoryStore(0), self.source)

    def blender(self, row_s: float = ROW_S) -> Blender:
        return tiny_blender(self.store, costs=CostModel(0.0, row_s, 0.0, 0.0))


@pytest.fixture
def far() -> Machine:
    return Machine()


def probe(by: Blender) -> None:
    by.fetcher.warm_up([by.key(CHUNKS[0])])


def run(by: Blender, blend: BlendConfig = AUTO) -> Prefilled:
    done = by.run(PROMPT, blend)
    check_report(done.report, PROMPT)
    return done


def kinds(done: Prefilled) -> list[str]:
    return [unusable.kind for unusable in done.report.unusable]


def test_chunks_that_are_slower_to_fetch_are_computed_but_for_a_fixed_method(far: Machine) -> None:
    made, far.source.token_s = far.blender(), SLOW_S
    first = run(made).report  # the rate of the link is not known yet
    assert (first.method, first.chunks_hit) == ("blend", FILLED)
    fetched = far.source.fetched.copy()
    done = run(made)
    made.fetcher.flush()
    assert far.source.fetched == fetched
    assert kinds(done) == [SLOW] * FILLED
    assert (done.report.method, done.report.chunks_hit, done.report.chunks_missing) == ("prefix", 0, FILLED)
    fresh = tiny_blender(MemoryStore(CAP)).run(PROMPT, BlendConfig())
    assert torch.equal(done.result.logits, fresh.result.logits)
    fixed = run(made, BlendConfig(method="blend"))
    assert (fixed.report.chunks_hit, kinds(fixed)) == (FILLED, [])


def test_requests_tell_what_their_chunks_save_and_take_to_compute(far: Machine) -> None:
    """With a row a second: the rows that a prefill does not run, and those of the chunk alone."""
    made, blend = far.blender(row_s=1.0), BlendConfig(method="blend", ratio=0.5)
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


def test_chunks_of_this_machine_are_used_over_a_slow_link_too() -> None:
    local = MemoryStore(CAP)
    tiny_blender(local, *(ids for ids in CHUNKS if ids != CHUNKS[3]))
    far = Machine(local)
    far.source.token_s = SLOW_S
    made = far.blender()
    probe(made)
    done = run(made)
    made.fetcher.flush()
    assert [(unusable.chunk, unusable.kind) for unusable in done.report.unusable] == [(3, SLOW)]
    assert (done.report.chunks_hit, done.report.tiers) == (FILLED - 1, {LOCAL: FILLED - 1})


def test_chunks_that_are_left_on_a_slow_link_or_are_nowhere_are_stored_here() -> None:
    local = MemoryStore(CAP)
    far = Machine(local, CHUNKS[:1])
    far.source.token_s = SLOW_S
    made = far.blender()
    probe(made)
    assert run_steps(made.writer.write_back(run(made).missing)) == FILLED
    assert len(list(local.keys())) == FILLED


def test_a_link_that_became_fast_is_used_again(far: Machine) -> None:
    """Each request over a slow link starts a probe, once the last one is old enough."""
    made, far.source.token_s = far.blender(), SLOW_S
    probe(made)
    assert kinds(run(made)) == [SLOW] * FILLED
    far.source.token_s = 0.0
    for _ in range(30):
        made.fetcher.flush()
        far.source.clock.advance(PROBE_PAUSE)
        done = run(made)
    assert (done.report.chunks_hit, kinds(done)) == (FILLED, [])


def test_no_store_is_asked_for_a_prefix(far: Machine) -> None:
    """It is computed once and kept in memory, for all namespaces; a record that an older release stored is ignored."""
    made = far.blender()
    old = chunk_key("reader", (), PROMPT.prefix, str(made.model.dtype))
    far.stored.put(old, ChunkRecord.encode(old, made.writer.chunks.compute([CHUNKS[0]])[0], Raw()))
    whole = run(tiny_blender(MemoryStore(CAP)), BLEND)
    for by, prompt in (
        (made, PROMPT),
        (made.over(far.store, "another"), PROMPT),
        (made, replace(PROMPT, prefix=(7, 8))),
    ):
        done = by.run(prompt, BLEND)
        assert done.report.tokens_exact >= len(prompt.prefix)
        assert done.explanation.parts[0].tier == LOCAL
    assert far.source.fetched[old] == 0
    assert far.source.fetched.total() == len([ids for ids in CHUNKS if ids]) * 3
    assert whole.report.tokens_exact == len(PROMPT.prefix)
