"""The files of a store on disk: where they may be, who has them open, and what is read out of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
import pytest
import torch

from blendserve.config import StoreConfig
from blendserve.errors import StoreUnavailable
from blendserve.store import LMDBStore, MemoryStore, open_store
from blendserve.store.policies import LRU
from tests.store import format1
from tests.store.helpers import (
    BIG,
    CAP,
    chunk,
    filled,
    key_of,
    read,
    same,
)


def test_views_point_into_the_map(path: Path) -> None:
    filled(path)
    with LMDBStore(path, CAP) as store, store.reading() as snapshot:
        view = snapshot.get(key_of(0))
        assert view is not None
        keys, values = view.layer(1)
        maps = [
            line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "data.mdb" in line
        ]
        ranges = [tuple(int(x, 16) for x in line[0].split("-")) for line in maps]
        for tensor in (keys, values):
            assert any(start <= tensor.data_ptr() < stop for start, stop in ranges)
            assert tensor.is_contiguous()


@pytest.mark.parametrize("read_only", [False, True])
def test_places_that_hold_no_store_are_named(tmp_path: Path, read_only: bool) -> None:
    (tmp_path / "file").write_text("I am a file")
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage" / "data.mdb").write_bytes(os.urandom(50_000))
    with lmdb.open(str(tmp_path / "foreign")) as env, env.begin(write=True) as txn:
        txn.put(b"some", b"thing")
    for place in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "garbage", tmp_path / "foreign"):
        with pytest.raises(StoreUnavailable, match=place.name):
            LMDBStore(place, CAP, read_only)
    with pytest.raises(StoreUnavailable, match="proc"):
        LMDBStore("/proc/no/store", CAP, read_only)


def test_reading_does_not_make_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="no KV store"):
        LMDBStore(tmp_path / "kv", CAP, read_only=True)
    assert not (tmp_path / "kv").exists()


def test_a_file_cut_short_is_refused_on_opening_and_on_reading(path: Path) -> None:
    filled(path)
    data = path / "data.mdb"
    with LMDBStore(path, CAP) as store:
        os.truncate(data, data.stat().st_size // 2)
        with pytest.raises(StoreUnavailable, match="cut short"), store.reading():
            pass
    with pytest.raises(StoreUnavailable, match="cut short"):
        LMDBStore(path, CAP)


def test_stores_of_one_process_share_the_files(path: Path) -> None:
    one, other = LMDBStore(path, CAP), LMDBStore(path.parent / "." / "kv", CAP)
    one.put(key_of(0), chunk())
    assert same(read(other, key_of(0)), chunk())
    one.close()
    one.close()
    other.put(key_of(1), chunk())
    assert other.stats().chunks == 2
    with pytest.raises(StoreUnavailable, match="closed"):
        one.stats()
    other.close()


def test_closing_under_a_reader_waits_for_it(path: Path) -> None:
    filled(path)
    store = LMDBStore(path, CAP)
    with store.reading() as snapshot:
        view = snapshot.get(key_of(0))
        store.close()
        assert view is not None
        assert torch.equal(view.layer(0)[0], chunk(BIG).keys[0])
    with pytest.raises(StoreUnavailable, match="outside"):
        view.layer(0)


def test_many_threads_may_open_and_close(path: Path) -> None:
    filled(path)

    def work(_: int) -> bool:
        with LMDBStore(path, CAP) as store:
            return same(read(store, key_of(0)), chunk(BIG))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(80)))


def in_a_fork(work: Callable[[], object]) -> int:
    """Exit code of a forked child that does `work`."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def test_a_fork_may_not_use_what_its_parent_opened(path: Path) -> None:
    filled(path)

    def use() -> None:
        with pytest.raises(StoreUnavailable, match="fork"):
            store.stats()
        with pytest.raises(StoreUnavailable, match="fork"):
            LMDBStore(path, CAP)
        store.close()

    with LMDBStore(path, CAP) as store, store.reading() as snapshot:
        assert in_a_fork(use) == 0
        view = snapshot.get(key_of(0))
        assert view is not None
        assert torch.equal(view.layer(0)[0], chunk(BIG).keys[0])
    assert in_a_fork(lambda: LMDBStore(path, CAP).verify()) == 0


def test_a_store_replaced_while_open_is_not_written(path: Path) -> None:
    filled(path)
    with LMDBStore(path, CAP) as store:
        path.rename(path.parent / "gone")
        with pytest.raises(StoreUnavailable, match="removed or replaced"):
            store.put(key_of(7), chunk())
        assert same(read(store, key_of(0)), chunk(BIG))
        assert not path.exists()


def test_a_store_deleted_while_open_is_still_read(path: Path) -> None:
    filled(path)
    with LMDBStore(path, CAP) as store:
        shutil.rmtree(path)
        with pytest.raises(StoreUnavailable, match="removed or replaced"):
            store.put(key_of(7), chunk())
        with pytest.raises(StoreUnavailable, match="removed or replaced"):
            store.delete(key_of(0))
        assert store.verify().good == 3
        with LMDBStore(path, CAP) as other:  # a new one at the same place is another one
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
    with open_store(StoreConfig(path=tmp_path / "mine"), tmp_path / "default") as store:
        assert (tmp_path / "mine" / "data.mdb").exists()


def test_a_store_of_format_1_is_read_as_it_is_and_written_on(path: Path) -> None:
    chunks = {key_of(n): chunk(BIG, seed=n) for n in range(3)}
    format1.make_store(path, chunks)
    unit = chunk(BIG).n_bytes
    for read_only in (True, False):
        with LMDBStore(path, 4 * unit, read_only) as store:
            assert all(same(read(store, key), kv) for key, kv in chunks.items())
            assert store.verify().good == 3
            stats = store.stats()
            assert (stats.bytes, stats.raw_bytes, stats.hits - 3, stats.misses) == (3 * unit, 3 * unit, 1, 1)
    with LMDBStore(path, 4 * unit, eviction=LRU()) as store:
        for n in (3, 4):  # the first of the old ones goes for the second
            store.put(key_of(n), chunk(BIG, seed=n))
        assert [n for n in range(5) if key_of(n) in store] == [1, 2, 3, 4]
        store.put(key_of(1), chunk(3))
        assert store.verify().good == 4
        assert store.stats().raw_bytes == store.stats().bytes == 3 * unit + chunk(3).n_bytes


def test_a_store_of_format_1_that_is_written_tells_an_older_blendserve(path: Path) -> None:
    format1.make_store(path, {key_of(0): chunk()})
    LMDBStore(path, CAP, read_only=True).close()
    assert format_of(path) == 1
    LMDBStore(path, CAP).close()
    assert format_of(path) == 3


def format_of(path: Path) -> int:
    with lmdb.open(str(path), readonly=True) as env, env.begin() as txn:
        return int.from_bytes((txn.get(b"m:format") or b"")[4:6], "little")
