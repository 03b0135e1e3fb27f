"""Coded chunks and the tables of their codecs: read in any order, found by hash, a miss where they are damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.errors import CorruptRecord, StoreFull
from blendserve.store import ChunkRecord, KVStore, LMDBStore, MemoryStore, read_record
from blendserve.store.codecs.base import Buffer, forget_ready, tables_hash
from blendserve.store.merge import merge
from blendserve.store.view import RecordView
from tests.support.codecs import Toy
from tests.support.stores import (
    CAP,
    Change,
    chunk,
    flip,
    has,
    key_of,
    put_kv,
    read,
    same,
    stored_view,
    tamper,
)

TABLE = bytes(range(1, 256)) + b"\0"
OTHER, THIRD = TABLE[::-1], TABLE[1:] + TABLE[:1]
HASH = tables_hash(TABLE)
KEY = key_of(1)


@pytest.fixture(autouse=True)
def only_from_the_store(toy_codec: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "tables_here", {})


@pytest.fixture(params=["lmdb", "memory"])
def store(request: pytest.FixtureRequest, path: Path) -> Iterator[KVStore]:
    made: KVStore = MemoryStore(CAP) if request.param == "memory" else LMDBStore(path, CAP)
    with made as store:
        yield store


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


LAYERS = 6
KV = chunk(5, layers=LAYERS)


def view_of(change: Callable[[int, Buffer], Buffer] = lambda l, raw: raw) -> RecordView:
    """A view of a coded chunk, each layer the difference from the one below; change: of what is read."""
    record = ChunkRecord.encode(KEY, KV, Toy(level=6))
    return RecordView(ChunkRecord(KEY, record.header, lambda l: change(l, record.segment(l))))


def is_right(view: RecordView, l: int) -> bool:
    keys, values = view.layer(l)
    return torch.equal(keys, KV.keys[l]) and torch.equal(values, KV.values[l])


@given(st.lists(st.integers(0, LAYERS - 1), max_size=12))
def test_layers_are_decoded_in_any_order_and_in_order_once(asked: list[int]) -> None:
    reads = list[int]()

    def noted(l: int, raw: Buffer) -> Buffer:
        reads.append(l)
        return raw

    view, other = view_of(noted), view_of()
    assert all(is_right(view, l) for l in range(LAYERS))
    assert reads == list(range(LAYERS))
    assert all(is_right(by, l) for by in (view, other) for l in asked)
    for wrong in (-1, LAYERS):
        with pytest.raises(IndexError):
            view.layer(wrong)


def test_threads_share_a_view() -> None:
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(partial(is_right, view_of()), [0, 5, 1, 4, 2, 3, 5, 0] * 20))


def test_damage_stops_the_layers_above_it_alone() -> None:
    view = view_of(lambda l, raw: bytes(raw)[:-1] + b"?" if l == 1 else raw)
    for l in (2, 1):
        with pytest.raises(CorruptRecord) as error:
            view.layer(l)
        assert error.value.layer == 1
    assert is_right(view, 0)


def test_tables_are_found_by_hash_the_latest_are_current_and_no_tenant_sees_them(store: KVStore) -> None:
    assert store.blobs.current("toy", "reader") is None
    copied = store.blobs.put("toy", "reader", OTHER, current=False)
    assert store.blobs.current("toy", "reader") == copied  # there are no others
    second = [store.blobs.put("toy", "reader", table) for table in (TABLE, THIRD)][1]
    assert store.blobs.current("toy", "reader") == second
    assert store.blobs.put("toy", "reader", TABLE) == store.blobs.current("toy", "reader") == HASH
    assert store.blobs.current("toy", "another reader") is store.blobs.current("raw", "reader") is None
    assert (store.blobs.get(HASH), store.blobs.get(bytes(16))) == (TABLE, None)
    stats = store.stats()
    assert (stats.tables, stats.tables_bytes, stats.bytes, stats.chunks) == (3, 3 * 256, 0, 0)
    assert store.stats("a tenant").tables_bytes is None
    assert list(store.keys()) == []
    assert [store.blobs.delete(HASH), store.blobs.delete(HASH), store.blobs.get(HASH)] == [True, False, None]


@pytest.mark.parametrize(
    "change",
    [
        flip(b"t" + HASH, 100),
        lambda txn: txn.put(b"t" + HASH, OTHER),
        lambda txn: txn.put(b"t" + HASH, b""),
        lambda txn: txn.delete(b"t" + HASH),
    ],
)
def test_a_chunk_without_whole_tables_is_a_miss_with_its_reason(path: Path, change: Change) -> None:
    coded_store(LMDBStore(path, CAP)).close()
    tamper(path, change)
    forget_ready()
    with LMDBStore(path, CAP) as store:
        with store.snapshot() as snapshot:
            assert stored_view(store, snapshot, KEY).kind == "tables"
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
        assert one is not None
        assert other is not None
        assert (one.header, one.segments()) == (other.header, other.segments())
        assert has(into, key_of(2))  # another process may decode it
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
