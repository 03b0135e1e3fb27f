"""Method "auto" before a remote store: it loads over a quick link, computes over a slow one, and sees it become quick.

Costs are made up, so that nothing depends on how fast this machine is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

from blendserve.blend import slow_link
from blendserve.blend.blender import Blended, Blender
from blendserve.blend.cost import CostModel
from blendserve.blend.lookup import SLOW
from blendserve.config import BlendConfig
from blendserve.store import ChunkKey, ChunkView, KVStore, LayeredStore, MemoryStore, Snapshot
from blendserve.store.base import LOCAL, REMOTE
from blendserve.store.wrapped import WrappedStore
from tests.blend.helpers import some_prompt
from tests.tiny import tiny_adapter

CAP = 1 << 30
PROMPT = some_prompt([14, 9, 0, 20, 1, 9])
FILLED = 5  # of its chunks
NEVER = 1e9
AUTO = BlendConfig(method="auto")


class Far(WrappedStore):
    """A store on another machine: every look-up takes so many seconds."""

    def __init__(self, store: KVStore) -> None:
        super().__init__(store)
        self.seconds, self.asked = 0.0, 0

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        with self._store.reading() as snapshot:
            yield cast(Snapshot, _Far(snapshot, self))

    def present(self, keys: Iterable[ChunkKey], remote: bool = True) -> set[ChunkKey]:
        return self._store.present(keys) if remote else set()


class _Far:
    def __init__(self, snapshot: Snapshot, store: Far) -> None:
        self._snapshot, self._store = snapshot, store

    def expect(self, keys: Sequence[ChunkKey]) -> None:
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
    assert (done.report.method, done.report.chunks_hit, done.report.chunks_missing) == ("full", 0, FILLED)
    assert "was estimated to take" in done.report.unusable[0].reason
    assert torch.equal(done.prefilled.logits, made.run(PROMPT, BlendConfig(method="full")).prefilled.logits)


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
    end = time.monotonic() + 60
    while (done := made.run(PROMPT, AUTO)).report.chunks_hit < FILLED:
        assert time.monotonic() < end, made._link.seconds(1)
        time.sleep(0.01)
    assert kinds(done) == []


def test_a_link_is_looked_at_now_and_then_only(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    fetched: list[int] = []
    monkeypatch.setattr(slow_link.Link, "_fetch", lambda self, store, keys: fetched.append(len(keys)))
    monkeypatch.setattr(slow_link, "PROBE_S", 3_600.0)
    made = precomputed(far, seconds_per_row=1e-9)
    made._link.record(NEVER, 1)
    for _ in range(3):
        made.run(PROMPT, AUTO)
    end = time.monotonic() + 60
    while not fetched and time.monotonic() < end:
        time.sleep(0.01)
    assert fetched == [FILLED]
