"""Over a link that is neither quick nor slow all chunks come at once, in step with the prefill; what has to have happened
before is an event, never a time."""

from __future__ import annotations

import threading

import pytest
import torch

from blendserve.core import Prompt
from blendserve.store import ChunkKey
from blendserve.store.base import REMOTE
from blendserve.store.kdn.adapt import quickest
from blendserve.store.kdn.store import KdnStore
from tests.delivery.helpers import PATIENT_S, Known, Service
from tests.delivery.paced import (
    BLEND,
    HEADER,
    LAYERS,
    Steps,
    blender,
    delivered,
    whole,
)


class Asked:
    """Chunks that were asked for so far, and the most of which not all had gone."""

    def __init__(self, n: int) -> None:
        """n: at a time, of which it is told."""
        self._going, self.most, self._n = set[ChunkKey](), 0, n
        self._lock, self.all = threading.Lock(), threading.Event()

    def __call__(self, key: ChunkKey, l: int) -> None:
        with self._lock:
            (self._going.discard if l == LAYERS - 1 else self._going.add)(key)
            self.most = max(self.most, len(self._going))
        if self.most >= self._n:
            self.all.set()


def test_over_a_link_that_is_neither_quick_nor_slow_all_chunks_come_in_step_with_the_prefill(
    service: Service, prompt: Prompt
) -> None:
    """No layer of any chunk goes before all are under way, and none before the prefill wants it."""
    steps, asked, in_time = Steps(), Asked(len(prompt.chunks) + 1), []

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        asked(key, l)
        if l >= 0:
            in_time.append(asked.all.wait(PATIENT_S / 2) and steps.reached(l))

    with delivered(service, before, quickest) as (store, paced):
        weighed(store, 1.0)
        done = blender(store, steps).run(prompt, BLEND)
    assert in_time == [True] * (len(prompt.chunks) + 1) * LAYERS
    assert set(paced.asked.values()) == {1}
    assert done.report.tiers == {REMOTE: len(prompt.chunks)}
    assert torch.equal(done.prefilled.logits, whole(service, prompt, rule=quickest))


@pytest.mark.parametrize("times", [0.01, 5.0])
def test_else_two_are_under_way(service: Service, prompt: Prompt, times: float) -> None:
    asked = Asked(2)

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        asked(key, l)
        assert l == HEADER or asked.all.wait(PATIENT_S / 2)

    with delivered(service, before, quickest) as (store, _):
        weighed(store, times)
        done = blender(store).run(prompt, BLEND)
    assert asked.most == 2
    assert done.report.tiers == {REMOTE: len(prompt.chunks)}


def weighed(store: KdnStore, times: float) -> None:
    """All chunks take so many times as long to come as one takes to be computed, and none is worth that."""
    entries = store._known[1].values() if store._known else []
    n_bytes, tokens = sum(e.bodies[-1] for e in entries), max(e.n_tokens for e in entries)
    store._pace = Known(1.0)
    store.weigh(n_bytes / tokens / times, {})
