"""The cap, the map, the disk and file permissions: each limit is the error of one chunk, never a damaged store."""

from __future__ import annotations

import os
import resource
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from blendserve.errors import StoreFull, StoreUnavailable
from blendserve.store import LMDBStore
from blendserve.store.policies import LRU
from tests.support.forked import run
from tests.support.stores import BIG, CAP, chunk, filled, key_of, put_kv, read, same, stored

MAP_BYTES = "blendserve.store.lmdb.map_bytes"


def test_a_full_map_is_the_error_of_one_chunk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MAP_BYTES, lambda cap: 1 << 20)
    with LMDBStore(path, CAP) as store:
        put_kv(store, key_of(0), chunk(BIG))
        with pytest.raises(StoreFull) as error:
            put_kv(store, key_of(1), chunk(40 * BIG))
        assert error.value.setting == "store.cap_gb"
        assert store.verify().good == 1
        put_kv(store, key_of(1), chunk(BIG))
        assert store.verify().good == 2


@pytest.mark.parametrize("map_is_small", [False, True])
def test_the_cap_is_reached_before_the_map_or_chunks_are_evicted_early(
    path: Path, map_is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of changing sizes, several times what the store may hold."""
    if map_is_small:
        monkeypatch.setattr(MAP_BYTES, lambda cap: cap + 20 * 4096)
    total = 0
    with LMDBStore(path, 1 << 20, eviction=LRU()) as store:
        for i in range(150):
            kv = chunk(1 + 37 * i % 400)
            assert put_kv(store, key_of(i), kv)
            total += kv.n_bytes
            assert store.stats().bytes <= store.cap_bytes
        assert total > 5_000_000
        assert store.stats().bytes > (500_000 if map_is_small else 900_000)
        assert (path / "data.mdb").stat().st_size < 2_000_000
        assert store.verify().bad == ()


def fill_more(_: Connection, path: Path) -> None:
    filled(path, 40)


def test_a_map_that_another_process_enlarged_needs_a_new_store_object(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MAP_BYTES, lambda cap: 1 << 20)
    with LMDBStore(path, CAP) as store:
        run(fill_more, path)
        with pytest.raises(StoreUnavailable):
            read(store, key_of(0))
    with LMDBStore(path, CAP) as store:
        assert store.verify().good == 40


def fill_the_disk(_: Connection, path: Path) -> None:
    with LMDBStore(path, CAP) as store:
        put_kv(store, key_of(0), chunk(300))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        with pytest.raises(StoreFull):
            put_kv(store, key_of(1), chunk(30_000))
        assert store.verify().good == 1
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
