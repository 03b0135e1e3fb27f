"""Work on the model may be closed before any layer: nothing of it stays open, and the next request is answered alike."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig
from blendserve.core import Steps, run
from blendserve.models.kv_cache import KVCache
from blendserve.store import LMDBStore
from tests.support.blending import missing, some_prompt, tiny_blender
from tests.support.engines import PASSAGES, QUESTIONS, queued, toy_batch, toy_engine

PROMPT = some_prompt([9, 3, 14, 6])
CHUNKS = [chunk.ids for chunk in PROMPT.chunks]


class CountingStore(LMDBStore):
    """Counts snapshots that are open."""

    snapshots = 0

    @contextmanager
    def snapshot(self) -> Iterator[Any]:
        with super().snapshot() as snapshot:
            self.snapshots += 1
            try:
                yield snapshot
            finally:
                self.snapshots -= 1


@pytest.fixture
def blender(tmp_path: Path) -> Iterator[Blender]:
    """Over a store without the last chunk."""
    with CountingStore(tmp_path, 1 << 30) as store:
        yield tiny_blender(store, *CHUNKS[:-1])


def advance(steps: Steps[Any], n: int) -> bool:
    """Whether there are so many pauses."""
    for _ in range(n):
        try:
            next(steps)
        except StopIteration:
            return False
    return True


def loader_threads() -> int:
    return sum(thread.name.startswith("blendserve-") for thread in threading.enumerate())


@pytest.mark.parametrize("policy", ["query", "deviation"])
def test_a_prefill_closed_before_any_layer_leaves_nothing_open(blender: Blender, policy: Any) -> None:
    blend, store = BlendConfig(method="blend", policy=policy, ratio=0.5), blender.store
    assert isinstance(store, CountingStore)
    before, n = loader_threads(), 0
    expected = blender.run(PROMPT, blend).result.logits
    for n in count(1):
        steps = blender.prefill(PROMPT, blend, cache=KVCache(blender.model, len(PROMPT)))
        if not advance(steps, n):
            break
        assert store.snapshots == 1
        steps.close()
        assert (store.snapshots, loader_threads()) == (0, before)
    assert n == 1 + blender.model.n_layers * (1 + (policy == "query"))
    assert torch.equal(blender.run(PROMPT, blend).result.logits, expected)


@pytest.mark.parametrize("others", [None, "skip"])
def test_a_chunk_whose_computation_is_closed_can_be_computed_by_another(
    blender: Blender, others: Any
) -> None:
    last = CHUNKS[-1]
    for n in count(1):
        steps: Steps[Any] = (
            blender.writer.precompute_one(last, others)
            if others
            else blender.writer.write_back(missing(last))
        )
        if not advance(steps, n):
            break
        assert blender.writer.missing(CHUNKS) == [last]
        steps.close()
    assert not blender.writer.missing(CHUNKS)
    assert run(blender.writer.write_back(missing(last))) == 0


def test_a_request_cancelled_before_any_layer_frees_its_slot() -> None:
    with toy_engine() as engine:
        engine.precompute(PASSAGES)
        batch, n = toy_batch(engine), 0
        for n in count(1):
            request, listener = queued(batch, QUESTIONS[0], PASSAGES, max_new_tokens=1)
            batch.scheduler.submit(request)
            for _ in range(n):
                batch.scheduler.step()
            if batch.scheduler.load == (0, 0):
                break
            assert batch.scheduler.load == (0, 1)
            batch.scheduler.cancel(request)
            batch.scheduler.step()
            assert batch.scheduler.load == (0, 0)
            assert not batch.scheduler.has_work
        assert n > 2 * engine.reader.adapter.n_layers
        assert (
            listener.answer().token_ids == engine.answer(QUESTIONS[0], PASSAGES, max_new_tokens=1).token_ids
        )


def test_a_prefill_that_stops_with_its_scheduler_is_closed() -> None:
    with toy_engine() as engine:
        batch = toy_batch(engine)
        request, _ = queued(batch, QUESTIONS[0], PASSAGES)
        batch.scheduler.submit(request)
        batch.scheduler.step()
        assert batch.scheduler.load == (0, 1)
        batch.scheduler.stop()
        assert (batch.scheduler.load, batch.scheduler.in_flight) == ((0, 0), False)
