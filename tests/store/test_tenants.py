"""One tenant learns nothing of another from keys, listings or counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from blendserve.store import KVStore, LMDBStore, MemoryStore, StoreStats
from blendserve.store.policies import LRU, TinyLFU
from tests.store.helpers import chunk, key_of, read, tiered

UNIT = chunk(10).n_bytes


@pytest.fixture(params=["lmdb", "memory", "lmdb behind tiers"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KVStore:
    admission = TinyLFU(seed=1)
    if request.param == "memory":
        return MemoryStore(4 * UNIT, LRU(), admission)
    store = LMDBStore(tmp_path, 4 * UNIT, eviction=LRU(), admission=admission)
    return store if request.param == "lmdb" else tiered(store, admission)


def seen(stats: StoreStats) -> dict[str, object]:
    return {k: v for k, v in stats.to_dict().items() if k not in {"path", "kind", "cap_bytes"}}


def test_nothing_that_others_do_moves_a_tenants_counters(store: KVStore) -> None:
    """Whatever tenant a does, short of pushing out chunks of b that are not pinned."""
    store.put(key_of(1, "b"), chunk(10), pin=True)
    read(store, key_of(1, "b"))
    read(store, key_of(2, "b"))
    before = seen(store.stats("b"))
    for n in range(9):
        for _ in range(n):
            read(store, key_of(n, "a"))
        store.put(key_of(n, "a"), chunk(10))
        read(store, key_of(n, "a"))
    store.pin([key_of(8, "a")])
    store.wants(key_of(50, "a"), UNIT)
    everything = store.stats()
    assert everything.admissions_refused
    assert everything.evictions
    assert everything.hits > 5
    assert seen(store.stats("b")) == before
    assert (before["hits"], before["misses"], before["chunks"], before["pins"]) == (1, 1, 1, 1)
    assert before["evictions"] is before["admissions_refused"] is None


def test_tenants_add_up_to_the_whole(store: KVStore) -> None:
    for tenant in ("a", "b"):
        for n in range(2):
            store.put(key_of(n, tenant), chunk(10), pin=n == 0)
            read(store, key_of(n, tenant))
    total, one, other = store.stats(), store.stats("a"), store.stats("b")
    for name in ("chunks", "tokens", "bytes", "pins", "hits", "misses"):
        assert getattr(total, name) == getattr(one, name) + getattr(other, name) > 0 or name == "misses"


def test_readers_that_may_not_write_still_count(tmp_path: Path) -> None:
    with LMDBStore(tmp_path, 2 * UNIT) as store:
        store.put(key_of(1), chunk(10))
    with LMDBStore(tmp_path, 2 * UNIT, read_only=True) as store:
        read(store, key_of(1))
        assert store.stats().hits == 1
    with LMDBStore(tmp_path, 2 * UNIT) as store:
        assert store.stats().hits == 0
