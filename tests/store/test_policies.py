"""Eviction and admission at the cap, by example. test_machine.py has any history under LRU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.config import StoreConfig
from blendserve.errors import StoreFull
from blendserve.fetch import open_store
from blendserve.store import KVStore, LMDBStore, MemoryStore
from blendserve.store.policies import LRU, Refuse, TinyLFU
from tests.support.places import SHARED_KINDS, STORES
from tests.support.stores import UNIT, chunk, key_of, put_kv, read, stored
from tests.support.valkey import store_at

every_kind = pytest.mark.parametrize("kind", ["memory", *SHARED_KINDS])


def opened(kind: str, path: Path, units: int, **policies: Any) -> KVStore:
    """A store for this many chunks of 10 tokens."""
    policies, cap = {"eviction": LRU(), **policies}, units * UNIT
    if kind == "memory":
        return MemoryStore(cap, **policies)
    return LMDBStore(path, cap, **policies) if kind == "lmdb" else store_at(path, cap, **policies)


def ask(store: KVStore, *numbers: int) -> None:
    for n in numbers:
        read(store, key_of(n))


def put(store: KVStore, *numbers: int) -> bool:
    return False not in [put_kv(store, key_of(n), chunk(10)) for n in numbers]


@every_kind
def test_a_full_store_without_eviction_refuses_chunks(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path, 2, eviction=Refuse()) as store:
        assert put(store, 0, 1)
        with pytest.raises(StoreFull) as error:
            put(store, 2)
        assert error.value.setting == "store.cap_gb"
        assert not store.admits(key_of(2), UNIT)
        assert stored(store) == {0, 1}


@every_kind
def test_a_new_chunk_needs_more_requests_than_its_victims(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path, 2, admission=TinyLFU(seed=1)) as store:
        assert put(store, 0, 1)
        ask(store, 0, 1, 1, 5)  # one request each for 0 and 5: the stored one stays
        assert not store.admits(key_of(5), UNIT)
        assert not put(store, 5)
        ask(store, 5)
        assert store.admits(key_of(5), UNIT)
        assert put(store, 5)
        assert stored(store) == {1, 5}
        assert store.stats().admissions_refused == 2
        assert put_kv(store, key_of(1), chunk(10, seed=3))  # replacing needs no admission
        assert put_kv(store, key_of(9), chunk(20), pin=True)  # nor does pinning
        assert stored(store) == {9}


@every_kind
def test_requests_are_weighted_by_bytes(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path, 3, admission=TinyLFU(seed=1)) as store:
        assert put(store, 0, 1, 2)
        ask(store, 0, 0, 1, 2, 7, 7)
        assert store.admits(key_of(7), 3 * UNIT)  # 2 x 3 against 2 + 1 + 1
        ask(store, 0, 1)
        assert not store.admits(key_of(7), 3 * UNIT)  # 2 x 3 against 3 + 2 + 1


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


def test_the_settings_choose_the_policies(tmp_path: Path) -> None:
    with open_store(StoreConfig(cap_gb=2 * UNIT / 1e9, eviction="refuse"), tmp_path) as store:
        put_kv(store, key_of(0), chunk(20))
        with pytest.raises(StoreFull):
            put(store, 1)
    with open_store(StoreConfig(cap_gb=2 * UNIT / 1e9), tmp_path) as store:
        assert not put(store, 1)  # no requests yet
    with open_store(StoreConfig(cap_gb=2 * UNIT / 1e9, admission="always"), tmp_path) as store:
        assert put(store, 1)
