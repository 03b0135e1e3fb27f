"""An LMDB store's files, limits and ledger: where it may be, who has it open, what is full, other formats, damage."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import struct
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import filelock
import lmdb
import pytest
import xxhash

from blendserve.errors import CorruptRecord, StoreCircuitOpen, StoreFull, StoreUnavailable, StoreVersion
from blendserve.store import LMDBStore, VerifyReport
from blendserve.store.lmdb_files import FORMAT
from blendserve.store.view import decode
from tests.support.forked import process, run
from tests.support.stores import (
    BIG,
    CAP,
    chunk,
    filled,
    flip,
    has,
    key_of,
    put_kv,
    read,
    same,
    stored,
    tamper,
)
from tests.support.waiting import ManualClock

MAP_BYTES = "blendserve.store.lmdb.map_bytes"


def test_chunks_can_be_read_while_their_snapshot_is_open(path: Path) -> None:
    filled(path)
    store = LMDBStore(path, CAP)
    with store.snapshot() as snapshot:
        record = snapshot.get(key_of(0))
        assert record
        store.close()  # the files stay open for the reader
        assert same(decode(record), chunk(BIG))
    with pytest.raises(StoreUnavailable):
        record.segment(0)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_path_that_holds_no_store_is_refused(tmp_path: Path, read_only: bool) -> None:
    (tmp_path / "file").write_text("I am a file")
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage" / "data.mdb").write_bytes(os.urandom(50_000))
    with lmdb.open(str(tmp_path / "foreign")) as env, env.begin(write=True) as txn:
        txn.put(b"some", b"thing")
    for name in ("file", "file/below", "garbage", "foreign", "/proc/no/store"):
        place = tmp_path / name
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
            return has(store, key_of(0))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))


def test_a_fork_cannot_use_the_stores_of_its_parent(path: Path) -> None:
    def use() -> None:
        for call in (store.stats, lambda: LMDBStore(path, CAP)):
            with pytest.raises(StoreUnavailable):
                call()
        store.close()

    def succeeds(target: Callable[[], object]) -> bool:
        child = multiprocessing.get_context("fork").Process(target=target)
        child.start()
        child.join()
        return child.exitcode == 0

    filled(path)
    with LMDBStore(path, CAP) as store, store.snapshot() as snapshot:
        assert succeeds(use)
        record = snapshot.get(key_of(0))
        assert record
        assert same(decode(record), chunk(BIG))
    assert succeeds(lambda: LMDBStore(path, CAP).verify())


def replace_file(path: Path) -> None:
    """Put another store's file in the place of this one's."""
    with LMDBStore(path.parent / "new", CAP) as new:
        put_kv(new, key_of(8), chunk())
    os.replace(path.parent / "new" / "data.mdb", path / "data.mdb")


CHANGES: dict[str, Callable[[Path], object]] = {
    "folder deleted": shutil.rmtree,
    "folder moved": lambda path: path.rename(path.parent / "gone"),
    "file deleted": lambda path: (path / "data.mdb").unlink(),
    "file replaced": replace_file,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_store_that_is_removed_or_replaced_while_open_is_opened_anew(path: Path, name: str) -> None:
    filled(path)
    new = {8} if name == "file replaced" else set()
    with LMDBStore(path, CAP) as store, LMDBStore(path, CAP) as second:
        with store.snapshot() as snapshot:
            CHANGES[name](path)
            record = snapshot.get(key_of(0))
            assert record
            assert same(decode(record), chunk(BIG))  # what is open stays as it was
            with pytest.raises(StoreUnavailable):
                store.stats()
        assert stored(store) == new
        put_kv(store, key_of(7), chunk())
        assert stored(store) == stored(second) == {7, *new}
        assert second.verify() == VerifyReport(1 + len(new), ())
    with LMDBStore(path, CAP) as store:
        assert stored(store) == {7, *new}


def test_a_store_whose_folder_was_moved_is_not_made_anew_in_its_place(path: Path) -> None:
    path = path.parent / "index" / "kv"
    filled(path)
    with LMDBStore(path, CAP) as store:
        path.parent.rename(path.parent.with_name("elsewhere"))
        for call in (store.stats, lambda: put_kv(store, key_of(7), chunk())):
            with pytest.raises(StoreUnavailable):
                call()
        assert not path.parent.exists()
        path.parent.with_name("elsewhere").rename(path.parent)
        put_kv(store, key_of(7), chunk())
        assert stored(store) == {0, 1, 2, 7}


def flip_pages(_: Connection, path: Path) -> None:
    """Flip bits of the heads of pages and of their first nodes, and others: a damaged store is refused, or works."""
    data, page = path / "data.mdb", 4096
    raw, draw, n_refused = data.read_bytes(), random.Random(0), 0
    places = list[tuple[int, int]]()
    for at in range(0, len(raw), page):
        flags, _, _, node = struct.unpack_from("<HHHH", raw, at + 10)
        if flags in (1, 2):  # in a tree
            node = min(node, page - 8)
            places += ((at, byte) for byte in (*range(10, 32), *range(node, node + 8)))
            places += ((at, byte) for byte in draw.sample(range(32, page), 8))
    for at, byte in places:
        changed = bytearray(raw)
        changed[at + byte] ^= 1 << draw.randrange(8)
        data.write_bytes(changed)
        try:
            with LMDBStore(path, CAP) as store:
                with suppress(CorruptRecord):
                    read(store, key_of(1))
                store.delete([key_of(0), key_of(5)])
                put_kv(store, key_of(1), chunk(BIG))
                put_kv(store, key_of(9), chunk(2), pin=True)
        except StoreUnavailable:
            n_refused += 1
    assert 0 < n_refused < len(places)


def test_a_flipped_bit_in_the_pages_ends_no_process(path: Path) -> None:
    with LMDBStore(path, CAP) as store:
        for n in range(12):
            put_kv(store, key_of(n), chunk(BIG if n % 4 == 0 else 12, seed=n))
        store.delete(map(key_of, range(4, 7)))
    run(flip_pages, path)


@pytest.mark.parametrize("version", [3, 99, None])
def test_a_store_of_another_or_a_damaged_format_is_refused(path: Path, version: int | None) -> None:
    filled(path)
    mark = struct.pack("<4sH", b"BLKV", version or FORMAT)
    tamper(path, lambda txn: txn.put(b"m:format", mark + xxhash.xxh3_64_digest(mark)[: 8 if version else 7]))
    for read_only in (True, False):
        with pytest.raises(StoreVersion if version else StoreUnavailable) as error:
            LMDBStore(path, CAP, read_only)
        assert error.value.path == str(path)


def test_a_writer_waits_for_another_one_for_some_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LMDBStore(path, CAP).close()
    with filelock.FileLock(path / "writer.lock") as another, LMDBStore(path, CAP) as store:
        monkeypatch.setattr("blendserve.store.lmdb.WRITER_WAIT_S", 0.05)
        with pytest.raises(StoreUnavailable):
            put_kv(store, key_of(1), chunk(), pin=True)
        assert not has(store, key_of(1))  # readers do not wait
        monkeypatch.setattr("blendserve.store.lmdb.WRITER_WAIT_S", 60)
        another.release()
        put_kv(store, key_of(1), chunk(), pin=True)
        assert same(read(store, key_of(1)), chunk())


def test_requests_do_not_wait_for_a_writer_that_was_stopped(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One waits a moment; the others are told that nothing can be stored, until a pause is over."""
    monkeypatch.setattr("blendserve.store.lmdb.WRITER_WAIT_S", 1e6)
    LMDBStore(path, CAP).close()
    clock = ManualClock()
    with LMDBStore(path, CAP, clock=clock) as store:
        with filelock.FileLock(path / "writer.lock"):
            assert store.admits(key_of(1), 100)
            with pytest.raises(StoreUnavailable):
                put_kv(store, key_of(1), chunk())
            with pytest.raises(StoreCircuitOpen):
                store.admits(key_of(1), 100)
            with pytest.raises(StoreCircuitOpen):
                put_kv(store, key_of(1), chunk())
            with pytest.raises(StoreCircuitOpen):
                store.delete([key_of(1)], wait=False)
            assert store.lease([key_of(1)], 1.0) == {key_of(1)}
            store.release([key_of(1)])
        put_kv(store, key_of(2), chunk(), pin=True)  # who waits longer gets through, and tells the others
        assert store.admits(key_of(1), 100)
        assert put_kv(store, key_of(1), chunk())


def lease_for_ever(there: Connection, path: Path) -> None:
    with LMDBStore(path, CAP) as store:
        there.send(store.lease([key_of(1)], 1e6) == {key_of(1)})
        there.recv()


def test_the_lease_of_a_killed_process_ends_with_it(path: Path) -> None:
    with LMDBStore(path, CAP) as store:
        with process(lease_for_ever, path) as (_, there):
            assert there.recv()
            assert store.lease([key_of(1)], 1.0) == set()
        assert store.lease([key_of(1)], 1.0) == {key_of(1)}


def test_a_full_map_is_the_error_of_one_chunk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MAP_BYTES, lambda cap: 1 << 20)
    with LMDBStore(path, CAP) as store:
        put_kv(store, key_of(0), chunk(BIG))
        with pytest.raises(StoreFull) as error:
            put_kv(store, key_of(1), chunk(40 * BIG))
        assert error.value.setting == "store.cap_gb"
        put_kv(store, key_of(1), chunk(BIG))
        assert store.verify() == VerifyReport(2, ())


@pytest.mark.parametrize("map_is_small", [False, True])
def test_the_cap_is_reached_before_the_map_or_chunks_are_evicted_early(
    path: Path, map_is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of changing sizes, several times what the store may hold."""
    if map_is_small:
        monkeypatch.setattr(MAP_BYTES, lambda cap: cap + 20 * 4096)
    total = 0
    with LMDBStore(path, 1 << 20) as store:
        for i in range(150):
            kv = chunk(1 + 37 * i % 400)
            assert put_kv(store, key_of(i), kv)
            total += kv.n_bytes
            assert store.stats().bytes <= store.cap_bytes
        assert total > 5_000_000
        assert store.stats().bytes > (500_000 if map_is_small else 900_000)
        assert (path / "data.mdb").stat().st_size < 2_000_000
        assert store.verify().bad == ()


def test_a_full_map_evicts_nothing_of_a_namespace_that_holds_less_than_its_share(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map is full before the cap, as pages are used in part."""
    monkeypatch.setattr(MAP_BYTES, lambda cap: cap + 40 * 4096)
    with LMDBStore(path, 1 << 20) as store:
        own = [key_of(n, "tenant") for n in range(3)]
        for key in own:
            assert put_kv(store, key, chunk(10))
        for n in range(150):
            assert put_kv(store, key_of(n), chunk(1 + 37 * n % 400))
        assert store.contains(own) == set(own)


def fill_the_disk(_: Connection, path: Path) -> None:
    with LMDBStore(path, CAP) as store:
        put_kv(store, key_of(0), chunk(300))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        with pytest.raises(StoreFull):
            put_kv(store, key_of(1), chunk(30_000))
        put_kv(store, key_of(2), chunk(300))


def test_a_full_disk_is_the_error_of_one_chunk(path: Path) -> None:
    run(fill_the_disk, path)
    with LMDBStore(path, CAP) as store:
        assert stored(store) == {0, 2}
        assert store.verify().good == 2


def read_without_permission(_: Connection, path: Path) -> None:
    LMDBStore(path.with_name("other"), CAP).close()  # imports what is unreadable where packages are private
    places = (*path.iterdir(), path)
    if os.getuid() == 0:  # who may write anywhere: become another user, the owner of the store
        for place in places:
            os.chown(place, 65534, 65534)
        os.setgid(65534)
        os.setuid(65534)
    with LMDBStore(path, CAP) as store:
        for place in places:
            place.chmod(0o555 if place.is_dir() else 0o444)
        with pytest.raises(StoreUnavailable):
            put_kv(store, key_of(5), chunk())
        assert store.verify().good == 3
    with LMDBStore(path, CAP, read_only=True) as store:
        assert same(read(store, key_of(1)), chunk(BIG, seed=1))
    with pytest.raises(StoreUnavailable):
        LMDBStore(path, CAP)


def test_a_store_without_write_permission_can_be_read(path: Path) -> None:
    """While it is open, and when it is opened later."""
    filled(path)
    for folder in path.parents[:4]:  # pytest's own folders, and a worker's, are private
        if folder.owner() != path.owner() or folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(folder.stat().st_mode | 0o055)
    run(read_without_permission, path)
    path.chmod(0o755)


# Damage to what LMDB alone keeps: the ledger, the byte count, the format. test_machine.py damages chunks.

KEY, UNIT = key_of(1), chunk(BIG).n_bytes


def move_in_order(txn: lmdb.Transaction) -> None:
    """Put chunk 1 elsewhere in the order of eviction."""
    with txn.cursor() as cursor:
        names = [bytes(name) for name in cursor.iternext(values=False)]
    txn.delete(next(name for name in names if name[:1] == b"o" and name.endswith(KEY)))
    txn.put(b"o" + bytes(8) + KEY, b"")


DAMAGES: dict[str, Callable[[lmdb.Transaction], object]] = {
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
    with LMDBStore(path, 3 * UNIT) as store:
        for n in range(10, 15):
            put_kv(store, key_of(n), chunk(BIG, seed=n))
            assert store.stats().bytes <= 3 * UNIT
        assert store.verify() == VerifyReport(3, ())
        assert stored(store) >= {12, 13, 14}


def test_damaged_totals_are_recounted(path: Path) -> None:
    filled(path)
    tamper(path, flip(b"n", 16))
    with LMDBStore(path, 3 * UNIT) as store:
        put_kv(store, key_of(3), chunk(BIG))
        assert stored(store) == {1, 2, 3}


def open_in_little_space(connection: Connection, path: Path, cap_bytes: int, read_only: bool) -> None:
    """Send whether chunk 0 can be read; "refused" where the map does not fit."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**33, used + 2**33))
    try:
        store = LMDBStore(path, cap_bytes, read_only=read_only)
        connection.send(has(store, key_of(0)))
    except StoreUnavailable as error:
        connection.send("refused" if isinstance(error.__cause__, lmdb.MemoryError) else str(error.__cause__))


@pytest.mark.parametrize("read_only", [False, True])
def test_a_large_map_opens_in_little_address_space_under_a_lower_cap(path: Path, read_only: bool) -> None:
    filled(path)
    with lmdb.open(str(path), map_size=2**37) as env, env.begin(write=True) as txn:
        txn.put(b"~", b"")  # the file asks for so much from now on
    for cap, expected in ((2**36, "refused"), (CAP, True)):
        with process(open_in_little_space, path, cap, read_only) as (_, connection):
            assert connection.recv() == expected
