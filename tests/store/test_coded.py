"""Coded chunks and the tables of their codecs: read in any order, found by hash, a miss where they are damaged."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.errors import CorruptRecord, StoreFull
from blendserve.registry import CODECS
from blendserve.store import KVStore, LMDBStore, MemoryStore, TieredStore, VerifyReport, record
from blendserve.store.chunk import StoredChunk
from blendserve.store.codecs.base import Buffer, forget_ready, tables_hash
from blendserve.store.codecs.raw import Raw
from blendserve.store.merge import merge
from tests.support.codecs import Toy
from tests.support.stores import CAP, Change, chunk, flip, key_of, read, same, tamper, tier

TABLE = bytes(range(1, 256)) + b"\0"
OTHER, THIRD = TABLE[::-1], TABLE[1:] + TABLE[:1]
HASH = tables_hash(TABLE)
KEY = key_of(1)


@pytest.fixture(autouse=True)
def only_from_the_store(toy_codec: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "tables_here", {})


@pytest.fixture(params=["lmdb", "memory", "tiered"])
def store(request: pytest.FixtureRequest, path: Path) -> Iterator[KVStore]:
    made: KVStore = MemoryStore(CAP) if request.param == "memory" else LMDBStore(path, CAP)
    with TieredStore(made, [tier(CAP)]) if request.param == "tiered" else made as store:
        yield store


def toy(table: bytes = TABLE) -> Toy:
    """A codec whose tables only the store can give."""
    codec = Toy.with_tables(6, table)
    Toy.tables_here.clear()
    forget_ready()
    return codec


def coded_store(store: KVStore) -> KVStore:
    """With one coded chunk and its tables."""
    store.put_tables("toy", "reader", TABLE)
    store.write_by(toy())
    store.put(KEY, chunk())
    return store


LAYERS = 6
KV = chunk(5, layers=LAYERS)


class Records:
    """A coded chunk's records, and which of them were read."""

    def __init__(self) -> None:
        self.header, self.segments = record.encode(KEY, KV, Toy(level=6))
        self.read: list[int] = []
        self.view = StoredChunk(KEY, self.header, self._read)

    def _read(self, l: int) -> Buffer:
        self.read.append(l)
        return self.segments[l]


@given(asked=st.lists(st.integers(0, LAYERS - 1), max_size=12))
def test_layers_are_decoded_in_any_order_and_in_order_once(asked: list[int]) -> None:
    """Each layer is coded as the difference from the one below."""
    records = Records()
    for l in range(LAYERS):
        records.view.layer(l)
    assert records.read == list(range(LAYERS))
    for l in asked:
        assert torch.equal(records.view.layer(l)[0], KV.keys[l])
        assert torch.equal(records.view.layer(l)[1], KV.values[l])
    for wrong in (-1, LAYERS):
        with pytest.raises(IndexError):
            records.view.layer(wrong)


def test_threads_share_a_view() -> None:
    view = Records().view

    def look(l: int) -> bool:
        return all(torch.equal(view.layer(m)[0], KV.keys[m]) for m in (l, LAYERS - 1, 0))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(look, [0, 1, 2, 3, 4, 5] * 20))


def test_damage_stops_the_layers_above_it_alone() -> None:
    records = Records()
    records.segments[1] = bytes(records.segments[1])[:-1] + b"?"
    for l in (2, 1):
        with pytest.raises(CorruptRecord) as error:
            records.view.layer(l)
        assert error.value.layer == 1
    assert torch.equal(records.view.layer(0)[0], KV.keys[0])


def test_a_chunk_of_an_unknown_codec_is_a_miss_logged_once_and_can_be_replaced(
    store: KVStore, caplog: pytest.LogCaptureFixture
) -> None:
    coded_store(store)
    store.pin([KEY])
    CODECS.remove("toy")
    try:
        for _ in range(2):
            assert read(store, KEY) is None
        stats = store.stats()
        assert (stats.misses, stats.undecodable, stats.corrupt, stats.hits) == (2, 2, 0, 0)
        assert len(caplog.records) == 1
        assert store.verify() == VerifyReport(1, ())  # the record is whole
        store.write_by(Raw())
        store.put(KEY, chunk(seed=1))
        assert same(read(store, KEY), chunk(seed=1))
        assert store.stats().pins == 1
    finally:
        CODECS.add("toy", "tests.support.codecs:Toy")


def test_tables_are_found_by_hash_and_count_apart_from_chunks(store: KVStore) -> None:
    assert store.put_tables("toy", "reader", TABLE) == HASH
    assert (store.tables(HASH), store.tables(bytes(16))) == (TABLE, None)
    stats = store.stats()
    assert (stats.tables, stats.tables_bytes, stats.bytes, stats.chunks) == (1, 256, 0, 0)
    assert store.stats("a tenant").tables_bytes is None
    assert list(store.keys()) == []
    assert [store.delete_tables(HASH), store.delete_tables(HASH), store.tables(HASH)] == [True, False, None]


def test_the_latest_tables_of_a_codec_and_reader_are_current(store: KVStore) -> None:
    assert store.current_tables("toy", "reader") is None
    copied = store.put_tables("toy", "reader", OTHER, current=False)
    assert store.current_tables("toy", "reader") == copied  # there are no others
    first, second = (store.put_tables("toy", "reader", table) for table in (TABLE, THIRD))
    assert store.current_tables("toy", "reader") == second
    assert store.put_tables("toy", "reader", TABLE) == first
    assert store.current_tables("toy", "reader") == first
    assert store.current_tables("toy", "another reader") is store.current_tables("raw", "reader") is None
    assert len(store.all_tables()) == 3


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
        with store.reading() as snapshot:
            assert snapshot.get(KEY) is None
            assert snapshot.undecodable[KEY].kind == "tables"
        report = store.verify()
        assert report.good == 1  # the chunk itself is whole
        assert [hash for hash, _ in report.bad_tables] == [HASH.hex()]
        store.delete_tables(HASH)
        assert store.verify().bad_tables == ()
        store.put_tables("toy", "reader", TABLE)
        assert same(read(store, KEY), chunk())


def test_a_merge_copies_coded_chunks_unchanged_with_their_tables(tmp_path: Path) -> None:
    with LMDBStore(tmp_path / "a", CAP) as source, LMDBStore(tmp_path / "b", CAP) as into:
        coded_store(source)
        source.write_by(toy(OTHER))
        source.put(key_of(2), chunk(seed=2))  # no store has its tables
        own = into.put_tables("toy", "reader", THIRD)
        assert merge(source, into) == (2, 0)
        assert same(read(into, KEY), chunk())
        assert into.current_tables("toy", "reader") == own
        assert source.coded(KEY) == into.coded(KEY) is not None
        assert key_of(2) in into  # another process may decode it
        assert read(into, key_of(2)) is None
        assert into.stats().pins == 2
        assert merge(source, into) == (0, 0)
        merge(into, memory := MemoryStore(CAP))
        assert same(read(memory, KEY), chunk())


def test_tables_have_room_of_their_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LMDBStore(path, 1000) as store:  # a cap below the size of any tables
        monkeypatch.setattr("blendserve.store.tables.ROOM", 3_000_000)
        big = bytes(2_000_000)
        hash = store.put_tables("toy", "reader", big)
        assert store.tables(hash) == big
        store.put_tables("toy", "reader", big)  # stored once
        with pytest.raises(StoreFull):
            store.put_tables("toy", "reader", big + b"more")
        assert store.stats().bytes == 0
