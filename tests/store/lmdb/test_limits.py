"""The cap, the map, the disk and the rights to write: each is an error of one chunk, never a damaged store."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from blendserve.errors import StoreFull, StoreUnavailable
from blendserve.store import LMDBStore
from blendserve.store.policies import LRU
from tests.support.forked import run
from tests.store.helpers import (
    BIG,
    CAP,
    chunk,
    filled,
    key_of,
    read,
    same,
)


def test_a_full_map_is_one_chunks_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blendserve.store.lmdb.store.map_bytes", lambda cap: 1 << 20)
    with LMDBStore(path, CAP) as store:
        store.put(key_of(0), chunk(BIG))
        with pytest.raises(StoreFull, match=r"store\.cap_gb"):
            store.put(key_of(1), chunk(40 * BIG))
        assert store.verify().good == 1
        store.put(key_of(1), chunk(BIG))
        assert store.verify().good == 2


def churn(store: LMDBStore) -> int:
    """Chunks of changing sizes, several times what the store may hold -> bytes put."""
    total = 0
    for i in range(150):
        kv = chunk(1 + 37 * i % 400)
        assert store.put(key_of(i), kv)
        total += kv.n_bytes
        assert store.stats().bytes <= store.cap_bytes
    return total


def test_the_cap_comes_before_the_map(path: Path) -> None:
    with LMDBStore(path, 1_000_000, eviction=LRU()) as store:
        assert churn(store) > 5_000_000
        assert store.stats().bytes > 900_000
        assert (path / "data.mdb").stat().st_size < 2_000_000
        assert store.verify().bad == ()


def test_where_the_map_comes_first_chunks_are_evicted_ahead(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendserve.store.lmdb.store.map_bytes", lambda cap: cap + 20 * 4096)
    with LMDBStore(path, 1 << 20, eviction=LRU()) as store:
        assert churn(store) > 5_000_000
        assert store.stats().bytes > 500_000
        assert store.verify().bad == ()


def fill_more(connection: Connection, path: Path) -> None:
    with LMDBStore(path, CAP) as store:
        for n in range(40):
            store.put(key_of(n), chunk(BIG, seed=n))


def test_a_store_enlarged_by_another_process_says_open_it_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendserve.store.lmdb.store.map_bytes", lambda cap: 1 << 20)
    with LMDBStore(path, CAP) as store:
        run(fill_more, path)
        with pytest.raises(StoreUnavailable, match="enlarged by another process"):
            read(store, key_of(0))
    with LMDBStore(path, CAP) as store:
        assert store.verify().good == 40


def fill_the_disk(connection: Connection, path: Path) -> None:
    with LMDBStore(path, CAP) as store:
        store.put(key_of(0), chunk(300))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        with pytest.raises(StoreFull, match="disk"):
            store.put(key_of(1), chunk(30_000))
        assert store.verify().good == 1
        store.put(key_of(2), chunk(300))


def test_a_full_disk_is_one_chunks_error(path: Path) -> None:
    run(fill_the_disk, path)
    with LMDBStore(path, CAP) as store:
        assert sorted(store.keys()) == sorted([key_of(0), key_of(2)])
        assert store.verify().good == 2


def look_without_rights(connection: Connection, path: Path) -> None:
    LMDBStore(
        path.with_name("other"), CAP
    ).close()  # imports what nobody may not read where packages are private
    with as_nobody(path), LMDBStore(path, CAP) as store:
        lock(path)
        with pytest.raises(StoreUnavailable, match=r"writer\.lock"):
            store.put(key_of(5), chunk())
        assert store.verify().good == 3
    with LMDBStore(path, CAP, read_only=True) as store:
        assert same(read(store, key_of(1)), chunk(BIG, seed=1))
        assert store.verify().good == 3
    with pytest.raises(StoreUnavailable, match="writable"):
        LMDBStore(path, CAP)


@contextmanager
def as_nobody(path: Path) -> Iterator[None]:
    """Root may write anywhere, so be someone else, who owns the store."""
    if os.getuid() == 0:
        for place in (path, *path.iterdir()):
            os.chown(place, 65534, 65534)
        os.setgid(65534)
        os.setuid(65534)
    yield


def lock(path: Path) -> None:
    for place in (*path.iterdir(), path):
        place.chmod(0o555 if place.is_dir() else 0o444)


def test_a_store_that_turns_read_only_can_be_read(path: Path) -> None:
    """While it is open, and when it is opened after that."""
    filled(path)
    for folder in path.parents[:4]:  # pytest's own folders, and a worker's, are private
        if folder.owner() != path.owner() or folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(folder.stat().st_mode | 0o055)
    run(look_without_rights, path)
    path.chmod(0o755)
