"""Records that are damaged, missing or too many: found, named, worked around and mended."""

from __future__ import annotations

import struct
from pathlib import Path

import lmdb
import pytest
import torch
import xxhash

from blendserve.errors import CorruptRecord, StoreUnavailable, StoreVersion
from blendserve.store import LMDBStore, VerifyReport
from blendserve.store.lmdb.opening import explained
from blendserve.store.policies import LRU
from tests.store.helpers import (
    BIG,
    CAP,
    Change,
    chunk,
    filled,
    flip,
    header_name,
    key_of,
    layer_name,
    read,
    tamper,
)


def move_in_order(txn: lmdb.Transaction) -> None:
    """Put chunk 1 somewhere else in the order of eviction."""
    with txn.cursor() as cursor:
        names = [
            name
            for name in map(bytes, cursor.iternext(values=False))
            if name[:1] == b"o" and name.endswith(key_of(1))
        ]
    txn.delete(names[0])
    txn.put(b"o" + bytes(8) + key_of(1), b"")


DAMAGE: dict[str, tuple[Change, str]] = {
    "flipped layer": (flip(layer_name(1, 2), 77), "layer 2 fails"),
    "short layer": (lambda txn: txn.put(layer_name(1, 0), b"12"), "layer 0 has 2 bytes"),
    "missing layer": (lambda txn: txn.delete(layer_name(1, 1)), "layer 1 is missing"),
    "missing layers": (lambda txn: [txn.delete(layer_name(1, l)) for l in range(3)], "layer 0 is missing"),
    "one layer more": (lambda txn: txn.put(layer_name(1, 3), b"x"), "more layers"),
    "flipped header": (flip(header_name(1), 9), "header fails"),
    "missing header": (lambda txn: txn.delete(header_name(1)), "no header"),
    "flipped entry": (flip(b"u" + key_of(1), 10), "ledger"),
    "missing entry": (lambda txn: txn.delete(b"u" + key_of(1)), "ledger"),
    "another entry": (lambda txn: txn.put(b"u" + key_of(1), txn.get(b"u" + key_of(0)) or b""), "ledger"),
    "out of order": (move_in_order, "order of eviction"),
}
UNREADABLE = {"flipped layer", "short layer", "missing layer", "missing layers", "flipped header"}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_named_and_mended_by_putting_again(path: Path, kind: str) -> None:
    filled(path)
    change, problem = DAMAGE[kind]
    tamper(path, change)
    with LMDBStore(path, CAP) as store:
        report = store.verify()
        assert report.good == 2
        assert [key for key, _ in report.bad] == [key_of(1).hex()]
        assert problem in report.bad[0][1]
        if kind in UNREADABLE:
            with pytest.raises(CorruptRecord):
                read(store, key_of(1))
            assert store.stats().corrupt == 1
        else:
            assert (read(store, key_of(1)) is None) == (kind == "missing header")
        store.put(key_of(1), chunk(BIG, seed=1))
        assert store.verify() == VerifyReport(3, ())
        assert store.stats().bytes == store.stats().chunks * chunk(BIG).n_bytes == 3 * chunk(BIG).n_bytes


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_does_not_keep_a_full_store_from_working(path: Path, kind: str) -> None:
    filled(path)
    tamper(path, DAMAGE[kind][0])
    cap = 3 * chunk(BIG).n_bytes
    with LMDBStore(path, cap, eviction=LRU()) as store:
        for n in range(10, 15):
            store.put(key_of(n), chunk(BIG, seed=n))
            assert store.stats().bytes <= cap
        assert store.verify() == VerifyReport(3, ())
        assert all(key_of(n) in store for n in range(12, 15))


def test_damage_to_one_layer_leaves_the_others_readable(path: Path) -> None:
    filled(path)
    tamper(path, flip(layer_name(1, 2), 0))
    with LMDBStore(path, CAP) as store, store.reading() as snapshot:
        view = snapshot.get(key_of(1))
        assert view is not None
        assert torch.equal(view.layer(0)[0], chunk(BIG, seed=1).keys[0])
        with pytest.raises(CorruptRecord, match="layer 2"):
            view.layer(2)
        with pytest.raises(IndexError):
            view.layer(3)


def test_a_damaged_byte_count_is_counted_anew(path: Path) -> None:
    filled(path)
    tamper(path, flip(b"m:bytes", 0))
    unit = chunk(BIG).n_bytes
    with LMDBStore(path, 3 * unit, eviction=LRU()) as store:
        store.put(key_of(3), chunk(BIG))
        assert [n for n in range(4) if key_of(n) in store] == [1, 2, 3]


def test_a_newer_store_says_upgrade(path: Path) -> None:
    filled(path)
    newer = struct.pack("<4sH", b"BLKV", 99)
    tamper(path, lambda txn: txn.put(b"m:format", newer + xxhash.xxh3_64_digest(newer)))
    with pytest.raises(StoreVersion, match=r"format 99.*upgrade"):
        LMDBStore(path, CAP)


def test_a_damaged_format_record_is_unavailable(path: Path) -> None:
    filled(path)
    tamper(path, flip(b"m:format", 4))
    with pytest.raises(StoreUnavailable, match="format record"):
        LMDBStore(path, CAP)


def test_damaged_pages_are_called_so_with_a_way_out() -> None:
    told = str(explained(lmdb.CorruptedError("mdb_cursor_get", -30796), Path("kv")))
    assert "is damaged" in told
    assert "precompute again" in told
