"""Near-duplicates found by the token ids that stores tell of their chunks, here and on other machines."""

from __future__ import annotations

from typing import Any

import pytest

from blendserve.blend.blender import Blender
from blendserve.blend.cost import CostModel
from blendserve.blend.near import NearDuplicates
from blendserve.config import BlendConfig, Method
from blendserve.core import BlendReport, Chunk, Prompt, TokenIds
from blendserve.errors import StoreUnavailable
from blendserve.fetch import TieredStore
from blendserve.fetch.tiered import REST_S
from blendserve.store import KVStore, MemoryStore
from tests.support.blending import some_ids
from tests.support.links import FarSource
from tests.support.models import tiny_adapter
from tests.support.stores import CAP, FaultyStore
from tests.support.waiting import ManualClock

PREFIX, SUFFIX = some_ids(5), some_ids(4, 1)
OLD, OTHER = some_ids(90, 2), some_ids(80, 3)
NEW, NEWER = (*OLD[:40], 96, *OLD[41:]), (*OTHER[:30], 96, *OTHER[31:])


def blender(store: KVStore, *known: TokenIds, **options: Any) -> Blender:
    """Has stored these chunks."""
    by = Blender(tiny_adapter("llama"), "fingerprint", store, PREFIX, PREFIX, **options)
    if known:
        by.writer.precompute(known)
    by.near.refresh()
    return by


def ask(by: Blender, *chunks: TokenIds, method: Method = "blend") -> BlendReport:
    blend = BlendConfig(method=method, policy="none", correction="none", near=True)
    return by.run(Prompt(PREFIX, tuple(map(Chunk, chunks)), SUFFIX), blend).report


def donors(by: Blender, *chunks: TokenIds, method: Method = "blend") -> list[str]:
    """The donors of a prompt of these chunks."""
    return [donor for found in ask(by, *chunks, method=method).near for donor in found.donors]


def test_donors_come_from_both_stores_and_survive_the_loss_of_one() -> None:
    clock, near, far = ManualClock(), MemoryStore(CAP), MemoryStore(CAP)
    remote = FaultyStore(far, clock)
    blender(far, OTHER)
    blender(near, OLD)
    with TieredStore(near, remote, clock=clock) as store:
        by = blender(store)
        here, there = by.key(OLD), by.key(OTHER)
        assert donors(by, NEW, NEWER) == [here.hex(), there.hex()]
        by.fetcher.flush()
        near.delete([there])  # the copy that the request left
        remote.batches.clear()
        assert not donors(by, some_ids(90, 70), some_ids(90, 71))
        assert len(remote.batches) <= 1  # for the chunks themselves
        remote.down = True
        assert donors(by, NEW, NEWER) == [here.hex()]
        by.near.refresh()
        assert by.near.index.keys == {here, there}
        remote.down = False
        clock.advance(REST_S)
        assert donors(by, NEWER) == [there.hex()]


def test_a_store_that_fails_has_no_donors_and_requests_are_answered() -> None:
    store = FaultyStore(MemoryStore(CAP))
    by = blender(store, OLD)
    assert donors(by, NEW)
    store.down = True
    with pytest.raises(StoreUnavailable):
        store.describe([by.key(OLD)])
    report = ask(by, NEW)
    assert (report.method, report.tokens_exact, report.tokens_reused) == ("blend", len(PREFIX), 0)
    assert by.key(OLD) in by.near.index


@pytest.mark.parametrize(("seconds", "method", "n"), [(0.1, "auto", 1), (9.0, "auto", 0), (9.0, "blend", 1)])
def test_auto_leaves_donors_whose_fetching_takes_longer_than_computing(
    seconds: float, method: Method, n: int
) -> None:
    store = MemoryStore(CAP)
    source = FarSource(store)
    costs = CostModel(1e-6, 1.0, 0.0, 1e-6)  # a row costs a second
    blender(store, OLD)
    by = blender(TieredStore(MemoryStore(0), source), costs=costs)
    by.near = NearDuplicates(store, by.key)
    by.near.refresh()
    source.token_s = seconds
    by.fetcher.warm_up([by.key(OLD)])
    assert len(donors(by, NEW, method=method)) == n
