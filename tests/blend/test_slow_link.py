"""Method "auto" before a remote store: it loads over a quick link, computes over a slow one, and sees it become quick.

Costs are made up, so that nothing depends on how fast this machine is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

from blendserve.blend import slow_link
from blendserve.blend.blender import Blended, Blender
from blendserve.blend.cost import CostModel, LoadRate
from blendserve.config import BlendConfig
from blendserve.errors import StoreUnavailable
from blendserve.store import ChunkKey, ChunkView, KVStore, LayeredStore, MemoryStore, Snapshot
from blendserve.store.base import LOCAL, REMOTE, Sample
from blendserve.store.codecs.base import SLOW
from blendserve.store.wrapped import WrappedStore
from tests.support.blending import some_prompt
from tests.support.models import tiny_adapter

CAP = 1 << 30
PROMPT = some_prompt([14, 9, 0, 20, 1, 9])
FILLED = 5  # of its chunks
NEVER = 1e9
AUTO = BlendConfig(method="auto")


class Far(WrappedStore):
    """A store on another machine: every look-up takes so many seconds."""

    def __init__(self, store: KVStore) -> None:
        super().__init__(store)
        self.seconds, self.trip, self.asked = 0.0, 0.0, 0
        self.sampled: list[int] = []

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        with self._store.reading() as snapshot:
            yield cast(Snapshot, _Far(snapshot, self))

    far = True

    def sample(self, keys: Sequence[ChunkKey], n_bytes: int) -> Sample | None:
        """A hundredth of a chunk, in a hundredth of the time."""
        self.sampled.append(len(keys))
        found = next((coded for key in keys if (coded := self._store.coded(key))), None)
        return (
            Sample(self.trip, self.trip + self.seconds / 100, 0.01, found.shape.n_tokens) if found else None
        )

    def present(self, keys: Iterable[ChunkKey], remote: bool = True) -> set[ChunkKey]:
        return self._store.present(keys) if remote else set()


class _Far:
    def __init__(self, snapshot: Snapshot, store: Far) -> None:
        self._snapshot, self._store = snapshot, store

    def expect(self, keys: Sequence[ChunkKey], meanwhile: Any = None, saved: Any = None) -> None:
        self._store.asked += len(keys)
        if keys:
            time.sleep(self._store.seconds)

    def get(self, key: ChunkKey) -> ChunkView | None:
        return self._snapshot.get(key)

    def tier(self, key: ChunkKey) -> str:
        return REMOTE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._snapshot, name)


@pytest.fixture
def far() -> Far:
    return Far(MemoryStore(CAP))


@pytest.fixture(autouse=True)
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for tests that want them."""
    monkeypatch.setattr(slow_link.Link, "probe", lambda *_: None)


def blender(store: KVStore, seconds_per_row: float) -> Blender:
    made = Blender(tiny_adapter("llama"), "fingerprint", store, PROMPT.prefix, PROMPT.prefix)
    made._costs = CostModel(0.0, seconds_per_row, 0.0, 0.0)
    return made


def precomputed(store: KVStore, seconds_per_row: float) -> Blender:
    made = blender(store, seconds_per_row)
    made.precompute([chunk.ids for chunk in PROMPT.chunks])
    return made


def kinds(done: Blended) -> list[str]:
    return [unusable.kind for unusable in done.report.unusable]


def test_what_is_slower_to_fetch_than_to_compute_is_computed(far: Far) -> None:
    made = precomputed(far, seconds_per_row=1e-3)  # a tenth of a second for the prompt
    far.seconds = 0.5
    assert made.run(PROMPT, AUTO).report.chunks_hit == FILLED  # nothing is known of the link yet
    asked = far.asked
    done = made.run(PROMPT, AUTO)
    assert far.asked == asked
    assert kinds(done) == [SLOW] * FILLED
    assert (done.report.method, done.report.chunks_hit, done.report.chunks_missing) == ("prefix", 0, FILLED)
    assert "was estimated to take" in done.report.unusable[0].reason
    here = MemoryStore(CAP)
    precomputed(here, seconds_per_row=1e-3)
    for chunk in PROMPT.chunks:
        here.delete(made.key(chunk.ids))
    fresh = blender(here, seconds_per_row=1e-3).run(PROMPT, BlendConfig())
    assert torch.equal(done.prefilled.logits, fresh.prefilled.logits)


def test_what_stored_kv_saves_is_told_by_the_token_and_the_prefix_apart(far: Far) -> None:
    """Without the prefix its rows run, and the chunk behind it is one more of which some are recomputed."""
    made, blend = precomputed(far, seconds_per_row=1.0), BlendConfig(method="blend", ratio=0.5)
    saved = made.saved(PROMPT, blend, range(len(PROMPT.chunks)))
    prefix_key = made.key(PROMPT.prefix, ())
    whole = made.run(PROMPT, blend).prefilled.cost
    far.delete(prefix_key)
    assert list(saved.by_chunk) == [prefix_key]
    made = blender(far, seconds_per_row=1.0)  # that has not kept it
    more = (made.run(PROMPT, blend).prefilled.cost - whole) * len(PROMPT)
    assert more > len(PROMPT.prefix)
    assert saved.by_chunk[prefix_key] == pytest.approx(more)
    assert 0 < saved.per_token < 1


def test_over_a_quick_link_chunks_are_loaded(far: Far) -> None:
    made = precomputed(far, seconds_per_row=10.0)
    for _ in range(3):
        done = made.run(PROMPT, AUTO)
        assert (done.report.method, done.report.chunks_hit, kinds(done)) == ("blend", FILLED, [])


def test_a_fixed_method_does_what_it_says(far: Far) -> None:
    made = precomputed(far, seconds_per_row=1e-9)
    made._link.record(NEVER, 1)
    done = made.run(PROMPT, BlendConfig(method="blend"))
    assert (done.report.chunks_hit, kinds(done)) == (FILLED, [])


def test_what_is_near_is_used_all_the_same(far: Far) -> None:
    near = MemoryStore(CAP)
    precomputed(far, 1.0)
    with LayeredStore(near, far) as both:
        mine = precomputed(near, 1.0)
        gone = PROMPT.chunks[3].ids
        near.delete(mine.key(gone))
        made = blender(both, seconds_per_row=1.0)
        made._link.record(NEVER, 1)
        done = made.run(PROMPT, AUTO)
    assert [unusable.chunk for unusable in done.report.unusable] == [3]
    assert (done.report.chunks_hit, done.report.tiers) == (FILLED - 1, {LOCAL: FILLED - 1})


def test_what_was_left_there_is_not_computed_again_to_be_stored(far: Far) -> None:
    made = precomputed(far, seconds_per_row=1e-9)
    made._link.record(NEVER, 1)
    done = made.run(PROMPT, AUTO)
    assert done.absent
    assert made.remember(done.absent) == 0


def test_what_is_nowhere_is_stored_although_the_link_is_slow(far: Far) -> None:
    made = blender(far, seconds_per_row=1e-9)
    made._link.record(NEVER, 1)
    assert made.remember(made.run(PROMPT, AUTO).absent) == FILLED + 1  # the prefix, too
    assert len(list(far.keys())) == FILLED + 1


def test_a_link_that_is_quick_again_is_used_again(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(slow_link, "PROBE_S", 0.0)
    made = precomputed(far, seconds_per_row=10.0)
    made._link.record(5_000.0, len(PROMPT))
    assert kinds(made.run(PROMPT, AUTO)) == [SLOW] * FILLED
    end = time.monotonic() + 300
    while (done := made.run(PROMPT, AUTO)).report.chunks_hit < FILLED:
        assert time.monotonic() < end, made._link.seconds(1)
        time.sleep(0.01)
    assert kinds(done) == []


def test_a_link_is_looked_at_now_and_then_only(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(slow_link, "PROBE_S", 3_600.0)
    made = precomputed(far, seconds_per_row=1e-9)
    made._link.record(NEVER, 1)
    for _ in range(3):
        made.run(PROMPT, AUTO)
    wait_for(lambda: bool(far.sampled))
    assert far.sampled == [FILLED]
    assert far.asked == 0


@pytest.mark.parametrize(("comes", "peace"), [(True, 195.0), (False, 55.0)])
def test_looking_takes_up_a_fiftieth_of_a_link_at_most_and_a_dead_one_is_looked_at_each_minute(
    far: Far, monkeypatch: pytest.MonkeyPatch, comes: bool, peace: float
) -> None:
    monkeypatch.undo()
    made = precomputed(far, seconds_per_row=1e-9)
    made._link.record(NEVER, 1)
    now, sizes = [1_000.0], list[int]()

    def sample(store: KVStore, keys: Sequence[ChunkKey], n_bytes: int) -> None:
        sizes.append(n_bytes)
        now[0] += 4.0  # seconds that it takes
        if not comes:
            raise StoreUnavailable("nobody answers")

    monkeypatch.setattr(Far, "sample", sample)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    keys = [made.key(PROMPT.chunks[0].ids)]
    made._link._probed(far, keys)
    for later, n in ((peace, 1), (6.0, 2)):  # seconds since the last look, and how many there were by then
        now[0] += later
        made._link.probe(far, keys)
        made.wait_for_sample()
        assert len(sizes) == n
    assert sizes[1] == 2 * sizes[0]


def test_an_engine_knows_a_slow_link_before_its_first_request(far: Far) -> None:
    made = precomputed(far, seconds_per_row=1e-3)
    far.seconds = 5.0
    made.sample_link()
    assert kinds(made.run(PROMPT, AUTO)) == [SLOW] * FILLED
    assert far.asked == 0


def test_a_round_trip_is_counted_once_a_request(far: Far) -> None:
    made = precomputed(far, seconds_per_row=1e-3)
    tokens = sum(len(chunk) for chunk in PROMPT.chunks)
    far.trip = 0.01
    made.sample_link()
    assert made._link.seconds(tokens) == pytest.approx(0.01)
    made._link.record(0.01 + 2.0, tokens)
    half = 2.0 / 2  # the mean of none and all of it
    assert made._link.seconds(tokens) == pytest.approx(0.01 + half)


def test_what_decoding_takes_counts_too(far: Far) -> None:
    made = precomputed(far, seconds_per_row=1e-3)
    made.sample_link()
    assert kinds(made.run(PROMPT, AUTO)) == []
    made._link._decoding = LoadRate()
    made._link.decoded(1.0, 1)
    assert kinds(made.run(PROMPT, AUTO)) == [SLOW] * FILLED


def test_a_store_on_this_machine_is_no_link() -> None:
    made = precomputed(MemoryStore(CAP), seconds_per_row=1e-9)
    made.sample_link()
    made._link.record(NEVER, 1)
    assert kinds(made.run(PROMPT, AUTO)) == []


def wait_for(what: Callable[[], bool]) -> None:
    end = time.perf_counter() + 60
    while not what():
        assert time.perf_counter() < end
        time.sleep(0.01)
