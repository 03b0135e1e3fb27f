"""Tables of codecs in a store: kept by their hash, current by codec and reader, and a miss where they are not whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from blendserve.core import ChunkKV
from blendserve.errors import CorruptRecord, StoreError, StoreFull
from blendserve.store import KVStore, LMDBStore, MemoryStore
from blendserve.store.codecs.base import ChunkShape, Coding, forget_ready, tables_hash
from blendserve.store.merge import merge
from blendserve.store.record import Coded
from tests.store.helpers import CAP, Change, chunk, flip, key_of, read, same, tamper, tiered
from tests.store.toy_codec import Toy

TABLE = bytes(range(1, 256)) + b"\0"
OTHER = TABLE[::-1]
KEY = key_of(1)
MAKERS: dict[str, Callable[[Path], KVStore]] = {
    "lmdb": lambda path: LMDBStore(path, CAP),
    "memory": lambda path: MemoryStore(CAP),
    "lmdb behind tiers": lambda path: tiered(LMDBStore(path, CAP)),
}


@pytest.fixture(autouse=True)
def only_from_the_store(toy_codec: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "tables_here", {})


@pytest.fixture(params=MAKERS)
def store(request: pytest.FixtureRequest, path: Path) -> KVStore:
    return MAKERS[request.param](path)


def toy(table: bytes = TABLE) -> Toy:
    """Unknown to this process but by the store."""
    codec = Toy.with_tables(6, table)
    Toy.tables_here.clear()
    forget_ready()
    return codec


def coded_store(store: KVStore, table: bytes = TABLE) -> KVStore:
    """With one coded chunk and its tables."""
    store.put_tables("toy", "reader", table)
    store.write_by(toy(table))
    store.put(KEY, chunk())
    return store


def test_tables_come_back_by_their_hash_and_count_apart(store: KVStore) -> None:
    hash = store.put_tables("toy", "reader", TABLE)
    assert hash == tables_hash(TABLE)
    assert store.tables(hash) == TABLE
    assert store.tables(bytes(16)) is None
    stats = store.stats()
    assert (stats.tables, stats.tables_bytes, stats.bytes, stats.chunks) == (1, 256, 0, 0)
    assert store.stats("a tenant").tables_bytes is None
    assert list(store.keys()) == []
    assert store.delete_tables(hash)
    assert not store.delete_tables(hash)
    assert store.tables(hash) is None


def test_the_latest_tables_of_a_codec_and_reader_are_current(store: KVStore) -> None:
    assert store.current_tables("toy", "reader") is None
    copied = store.put_tables("toy", "reader", OTHER, current=False)
    assert store.current_tables("toy", "reader") == copied  # nothing else there
    first, second = (store.put_tables("toy", "reader", table) for table in (TABLE, TABLE[1:] + TABLE[:1]))
    assert store.current_tables("toy", "reader") == second
    assert store.put_tables("toy", "reader", TABLE) == first  # again, and so the latest
    assert store.current_tables("toy", "reader") == first
    assert store.current_tables("toy", "another reader") is None
    assert store.current_tables("raw", "reader") is None
    assert len(store.all_tables()) == 3


def test_a_coded_chunk_is_read_with_the_stores_tables(store: KVStore) -> None:
    coded_store(store)
    assert same(read(store, KEY), chunk())
    stats = store.stats()
    assert stats.bytes != stats.raw_bytes == chunk().n_bytes
    assert store.verify().good == 1


def test_tables_survive_closing_and_are_read_by_who_may_not_write(path: Path) -> None:
    coded_store(LMDBStore(path, CAP)).close()
    forget_ready()
    with LMDBStore(path, CAP, read_only=True) as store:
        assert same(read(store, KEY), chunk())
        assert store.current_tables("toy", "reader") == tables_hash(TABLE)
        with pytest.raises(StoreError):
            store.put_tables("toy", "reader", OTHER)


def replaced(txn_hash: bytes, raw: bytes | None) -> Change:
    def change(txn: object) -> None:
        if raw is None:
            txn.delete(b"t" + txn_hash)  # type: ignore[attr-defined]
        else:
            txn.put(b"t" + txn_hash, raw)  # type: ignore[attr-defined]

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (flip(b"t" + tables_hash(TABLE), 100), "damaged"),
        (replaced(tables_hash(TABLE), OTHER), "damaged"),
        (replaced(tables_hash(TABLE), TABLE[:-1]), "damaged"),
        (replaced(tables_hash(TABLE), b""), "damaged"),
        (replaced(tables_hash(TABLE), None), "not here"),
    ],
)
def test_without_whole_tables_a_chunk_is_a_miss_with_the_reason(path: Path, change: Change, why: str) -> None:
    coded_store(LMDBStore(path, CAP)).close()
    tamper(path, change)
    forget_ready()
    with LMDBStore(path, CAP) as store:
        with store.reading() as snapshot:
            assert snapshot.get(KEY) is None
            assert snapshot.undecodable[KEY].kind == "tables"
            assert why in str(snapshot.undecodable[KEY])
        report = store.verify()
        assert report.good == 1  # the chunk itself is whole
        assert [hash for hash, _ in report.bad_tables] == [tables_hash(TABLE).hex()]
        store.delete_tables(tables_hash(TABLE))
        assert store.verify().bad_tables == ()
        store.put_tables("toy", "reader", TABLE)
        assert same(read(store, KEY), chunk())


def test_damaged_words_about_tables_are_told_and_the_tables_still_read(path: Path) -> None:
    coded_store(LMDBStore(path, CAP)).close()
    tamper(path, flip(b"p" + tables_hash(TABLE), 3))
    forget_ready()
    with LMDBStore(path, CAP) as store:
        assert same(read(store, KEY), chunk())
        assert store.current_tables("toy", "reader") is None
        assert store.verify().bad_tables


def test_tables_of_another_codec_are_no_tables(store: KVStore) -> None:
    """A hash that fits is not enough: the codec looks at what it is given."""
    foreign = b"not a permutation"
    hash = store.put_tables("other", "reader", foreign)
    codec = toy()
    coded = Coded(ChunkShape.of(chunk()), Coding("toy", 6, hash), codec.encode(chunk()))
    store.put_coded(KEY, coded)
    Toy.tables_here.clear()
    with store.reading() as snapshot:
        assert snapshot.get(KEY) is None
        assert "none of codec 'toy'" in str(snapshot.undecodable[KEY])


def test_a_record_under_other_tables_or_another_level_is_none(path: Path) -> None:
    """The checksums cover codec, level and tables: a sealed header that names others fits no segment."""
    from tests.support.stores import sealed as seal

    with LMDBStore(path, CAP) as store:
        store.put_tables("toy", "reader", TABLE)
        store.put_tables("toy", "reader", OTHER)
        store.write_by(toy())
        store.put(KEY, chunk())
    for offset, value in ((36, tables_hash(OTHER)), (32, b"\5\0\0\0")):

        def lie(txn, offset: int = offset, value: bytes = value) -> None:  # type: ignore[no-untyped-def]
            body = bytearray(txn.get(b"h" + KEY))[:-8]
            body[offset : offset + len(value)] = value
            txn.put(b"h" + KEY, seal(KEY, bytes(body)))

        tamper(path, lie)
        forget_ready()
        with LMDBStore(path, CAP) as store, pytest.raises(CorruptRecord, match="checksum"):
            read(store, KEY)


def test_merging_copies_coded_chunks_as_they_are_with_their_tables(tmp_path: Path) -> None:
    with LMDBStore(tmp_path / "a", CAP) as source, LMDBStore(tmp_path / "b", CAP) as into:
        coded_store(source)
        source.write_by(Toy.with_tables(0, OTHER))
        source.put(key_of(2), chunk(seed=2))  # its tables are nowhere
        Toy.tables_here.clear()
        forget_ready()
        own = into.put_tables("toy", "reader", TABLE[1:] + TABLE[:1])
        assert merge(source, into) == (2, 0)
        assert same(read(into, KEY), chunk())
        assert into.current_tables("toy", "reader") == own
        one, other = (store.coded(KEY) for store in (source, into))
        assert one is not None
        assert one == other
        assert key_of(2) in into  # needs no decoding, and what cannot be decoded here may be elsewhere
        assert read(into, key_of(2)) is None
        assert into.stats().pins == 2
        assert merge(source, into) == (0, 0)


def test_a_chunk_goes_from_any_store_to_any(tmp_path: Path) -> None:
    kv = chunk()
    stores: list[KVStore] = [LMDBStore(tmp_path / "kv", CAP), MemoryStore(CAP)]
    for source in stores:
        source.put(KEY, kv)
        into = MemoryStore(CAP)
        merge(source, into)
        assert same(read(into, KEY), kv)


def test_tables_have_room_beside_the_cap_and_no_more(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LMDBStore(path, 1000) as store:  # a cap that no tables would fit under
        monkeypatch.setattr("blendserve.store.tables.ROOM", 3_000_000)
        big = bytes(2_000_000)
        hash = store.put_tables("toy", "reader", big)
        assert store.tables(hash) == big
        store.put_tables("toy", "reader", big)  # the same ones take no more
        with pytest.raises(StoreFull, match="new store"):
            store.put_tables("toy", "reader", big + b"more")
        assert store.stats().bytes == 0


def test_in_memory_coded_chunks_count_as_coded() -> None:
    with MemoryStore(CAP, codec=toy()) as store:
        store.put_tables("toy", "reader", TABLE)
        kv = ChunkKV(torch.zeros(3, 2, 50, 4), torch.zeros(3, 2, 50, 4))
        store.put(KEY, kv)
        assert store.stats().bytes < kv.n_bytes / 5
        assert same(read(store, KEY), kv)
