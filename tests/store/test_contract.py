"""The store contract by example: reading, eviction, admission, tables, settings. test_machine.py has any history."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.config import StoreConfig
from blendserve.errors import ConfigError, StoreFull, StoreUnavailable
from blendserve.fetch import TieredStore, open_store
from blendserve.kv import ChunkKV, stacked
from blendserve.store import KVStore, LMDBStore, MemoryStore, Miss, VerifyReport, open_view, read_record
from blendserve.store.codecs.base import forget_ready, tables_hash
from blendserve.store.merge import merge
from blendserve.store.policies import TinyLFU
from tests.support.codecs import Toy
from tests.support.places import EVERY_KIND, REMOTE_STORES, SHARED_KINDS, STORES
from tests.support.stores import CAP, ROOMY, UNIT, chunk, flip, key_of, kv, put_kv, read, same, stored, tamper
from tests.support.valkey import store_at

pytestmark = pytest.mark.usefixtures("toy_codec")
capped_kinds = pytest.mark.parametrize("kind", ["memory", "lmdb"])  # a server's operator limits what it holds
shared_kinds = pytest.mark.parametrize("kind", SHARED_KINDS)


@pytest.fixture(params=[*EVERY_KIND, "tiered"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    with (STORES | REMOTE_STORES)[request.param](tmp_path, ROOMY).open() as store:
        yield store


def opened(kind: str, path: Path, cap: int, **options: Any) -> KVStore:
    if kind == "memory":
        return MemoryStore(cap, **options)
    return LMDBStore(path, cap, **options) if kind == "lmdb" else store_at(path, cap, **options)


def test_a_chunk_of_any_dtype_and_shape_replaces_another_and_is_read_bit_for_bit(store: KVStore) -> None:
    """The store keeps its own copy of tensors, strided ones too."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens, layers, head_dim in ((0, 3, 4), (1, 6, 4), (7, 2, 16), (300, 3, 4)):
            long = chunk(tokens + 3, layers, head_dim=head_dim, dtype=dtype)
            kv = ChunkKV(stacked(long.keys)[:, :, 2:-1].requires_grad_(), stacked(long.values)[:, :, 2:-1])
            wanted = ChunkKV(stacked(kv.keys).detach().clone(), stacked(kv.values).clone())
            put_kv(store, key_of(1), kv)
            stacked(long.keys).detach().zero_()
            assert store.verify() == VerifyReport(1, ())
            assert same(read(store, key_of(1)), wanted)


@shared_kinds
def test_a_read_only_store_changes_nothing(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path, CAP) as store:
        put_kv(store, key_of(1), chunk())
        before = store.stats(), store.describe([key_of(1)])
    with opened(kind, tmp_path, CAP, read_only=True) as store:
        assert same(read(store, key_of(1)), chunk())
        assert (store.stats().hits, store.verify().good) == (1, 1)
        for change in (
            lambda: put_kv(store, key_of(2), chunk()),
            lambda: store.delete([key_of(1)]),
            lambda: store.pin([key_of(1)]),
            lambda: store.blobs.put("toy", "reader", b"x"),
        ):
            with pytest.raises(StoreUnavailable):
                change()
    with opened(kind, tmp_path, CAP) as store:
        assert (store.stats(), store.describe([key_of(1)])) == before


def test_threads_read_and_write_concurrently(store: KVStore) -> None:
    """Each key holds only chunks made of its own number, in one of several lengths."""

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(20):
            n, tokens = dice.randrange(1, 4), dice.choice([1, 40, 200])
            if seed < 2:
                put_kv(store, key_of(n), ChunkKV(*(torch.full((2, 2, tokens, 8), float(x)) for x in (n, -n))))
            for _ in range(2):
                kv = read(store, key_of(n))
                assert kv is None or ((stacked(kv.keys) == n).all() and (stacked(kv.values) == -n).all())

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(work, range(5)))
    assert store.verify().bad == ()


# Eviction and admission


def ask(store: KVStore, *numbers: int) -> None:
    for n in numbers:
        read(store, key_of(n))


def put(store: KVStore, *numbers: int) -> bool:
    """Put chunks of one unit."""
    return False not in [put_kv(store, key_of(n), chunk(10)) for n in numbers]


@capped_kinds
def test_a_new_chunk_needs_more_requests_than_its_victims(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path, 2 * UNIT, admission=TinyLFU(seed=1)) as store:
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
        ask(store, 7, 7, 7, 7)
        assert store.admits(key_of(7), 2 * UNIT)  # requests are weighted by bytes: 4 x 2 against 2 + 2
        ask(store, 1, 1, 5, 5, 5, 5)
        assert not store.admits(key_of(7), 2 * UNIT)
        assert put_kv(store, key_of(9), chunk(20), pin=True)  # nor does pinning
        assert stored(store) == {9}


@capped_kinds
def test_one_namespace_evicts_nothing_of_another_that_holds_less_than_its_share(
    kind: str, tmp_path: Path
) -> None:
    """By any number of puts; one that is alone may use the whole cap, and gives it back."""
    with opened(kind, tmp_path / "kv", 12 * chunk().n_bytes) as store:
        greedy = [key_of(n, "greedy") for n in range(40)]
        for key in greedy[:20]:
            assert put_kv(store, key, chunk())
        assert len(store.contains(greedy)) == 12
        for tenant in ("first", "second"):
            own = [key_of(n, tenant) for n in range(4)]
            for key in own:
                assert put_kv(store, key, chunk())
            for key in greedy[20:]:
                assert put_kv(store, key, chunk())
            assert store.contains(own) == set(own)
        assert store.contains(greedy) >= set(greedy[-4:])


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


# Tables of codecs

TABLE = bytes(range(1, 256)) + b"\0"
OTHER, THIRD = TABLE[::-1], TABLE[1:] + TABLE[:1]
HASH = tables_hash(TABLE)
KEY = key_of(1)


def toy(table: bytes = TABLE) -> Toy:
    """A codec whose tables only the store can give."""
    codec = Toy.with_tables(6, table)
    Toy.tables_here.clear()
    forget_ready()
    return codec


def coded_store(store: KVStore) -> KVStore:
    """With one coded chunk and its tables."""
    store.blobs.put("toy", "reader", TABLE)
    put_kv(store, KEY, chunk(), codec=toy())
    return store


@shared_kinds
def test_tables_are_found_by_hash_the_latest_are_current_and_no_tenant_sees_them(
    kind: str, tmp_path: Path
) -> None:
    with STORES[kind](tmp_path).open() as store:
        blobs = store.blobs
        assert blobs.current("toy", "reader") is None
        copied = blobs.put("toy", "reader", OTHER, current=False)
        assert blobs.current("toy", "reader") == copied  # there are no others
        second = [blobs.put("toy", "reader", table) for table in (TABLE, THIRD)][1]
        assert blobs.current("toy", "reader") == second
        assert blobs.put("toy", "reader", TABLE) == blobs.current("toy", "reader") == HASH
        assert blobs.current("toy", "another reader") is blobs.current("raw", "reader") is None
        assert (blobs.get(HASH), blobs.get(bytes(16))) == (TABLE, None)
        stats = store.stats()
        assert (stats.tables, stats.tables_bytes, stats.bytes, stats.chunks) == (3, 3 * 256, 0, 0)
        assert store.stats("a tenant").tables_bytes is None
        assert list(store.keys()) == []
        assert [blobs.delete(HASH), blobs.delete(HASH), blobs.get(HASH)] == [True, False, None]


@pytest.mark.parametrize(
    "change",
    [
        flip(b"t" + HASH, 100),
        lambda txn: txn.put(b"t" + HASH, OTHER),
        lambda txn: txn.put(b"t" + HASH, b""),
        lambda txn: txn.delete(b"t" + HASH),
    ],
)
def test_a_chunk_without_whole_tables_is_a_miss_with_its_reason(path: Path, change: Any) -> None:
    coded_store(LMDBStore(path, CAP)).close()
    tamper(path, change)
    forget_ready()
    with LMDBStore(path, CAP) as store:
        record = read_record(store, KEY)
        assert record
        miss = open_view(record, store.blobs.get)
        assert isinstance(miss, Miss)
        assert miss.kind == "tables"
        report = store.verify()
        assert report.good == 1  # the chunk itself is whole
        assert [hash for hash, _ in report.bad_tables] == [HASH.hex()]
        store.blobs.delete(HASH)
        assert store.verify().bad_tables == ()
        store.blobs.put("toy", "reader", TABLE)
        assert same(read(store, KEY), chunk())


def test_a_merge_copies_coded_chunks_unchanged_with_their_tables(tmp_path: Path) -> None:
    with LMDBStore(tmp_path / "a", CAP) as source, LMDBStore(tmp_path / "b", CAP) as into:
        coded_store(source)
        put_kv(source, key_of(2), chunk(seed=2), codec=toy(OTHER))  # no store has its tables
        own = into.blobs.put("toy", "reader", THIRD)
        assert merge(source, into) == (2, 0)
        assert same(read(into, KEY), chunk())
        assert into.blobs.current("toy", "reader") == own
        one, other = read_record(source, KEY), read_record(into, KEY)
        assert one
        assert other
        assert (one.header, one.segments()) == (other.header, other.segments())
        assert into.contains([key_of(2)])  # another process may decode it
        assert read(into, key_of(2)) is None
        assert into.stats().pins == 2
        assert merge(source, into) == (0, 0)
        merge(into, memory := MemoryStore(CAP))
        assert same(read(memory, KEY), chunk())


def test_tables_have_room_of_their_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LMDBStore(path, 1000) as store:  # a cap below the size of any tables
        monkeypatch.setattr("blendserve.store.blobs.ROOM", 3_000_000)
        big = bytes(2_000_000)
        hash = store.blobs.put("toy", "reader", big)
        assert store.blobs.get(hash) == big
        store.blobs.put("toy", "reader", big)  # stored once
        with pytest.raises(StoreFull):
            store.blobs.put("toy", "reader", big + b"more")
        assert store.stats().bytes == 0


# Settings


def test_the_settings_choose_the_store(tmp_path: Path) -> None:
    remote = {"location": str(tmp_path / "far"), "cap_gb": 0.01}
    layered = {"memory_bytes": 10_000, "remote": remote}
    default = tmp_path / "default"
    rows: list[tuple[dict[str, Any], Path | None, type[KVStore]]] = [
        ({"location": "memory"}, default, MemoryStore),
        ({}, None, MemoryStore),  # no folder for the default kind
        ({}, default, LMDBStore),
        ({"location": str(tmp_path / "own")}, default, LMDBStore),
        (layered, tmp_path / "near", TieredStore),
    ]
    for settings, folder, kind in rows:
        with open_store(StoreConfig(cap_gb=0.001, **settings), folder) as store:
            assert type(store) is kind
            assert (put_kv(store, key_of(1), chunk()), store.stats().cap_bytes) == (True, 1_000_000)
    for name in ("default", "own", "near", "far"):
        with LMDBStore(tmp_path / name, ROOMY, read_only=True) as store:
            assert read(store, key_of(1))
    with open_store(StoreConfig(location="memory"), tmp_path / "kept", persistent=True) as store:
        assert type(store) is LMDBStore
    with open_store(StoreConfig(**layered), tmp_path / "near", read_only=True) as store:
        assert type(store) is LMDBStore
    with pytest.raises(ConfigError) as error:
        open_store(StoreConfig(remote={}), tmp_path / "other")
    assert error.value.setting == "store.remote.location"


def test_a_store_of_the_settings_admits_by_use(tmp_path: Path) -> None:
    cap_gb = 2 * UNIT / 1e9
    with open_store(StoreConfig(cap_gb=cap_gb), tmp_path) as store:
        assert put(store, 0, 1)
        assert not put(store, 2)  # no requests yet
    with LMDBStore(tmp_path, 2 * UNIT) as store:  # admits everything
        assert put(store, 2)
        assert stored(store) == {1, 2}
        store.pin([key_of(1), key_of(2)])
        assert not store.admits(key_of(3), UNIT)
        with pytest.raises(StoreFull) as error:
            put(store, 3)
        assert error.value.setting == "store.cap_gb"


@capped_kinds
def test_a_clock_that_was_ahead_keeps_nothing_until_that_date(kind: str, tmp_path: Path) -> None:
    """Neither chunks that are no longer used, nor old tables, nor leases."""
    place, days = STORES[kind](tmp_path), 400 * 86_400.0
    new = [key_of(n) for n in range(10, 14)]
    with place.open() as store:
        place.clock.advance(days)
        for n in range(5):
            put_kv(store, key_of(n), kv(n))
        assert store.lease([key_of(9)], 30.0)
        store.blobs.put("toy", "model", b"old")
        place.clock.advance(-days)
        with place.other() if place.lasts else nullcontext(store) as after:
            for _ in range(2):
                for key in new:
                    place.clock.advance(1.0)
                    assert put_kv(after, key, kv(1))
                assert after.contains(new) == set(new)
            assert after.lease([key_of(9)], 30.0) == {key_of(9)}
            newest = after.blobs.put("toy", "model", b"new")
            assert after.blobs.current("toy", "model") == newest
