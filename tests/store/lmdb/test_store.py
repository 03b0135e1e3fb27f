"""The files of a store on disk: where they may be, who has them open, older formats, and damage."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import filelock
import lmdb
import pytest
import xxhash

from blendserve.errors import StoreUnavailable, StoreVersion
from blendserve.store import LMDBStore, VerifyReport
from blendserve.store.lmdb_files import explained
from blendserve.store.policies import LRU
from tests.support.forked import process
from tests.support.stores import (
    BIG,
    CAP,
    Change,
    chunk,
    copy_of,
    filled,
    flip,
    has,
    key_of,
    put_kv,
    read,
    same,
    stored,
    stored_view,
    tamper,
)


def test_views_can_be_read_while_their_snapshot_is_open(path: Path) -> None:
    filled(path)
    store = LMDBStore(path, CAP)
    with store.snapshot() as snapshot:
        view = stored_view(store, snapshot, key_of(0))
        store.close()  # the files stay open for the reader
        assert same(copy_of(view), chunk(BIG))
    with pytest.raises(StoreUnavailable):
        view.layer(0)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_path_that_holds_no_store_is_refused(tmp_path: Path, read_only: bool) -> None:
    (tmp_path / "file").write_text("I am a file")
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage" / "data.mdb").write_bytes(os.urandom(50_000))
    with lmdb.open(str(tmp_path / "foreign")) as env, env.begin(write=True) as txn:
        txn.put(b"some", b"thing")
    places = [tmp_path / name for name in ("file", "file/below", "garbage", "foreign")]
    for place in (*places, Path("/proc/no/store")):
        with pytest.raises(StoreUnavailable) as error:
            LMDBStore(place, CAP, read_only)
        assert error.value.path == str(place)
    with pytest.raises(StoreUnavailable):
        LMDBStore(tmp_path / "kv", CAP, read_only=True)
    assert not (tmp_path / "kv").exists()


def test_a_truncated_file_is_refused_when_it_is_opened_or_read(path: Path) -> None:
    filled(path)
    data = path / "data.mdb"
    with LMDBStore(path, CAP) as store:
        os.truncate(data, data.stat().st_size // 2)
        with pytest.raises(StoreUnavailable), store.snapshot():
            pass
    with pytest.raises(StoreUnavailable):
        LMDBStore(path, CAP)


def test_stores_of_one_process_share_the_files(path: Path) -> None:
    one, other = LMDBStore(path, CAP), LMDBStore(path.parent / "." / "kv", CAP)
    put_kv(one, key_of(0), chunk())
    for _ in range(2):
        one.close()
    with pytest.raises(StoreUnavailable):
        one.stats()
    assert same(read(other, key_of(0)), chunk())
    other.close()

    def work(_: int) -> bool:
        with LMDBStore(path, CAP) as store:
            return same(read(store, key_of(0)), chunk())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))


def test_a_fork_cannot_use_the_stores_of_its_parent(path: Path) -> None:
    def use() -> None:
        for call in (store.stats, lambda: LMDBStore(path, CAP)):
            with pytest.raises(StoreUnavailable):
                call()
        store.close()

    filled(path)
    fork = multiprocessing.get_context("fork").Process
    with LMDBStore(path, CAP) as store, store.snapshot() as snapshot:
        child = fork(target=use)
        child.start()
        child.join()
        assert same(copy_of(stored_view(store, snapshot, key_of(0))), chunk(BIG))
    after = fork(target=lambda: LMDBStore(path, CAP).verify())
    after.start()
    after.join()
    assert (child.exitcode, after.exitcode) == (0, 0)


@pytest.mark.parametrize("change", [shutil.rmtree, lambda path: path.rename(path.parent / "gone")])
def test_a_store_that_is_removed_or_replaced_while_open_is_read_and_not_written(
    path: Path, change: Callable[[Path], object]
) -> None:
    filled(path)
    with LMDBStore(path, CAP) as store:
        change(path)
        with pytest.raises(StoreUnavailable):
            put_kv(store, key_of(7), chunk())
        with pytest.raises(StoreUnavailable):
            store.delete([key_of(0)])
        assert not path.exists()
        assert store.verify().good == 3
        with LMDBStore(path, CAP) as other:  # a new store at the same path
            put_kv(other, key_of(7), chunk())
            assert (has(store, key_of(7)), has(other, key_of(0))) == (False, False)


@pytest.mark.parametrize("version", [1, 2, 99])
def test_a_store_of_another_format_is_refused(path: Path, version: int) -> None:
    filled(path)
    mark = struct.pack("<4sH", b"BLKV", version)
    tamper(path, lambda txn: txn.put(b"m:format", mark + xxhash.xxh3_64_digest(mark)))
    for read_only in (True, False):
        with pytest.raises(StoreVersion) as error:
            LMDBStore(path, CAP, read_only)
        assert error.value.path == str(path)


def hold(line: Connection, path: Path) -> None:
    """Stay the writer until a message comes."""
    with filelock.FileLock(path / "writer.lock"):
        line.send("held")
        line.recv()


def test_a_second_writer_waits_and_is_refused_while_the_first_one_writes(path: Path) -> None:
    LMDBStore(path, CAP).close()
    with (
        process(hold, path) as (holder, held),
        LMDBStore(path, CAP, writer_wait_s=0.05) as hasty,
        LMDBStore(path, CAP, writer_wait_s=60) as patient,
    ):
        assert held.recv() == "held"
        with pytest.raises(StoreUnavailable):
            put_kv(hasty, key_of(1), chunk())
        assert not has(hasty, key_of(1))  # readers do not wait
        holder.kill()
        put_kv(patient, key_of(1), chunk())
        assert same(read(hasty, key_of(1)), chunk())


# Damage to what LMDB alone keeps: the ledger, the byte count, the format. test_machine.py damages chunks.

KEY, UNIT = key_of(1), chunk(BIG).n_bytes


def move_in_order(txn: lmdb.Transaction) -> None:
    """Put chunk 1 elsewhere in the order of eviction."""
    with txn.cursor() as cursor:
        names = [bytes(name) for name in cursor.iternext(values=False)]
    txn.delete(next(name for name in names if name[:1] == b"o" and name.endswith(KEY)))
    txn.put(b"o" + bytes(8) + KEY, b"")


DAMAGES: dict[str, Change] = {
    "missing header": lambda txn: txn.delete(b"h" + KEY),
    "flipped entry": flip(b"u" + KEY, 10),
    "missing entry": lambda txn: txn.delete(b"u" + KEY),
    "entry of another chunk": lambda txn: txn.put(b"u" + KEY, txn.get(b"u" + key_of(0)) or b""),
    "out of order": move_in_order,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_reported_mended_by_put_and_does_not_stop_a_full_store(path: Path, name: str) -> None:
    filled(path)
    tamper(path, DAMAGES[name])
    with LMDBStore(path, CAP) as store:
        report = store.verify()
        assert report.good == 2
        assert [key for key, _ in report.bad] == [KEY.hex()]
        assert (read(store, KEY) is None) == (name == "missing header")
        put_kv(store, KEY, chunk(BIG, seed=1))
        assert store.verify() == VerifyReport(3, ())
        assert store.stats().bytes == 3 * UNIT
    tamper(path, DAMAGES[name])
    with LMDBStore(path, 3 * UNIT, eviction=LRU()) as store:
        for n in range(10, 15):
            put_kv(store, key_of(n), chunk(BIG, seed=n))
            assert store.stats().bytes <= 3 * UNIT
        assert store.verify() == VerifyReport(3, ())
        assert stored(store) >= {12, 13, 14}


def test_damaged_totals_are_recounted(path: Path) -> None:
    filled(path)
    tamper(path, flip(b"n", 16))
    with LMDBStore(path, 3 * UNIT, eviction=LRU()) as store:
        put_kv(store, key_of(3), chunk(BIG))
        assert stored(store) == {1, 2, 3}


def test_a_damaged_format_is_refused(path: Path) -> None:
    filled(path)
    tamper(path, flip(b"m:format", 4))
    with pytest.raises(StoreUnavailable) as error:
        LMDBStore(path, CAP)
    assert error.value.path == str(path)
    damaged_pages = lmdb.CorruptedError("mdb_cursor_get", -30796)
    assert isinstance(explained(damaged_pages, path), StoreUnavailable)
