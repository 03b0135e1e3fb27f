"""At the cap: which chunks go, stay and are admitted, by example. test_machine.py has any history under LRU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.config import StoreConfig, ValkeyConfig
from blendserve.core import ChunkKV
from blendserve.errors import StoreFull
from blendserve.registry import STORES
from blendserve.store import KVStore, LMDBStore, MemoryStore, StoreKind, open_store
from blendserve.store.policies import LRU, Admission, Always, Eviction, Policies, Refuse, TinyLFU
from tests.store.helpers import chunk, key_of, read
from tests.store.valkey.servers import needs_server, store_at
from tests.store.valkey.servers import settings as settings_of
from tests.support.stores import STORES as PLACES

UNIT = chunk(10).n_bytes
Make = Callable[..., KVStore]


KINDS = [
    pytest.param(name, marks=needs_server if name == "valkey" else ())
    for name in STORES.names
    if STORES.load(name).writable
]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    stores: list[KVStore] = []

    def build(units: float, eviction: Eviction | None = None, admission: Admission | None = None) -> KVStore:
        kind: StoreKind = STORES.load(request.param)
        path = tmp_path / str(len(stores))
        server = settings_of(path) if request.param == "valkey" else ValkeyConfig()
        config = StoreConfig(cap_gb=round(units * UNIT) / 1e9, valkey=server)
        policies = Policies(eviction or LRU(), admission or Always())
        stores.append(kind.from_config(config, path, False, policies))
        return stores[-1]

    yield build
    for store in stores:
        assert store.verify().bad == ()
        store.close()


def unit(tokens: int = 10) -> ChunkKV:
    return chunk(tokens)


def there(store: KVStore) -> set[int]:
    return {n for n in range(30) if key_of(n) in store}


def test_the_least_recently_used_goes(make: Make) -> None:
    store = make(3)
    for n in range(3):
        assert store.put(key_of(n), unit())
    read(store, key_of(0))
    store.put(key_of(3), unit())
    assert there(store) == {0, 2, 3}
    assert key_of(2) in store  # looking whether it is there is no use of it
    store.put(key_of(4), unit())
    assert there(store) == {0, 3, 4}
    assert store.stats().evictions == 2


def test_the_cap_is_kept_to_the_byte(make: Make) -> None:
    for units, left in ((2, {0, 1}), (2 - 1 / UNIT, {1})):
        store = make(units)
        for n in range(2):
            store.put(key_of(n), unit())
        assert there(store) == left


def test_pinned_chunks_stay(make: Make) -> None:
    store = make(3)
    for n in range(2):
        store.put(key_of(n), unit(), pin=True)
    for n in range(2, 9):
        store.put(key_of(n), unit())
        assert there(store) == {0, 1, n}
    with pytest.raises(StoreFull, match="unpin"):
        store.put(key_of(9), unit(20))
    assert not store.wants(key_of(9), 2 * UNIT)
    assert there(store) == {0, 1, 8}
    assert store.stats().pins == 2


def test_pinned_ones_push_out_others_and_ask_nobody(make: Make) -> None:
    store = make(2, admission=TinyLFU(seed=1))
    for n in range(2):
        store.put(key_of(n), unit())
        for _ in range(5):
            read(store, key_of(n))
    assert not store.put(key_of(2), unit())
    assert store.put(key_of(3), unit(20), pin=True)
    assert there(store) == {3}


def test_the_plain_variant_evicts_nothing(make: Make) -> None:
    store = make(2, eviction=Refuse())
    store.put(key_of(0), unit())
    store.put(key_of(1), unit())
    with pytest.raises(StoreFull, match=r"store\.cap_gb"):
        store.put(key_of(2), unit())
    assert there(store) == {0, 1}


def test_a_newcomer_must_be_asked_for_more_often_than_who_goes_for_it(make: Make) -> None:
    store = make(2, admission=TinyLFU(seed=1))
    for n in (0, 1):
        store.put(key_of(n), unit())
    for n in (0, 1, 1):
        read(store, key_of(n))
    read(store, key_of(5))  # asked for once, as was 0: what is there stays
    assert not store.wants(key_of(5), UNIT)
    assert not store.put(key_of(5), unit())
    read(store, key_of(5))
    assert store.wants(key_of(5), UNIT)
    assert store.put(key_of(5), unit())
    assert there(store) == {1, 5}
    assert store.stats().admissions_refused == 2


def test_a_newcomer_is_weighed_by_its_bytes(make: Make) -> None:
    """Asked for twice, a chunk saves no more than three of its size that were asked for once each."""
    store = make(3, admission=TinyLFU(seed=1))
    for n in range(3):
        store.put(key_of(n), unit())
        read(store, key_of(n))
    for _ in range(2):
        read(store, key_of(7))
    assert store.wants(key_of(7), UNIT)
    read(store, key_of(0))
    assert store.wants(key_of(7), 3 * UNIT)  # 2 x 3 against 2 + 1 + 1
    for n in (0, 1):
        read(store, key_of(n))
    assert not store.wants(key_of(7), 3 * UNIT)  # 2 x 3 against 3 + 2 + 1


def test_uses_count_before_they_are_written(make: Make) -> None:
    """Chunk 0 was put first, but read since: it is 1 that would go, and nobody asked for that."""
    store = make(2, admission=TinyLFU(seed=1))
    for n in (0, 1):
        store.put(key_of(n), unit())
    for n in (0, 0, 0, 5):
        read(store, key_of(n))
    assert store.wants(key_of(5), UNIT)
    assert store.put(key_of(5), unit())
    assert there(store) == {0, 5}


def test_mending_asks_nobody(make: Make) -> None:
    store = make(2, admission=TinyLFU(seed=1))
    for n in range(2):
        store.put(key_of(n), unit())
        read(store, key_of(n))
    assert store.put(key_of(0), chunk(10, seed=3))


SHARED = [pytest.param("lmdb"), pytest.param("valkey", marks=needs_server)]


@pytest.mark.parametrize("kind", SHARED)
def test_a_later_use_that_another_process_has_written_stays(kind: str, tmp_path: Path) -> None:
    place = PLACES[kind](tmp_path)
    with place.open() as store:
        for n in range(5):
            place.clock.advance(1)
            store.put(key_of(n), unit())
        read(store, key_of(0))  # noted, and written with the next chunk that needs room
        with place.other() as other:
            for n in (1, 2, 3, 4, 0):
                place.clock.advance(1)
                read(other, key_of(n))
        place.clock.advance(1)
        store.put(key_of(5), unit())
        assert there(store) == {0, 2, 3, 4, 5}


@pytest.mark.parametrize("kind", SHARED)
def test_each_process_counts_its_own_requests(kind: str, tmp_path: Path) -> None:
    """One that has seen no request for the victim admits a chunk that was asked for once."""
    stores: list[KVStore] = []
    for _ in range(2):
        if kind == "lmdb":
            stores.append(LMDBStore(tmp_path, UNIT, eviction=LRU(), admission=TinyLFU(seed=1)))
        else:
            stores.append(store_at(tmp_path, UNIT, eviction=LRU(), admission=TinyLFU(seed=1)))
    here, elsewhere = stores
    here.put(key_of(0), unit())
    for n in (0, 0, 5):
        read(here, key_of(n))
    assert not here.put(key_of(5), unit())
    read(elsewhere, key_of(5))
    assert elsewhere.put(key_of(5), unit())
    assert there(here) == {5}
    for store in stores:
        store.close()


@given(st.lists(st.integers(0, 40), max_size=300))
def test_the_sketch_never_underestimates(asked: list[int]) -> None:
    """Until it ages, and up to where its counters stop."""
    policy = TinyLFU(seed=7)
    for n in asked:
        policy.record_access(key_of(n))
    for n in set(asked):
        assert min(asked.count(n), TinyLFU.TOP) <= policy.frequency(key_of(n)) <= asked.count(n) + 1
    assert policy.frequency(key_of(99)) == 0


def test_popularity_fades() -> None:
    policy = TinyLFU(seed=7)
    for _ in range(12):
        policy.record_access(key_of(0))
    assert policy.frequency(key_of(0)) == 12
    for n in range(1, 1000):
        policy.record_access(key_of(n))
    assert policy.frequency(key_of(0)) == 5  # 11 behind the doorkeeper, halved


def test_admission_keeps_what_is_popular_under_a_flood_of_novel_chunks() -> None:
    """Zipf over 300 chunks, and as many requests again for chunks that never return; room for 30."""
    rates = {}
    admissions: dict[str, Admission] = {"always": Always(), "tinylfu": TinyLFU(seed=3)}
    for name, admission in admissions.items():
        dice, store, hits = random.Random(5), MemoryStore(30 * UNIT, LRU(), admission), 0
        popular = dice.choices(range(300), [1 / (n + 1) for n in range(300)], k=2000)
        for i, n in enumerate(popular):
            for key in (key_of(n), key_of(1000 + i)):
                with store.reading() as snapshot:
                    found = snapshot.get(key) is not None
                hits += found
                if not found:
                    store.put(key, unit())
        rates[name] = hits / len(popular)
        assert store.stats().bytes <= 30 * UNIT
    assert rates["tinylfu"] > 1.4 * rates["always"], rates


def test_the_settings_choose_the_policies(tmp_path: Path) -> None:
    config = StoreConfig(cap_gb=2 * UNIT / 1e9, eviction="refuse")
    with open_store(config, tmp_path) as store:
        store.put(key_of(0), unit(20))
        with pytest.raises(StoreFull):
            store.put(key_of(1), unit())
    with open_store(StoreConfig(cap_gb=2 * UNIT / 1e9), tmp_path) as store:
        assert not store.put(key_of(1), unit())  # nobody ever asked for it
        assert store.put(key_of(1), unit(), pin=True)
    with open_store(StoreConfig(cap_gb=2 * UNIT / 1e9, admission="always"), tmp_path) as store:
        store.unpin([key_of(1)])
        assert store.put(key_of(2), unit(20))
