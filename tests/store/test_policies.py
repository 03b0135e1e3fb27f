"""Eviction and admission at the cap, by example. test_machine.py has any history under LRU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.config import StoreConfig
from blendserve.errors import StoreFull
from blendserve.store import KVStore, LMDBStore, MemoryStore, open_store
from blendserve.store.policies import LRU, Admission, Always, Eviction, Refuse, TinyLFU
from tests.support.stores import SHARED_KINDS, STORES, UNIT, chunk, key_of, read, stored
from tests.support.valkey import store_at

Make = Callable[..., KVStore]


@pytest.fixture(params=[pytest.param("memory"), *SHARED_KINDS])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Opens a store for this many chunks of 10 tokens, at one place."""
    stores: list[KVStore] = []

    def build(units: int, eviction: Eviction | None = None, admission: Admission | None = None) -> KVStore:
        cap, eviction = units * UNIT, eviction or LRU()
        if request.param == "memory":
            stores.append(MemoryStore(cap, eviction, admission))
        else:
            of: Make = LMDBStore if request.param == "lmdb" else store_at
            stores.append(of(tmp_path, cap, eviction=eviction, admission=admission))
        return stores[-1]

    yield build
    for store in stores:
        assert store.verify().bad == ()
        store.close()


def ask(store: KVStore, *numbers: int) -> None:
    for n in numbers:
        read(store, key_of(n))


def put(store: KVStore, *numbers: int) -> bool:
    return False not in [store.put(key_of(n), chunk(10)) for n in numbers]


def test_a_full_store_without_eviction_refuses_chunks(make: Make) -> None:
    store = make(2, eviction=Refuse())
    assert put(store, 0, 1)
    with pytest.raises(StoreFull) as error:
        put(store, 2)
    assert error.value.setting == "store.cap_gb"
    assert not store.wants(key_of(2), UNIT)
    assert stored(store) == {0, 1}


def test_a_new_chunk_needs_more_requests_than_its_victims(make: Make) -> None:
    store = make(2, admission=TinyLFU(seed=1))
    assert put(store, 0, 1)
    ask(store, 0, 1, 1, 5)  # one request each for 0 and 5: the stored one stays
    assert not store.wants(key_of(5), UNIT)
    assert not put(store, 5)
    ask(store, 5)
    assert store.wants(key_of(5), UNIT)
    assert put(store, 5)
    assert stored(store) == {1, 5}
    assert store.stats().admissions_refused == 2
    assert store.put(key_of(1), chunk(10, seed=3))  # replacing needs no admission
    assert store.put(key_of(9), chunk(20), pin=True)  # nor does pinning
    assert stored(store) == {9}


def test_requests_are_weighted_by_bytes(make: Make) -> None:
    store = make(3, admission=TinyLFU(seed=1))
    assert put(store, 0, 1, 2)
    ask(store, 0, 1, 2, 7, 7)
    assert store.wants(key_of(7), UNIT)
    ask(store, 0)
    assert store.wants(key_of(7), 3 * UNIT)  # 2 x 3 against 2 + 1 + 1
    ask(store, 0, 1)
    assert not store.wants(key_of(7), 3 * UNIT)  # 2 x 3 against 3 + 2 + 1


def test_uses_count_before_they_are_written(make: Make) -> None:
    """Chunk 0 is the oldest, but has been read: the victim is 1, which has no requests."""
    store = make(2, admission=TinyLFU(seed=1))
    assert put(store, 0, 1)
    ask(store, 0, 0, 0, 5)
    assert put(store, 5)
    assert stored(store) == {0, 5}


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_a_later_use_written_by_another_process_stays(kind: str, tmp_path: Path) -> None:
    place = STORES[kind](tmp_path)
    with place.open() as store:
        for n in range(5):
            place.clock.advance(1)
            put(store, n)
        ask(store, 0)  # noted, and written with the next chunk that needs room
        with place.other() as other:
            for n in (1, 2, 3, 4, 0):
                place.clock.advance(1)
                ask(other, n)
        place.clock.advance(1)
        put(store, 5)
        assert stored(store) == {0, 2, 3, 4, 5}


@pytest.mark.parametrize("make", SHARED_KINDS, indirect=True)
def test_each_process_counts_its_own_requests(make: Make) -> None:
    """A process that has seen no request for the victim admits a chunk after one request."""
    here, elsewhere = (make(1, admission=TinyLFU(seed=1)) for _ in range(2))
    put(here, 0)
    ask(here, 0, 0, 5)
    assert not put(here, 5)
    ask(elsewhere, 5)
    assert put(elsewhere, 5)
    assert stored(here) == {5}


@given(st.lists(st.integers(0, 40), max_size=300))
def test_the_sketch_never_underestimates_until_it_ages(asked: list[int]) -> None:
    """And up to the limit of its counters."""
    policy = TinyLFU(seed=7)
    for n in asked:
        policy.record_access(key_of(n))
    for n in set(asked):
        assert min(asked.count(n), TinyLFU.TOP) <= policy.frequency(key_of(n)) <= asked.count(n) + 1
    assert policy.frequency(key_of(99)) == 0
    policy = TinyLFU(seed=7)
    for n in (*[0] * 12, *range(1, 1000)):
        policy.record_access(key_of(n))
    assert policy.frequency(key_of(0)) == 5  # 11 behind the doorkeeper, halved


def test_admission_keeps_popular_chunks_under_a_scan() -> None:
    """Zipf over 300 chunks, and as many requests for chunks that never return; room for 30."""
    hits = []
    for admission in (Always(), TinyLFU(seed=3)):
        dice, store = random.Random(5), MemoryStore(30 * UNIT, LRU(), admission)
        for i, n in enumerate(dice.choices(range(300), [1 / (n + 1) for n in range(300)], k=1000)):
            for key in (key_of(n), key_of(1000 + i)):
                if read(store, key) is None:
                    store.put(key, chunk(10))
        hits.append(store.stats().hits)
    assert hits[1] > 1.4 * hits[0], hits


def test_the_settings_choose_the_policies(tmp_path: Path) -> None:
    with open_store(StoreConfig(cap_gb=2 * UNIT / 1e9, eviction="refuse"), tmp_path) as store:
        store.put(key_of(0), chunk(20))
        with pytest.raises(StoreFull):
            put(store, 1)
    with open_store(StoreConfig(cap_gb=2 * UNIT / 1e9), tmp_path) as store:
        assert not put(store, 1)  # no requests yet
    with open_store(StoreConfig(cap_gb=2 * UNIT / 1e9, admission="always"), tmp_path) as store:
        assert put(store, 1)
