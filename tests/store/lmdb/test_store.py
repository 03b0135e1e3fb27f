"""The files of a store on disk: where they may be, who has them open, older formats, and damage."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import filelock
import lmdb
import pytest
import torch
import xxhash

from blendserve.config import StoreConfig
from blendserve.errors import StoreUnavailable, StoreVersion
from blendserve.store import LMDBStore, MemoryStore, VerifyReport, open_store
from blendserve.store.lmdb.opening import explained
from blendserve.store.policies import LRU
from tests.support.damages import make_store_of_format_1
from tests.support.forked import process
from tests.support.stores import BIG, CAP, Change, chunk, filled, flip, key_of, read, same, stored, tamper
from tests.support.waiting import ManualClock


def test_views_are_slices_of_the_map_while_the_snapshot_is_open(path: Path) -> None:
    filled(path)
    store = LMDBStore(path, CAP)
    with store.reading() as snapshot:
        view = snapshot.get(key_of(0))
        assert view is not None
        maps = [
            line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "data.mdb" in line
        ]
        ranges = [tuple(int(x, 16) for x in line.split("-")) for line in maps]
        for tensor in view.layer(1):
            assert any(start <= tensor.data_ptr() < stop for start, stop in ranges)
            assert tensor.is_contiguous()
        store.close()  # the files stay open for the reader
        assert torch.equal(view.layer(0)[0], chunk(BIG).keys[0])
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
        with pytest.raises(StoreUnavailable), store.reading():
            pass
    with pytest.raises(StoreUnavailable):
        LMDBStore(path, CAP)


def test_stores_of_one_process_share_the_files(path: Path) -> None:
    one, other = LMDBStore(path, CAP), LMDBStore(path.parent / "." / "kv", CAP)
    one.put(key_of(0), chunk())
    assert same(read(other, key_of(0)), chunk())
    for _ in range(2):
        one.close()
    other.put(key_of(1), chunk())
    assert other.stats().chunks == 2
    with pytest.raises(StoreUnavailable):
        one.stats()
    other.close()

    def work(_: int) -> bool:
        with LMDBStore(path, CAP) as store:
            return same(read(store, key_of(0)), chunk())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))


def in_a_fork(work: Callable[[], object]) -> int | None:
    """Exit code of a forked child that does `work`."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    return child.exitcode


def test_a_fork_cannot_use_the_stores_of_its_parent(path: Path) -> None:
    filled(path)

    def use() -> None:
        for call in (store.stats, lambda: LMDBStore(path, CAP)):
            with pytest.raises(StoreUnavailable):
                call()
        store.close()

    with LMDBStore(path, CAP) as store, store.reading() as snapshot:
        assert in_a_fork(use) == 0
        view = snapshot.get(key_of(0))
        assert view is not None
        assert torch.equal(view.layer(0)[0], chunk(BIG).keys[0])
    assert in_a_fork(lambda: LMDBStore(path, CAP).verify()) == 0


@pytest.mark.parametrize("change", [shutil.rmtree, lambda path: path.rename(path.parent / "gone")])
def test_a_store_that_is_removed_or_replaced_while_open_is_read_and_not_written(
    path: Path, change: Callable[[Path], object]
) -> None:
    filled(path)
    with LMDBStore(path, CAP) as store:
        change(path)
        with pytest.raises(StoreUnavailable):
            store.put(key_of(7), chunk())
        with pytest.raises(StoreUnavailable):
            store.delete(key_of(0))
        assert not path.exists()
        assert store.verify().good == 3
        with LMDBStore(path, CAP) as other:  # a new store at the same path
            other.put(key_of(7), chunk())
            assert (key_of(7) in store, key_of(0) in other) == (False, False)


def test_the_settings_choose_the_store(tmp_path: Path) -> None:
    with open_store(StoreConfig(kind="memory", cap_gb=0.5), tmp_path) as store:
        assert isinstance(store, MemoryStore)
        assert store.stats().cap_bytes == 500_000_000
    with open_store(StoreConfig(), None) as store:  # no folder for the default kind
        assert isinstance(store, MemoryStore)
    with open_store(StoreConfig(kind="memory"), tmp_path / "kept", persistent=True) as store:
        assert isinstance(store, LMDBStore)
    with open_store(StoreConfig(), tmp_path / "default") as store:
        assert store.stats().path == str(tmp_path / "default")
    with open_store(StoreConfig(path=tmp_path / "own"), tmp_path / "default") as store:
        assert (tmp_path / "own" / "data.mdb").exists()


def test_a_store_of_format_1_is_read_unchanged_and_upgraded_by_a_writer(path: Path) -> None:
    chunks = {key_of(n): chunk(BIG, seed=n) for n in range(3)}
    make_store_of_format_1(path, chunks)
    for read_only, version in ((True, 1), (False, 3)):
        with LMDBStore(path, 4 * UNIT, read_only) as store:
            assert all(same(read(store, key), kv) for key, kv in chunks.items())
            assert store.verify().good == 3
            stats = store.stats()
            assert (stats.bytes, stats.raw_bytes, stats.hits - 3, stats.misses) == (3 * UNIT, 3 * UNIT, 1, 1)
        assert format_of(path) == version  # an older blendserve may not write any more
    with LMDBStore(path, 4 * UNIT, eviction=LRU()) as store:
        for n in (3, 4):
            store.put(key_of(n), chunk(BIG, seed=n))
        assert stored(store) == {1, 2, 3, 4}
        store.put(key_of(1), chunk(3))
        assert store.verify().good == 4
        assert store.stats().raw_bytes == store.stats().bytes == 3 * UNIT + chunk(3).n_bytes


def format_of(path: Path) -> int:
    with lmdb.open(str(path), readonly=True) as env, env.begin() as txn:
        return int.from_bytes((txn.get(b"m:format") or b"")[4:6], "little")


def hold(line: Connection, path: Path) -> None:
    """Stay the writer until a message comes."""
    with filelock.FileLock(path / "writer.lock"):
        line.send("held")
        line.recv()


@pytest.mark.parametrize("ends", ["killed", "done"])
def test_a_second_writer_waits_and_is_refused_while_the_first_one_writes(path: Path, ends: str) -> None:
    LMDBStore(path, CAP).close()
    with (
        process(hold, path) as (holder, held),
        LMDBStore(path, CAP, writer_wait_s=0.05) as hasty,
        LMDBStore(path, CAP, writer_wait_s=60) as patient,
    ):
        assert held.recv() == "held"
        with pytest.raises(StoreUnavailable):
            hasty.put(key_of(1), chunk())
        assert key_of(1) not in hasty  # readers do not wait
        holder.kill() if ends == "killed" else held.send("go on")
        patient.put(key_of(1), chunk())
        assert same(read(hasty, key_of(1)), chunk())


def lease(line: Connection, path: Path) -> None:
    with LMDBStore(path, CAP) as store:
        line.send(store.lease(key_of(0), 600) is not None)
        line.recv()


def test_a_killed_process_keeps_its_lease_until_it_expires(path: Path) -> None:
    clock = ManualClock(time.time_ns())
    with LMDBStore(path, CAP, clock=clock) as store:
        with process(lease, path) as (_, line):
            assert line.recv()
        assert store.lease(key_of(0), 10) is None
        clock.advance(3600)
        assert store.lease(key_of(0), 10) is not None


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
        store.put(KEY, chunk(BIG, seed=1))
        assert store.verify() == VerifyReport(3, ())
        assert store.stats().bytes == 3 * UNIT
    tamper(path, DAMAGES[name])
    with LMDBStore(path, 3 * UNIT, eviction=LRU()) as store:
        for n in range(10, 15):
            store.put(key_of(n), chunk(BIG, seed=n))
            assert store.stats().bytes <= 3 * UNIT
        assert store.verify() == VerifyReport(3, ())
        assert stored(store) >= {12, 13, 14}


def test_a_damaged_byte_count_is_recounted(path: Path) -> None:
    filled(path)
    tamper(path, flip(b"m:bytes", 0))
    with LMDBStore(path, 3 * UNIT, eviction=LRU()) as store:
        store.put(key_of(3), chunk(BIG))
        assert stored(store) == {1, 2, 3}


def test_a_newer_or_damaged_format_is_refused(path: Path) -> None:
    filled(path)
    newer = struct.pack("<4sH", b"BLKV", 99)
    tamper(path, lambda txn: txn.put(b"m:format", newer + xxhash.xxh3_64_digest(newer)))
    with pytest.raises(StoreVersion):
        LMDBStore(path, CAP)
    tamper(path, flip(b"m:format", 4))
    with pytest.raises(StoreUnavailable) as error:
        LMDBStore(path, CAP)
    assert error.value.path == str(path)
    damaged_pages = explained(lmdb.CorruptedError("mdb_cursor_get", -30796), path)
    assert isinstance(damaged_pages, StoreUnavailable)
    assert damaged_pages.path == str(path)
