"""An own store before a remote one: who is asked, what comes near, what a failure costs, and what a deletion reaches."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blendserve.config import Config, StoreConfig
from blendserve.errors import ConfigError, StoreFull, StoreUnavailable
from blendserve.store import KVStore, LayeredStore, LMDBStore, MemoryStore, open_store
from blendserve.store import fetching as fetching_module
from blendserve.store.policies import Always
from blendserve.store.tiers import Tier
from tests.store.helpers import BIG, CAP, chunk, flip, key_of, read, same, tamper
from tests.store.remote import RemoteStore
from tests.store.toy_codec import Toy

UNIT = chunk(10).n_bytes
TABLES = bytes(range(1, 256)) + b"\0"


@pytest.fixture
def shared() -> MemoryStore:
    """What the other machines have."""
    store = MemoryStore(CAP)
    for n in range(6):
        store.put(key_of(n), chunk(10, seed=n))
    return store


@pytest.fixture
def remote(shared: MemoryStore) -> RemoteStore:
    return RemoteStore(shared)


@pytest.fixture
def disk(tmp_path: Path) -> LMDBStore:
    return LMDBStore(tmp_path / "kv", CAP)


@pytest.fixture
def store(disk: LMDBStore, remote: RemoteStore) -> Iterator[LayeredStore]:
    memory = Tier("memory", 2 * UNIT, Always(), lambda pair: (pair[0].clone(), pair[1].clone()))
    with LayeredStore(disk, remote, [memory], prefetch_bytes=CAP) as store:
        yield store


def ask(store: KVStore, *numbers: int) -> list[str]:
    """Read these chunks as one request, and check them -> the tier that each came from; "" = it was missing."""
    keys, tiers = [key_of(n) for n in numbers], []
    with store.reading() as snapshot:
        snapshot.expect(keys)
        for n, key in zip(numbers, keys, strict=True):
            view = snapshot.get(key)
            tiers.append(snapshot.tier(key) if view else "")
            for l in range(view.n_layers if view else 0):
                assert view is not None
                assert torch.equal(view.layer(l)[0], chunk(10, seed=n).keys[l])
                assert torch.equal(view.layer(l)[1], chunk(10, seed=n).values[l])
    return tiers


def test_what_a_request_lacks_is_read_in_one_go_and_then_is_near(
    store: LayeredStore, remote: RemoteStore, disk: LMDBStore
) -> None:
    assert ask(store, 0, 1, 2, 3) == ["remote"] * 4
    store.flush()
    assert all(key_of(n) in disk for n in range(4))
    assert ask(store, 3, 2, 1, 0) == ["memory", "memory", "local", "local"]  # the tier has room for two
    assert remote.trips == [4]


def test_only_what_is_missing_here_is_asked_for(store: LayeredStore, remote: RemoteStore) -> None:
    store.put(key_of(1), chunk(10, seed=1))
    assert ask(store, 0, 1, 9) == ["remote", "local", ""]
    assert remote.trips == [2]
    stats = store.stats()
    assert stats.remote is not None
    assert (stats.remote.hits, stats.remote.misses) == (1, 1)
    assert stats.to_dict()["remote_hits"] == 1
    assert store.stats("").remote is None  # a tenant is told nothing of what others asked for


def test_what_is_hot_is_served_from_memory_without_asking_anybody(remote: RemoteStore) -> None:
    """Also where the own store has no room for it."""
    memory = Tier("memory", 2 * UNIT, Always(), lambda pair: (pair[0].clone(), pair[1].clone()))
    with LayeredStore(MemoryStore(0), remote, [memory]) as store:
        assert ask(store, 0, 1) == ["remote", "remote"]
        store.flush()
        assert ask(store, 0, 1) == ["memory", "memory"]
        assert remote.trips == [2]


def test_what_waits_to_be_written_is_bounded_dropped_by_name_and_finished_at_the_end(
    remote: RemoteStore, shared: MemoryStore, disk: LMDBStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = LayeredStore(disk, remote, waiting_bytes=2 * UNIT)
    remote.gate.clear()
    with caplog.at_level(logging.WARNING):
        for n in range(10, 14):
            assert store.put(key_of(n), chunk(10, seed=n))
    stats = store.stats().remote
    assert stats is not None
    assert (stats.dropped, stats.waiting_bytes) == (2, 2 * UNIT)
    assert "too many wait" in caplog.text
    remote.gate.set()
    store.close()
    assert [n for n in range(10, 14) if key_of(n) in shared._chunks] == []  # closed with it
    assert remote.puts == 2


def test_with_the_remote_store_down_everything_here_goes_on(
    store: LayeredStore, remote: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(key_of(0), chunk(10, seed=0))
    remote.down = True
    with store.reading() as snapshot:
        snapshot.expect([key_of(0), key_of(1), key_of(2)])
        assert snapshot.get(key_of(0)) is not None
        assert snapshot.get(key_of(1)) is None
        assert snapshot.undecodable[key_of(1)].kind == "unreachable"
        assert "the network is down" in str(snapshot.undecodable[key_of(1)])
    assert store.put(key_of(11), chunk(10, seed=11))
    assert store.present([key_of(0), key_of(1)]) == {key_of(0)}
    assert store.lease(key_of(1), 1) is not None
    assert store.wants(key_of(12), UNIT)
    assert ask(store, 0, 1, 11) == ["local", "", "local"]
    store.flush()
    remote.down = False
    monkeypatch.setattr(store._fetcher, "_rest_until", 0.0)  # as if the rest were over
    assert ask(store, 1) == ["remote"]
    stats = store.stats().remote
    assert stats is not None
    assert stats.failures >= 1


def test_after_a_failure_others_do_not_wait_for_it_too(store: LayeredStore, remote: RemoteStore) -> None:
    remote.down = True
    assert ask(store, 1) == [""]
    remote.down = False
    assert ask(store, 1, 2) == ["", ""]
    assert remote.trips == []


def test_with_the_own_disk_failing_the_remote_store_serves(
    store: LayeredStore, disk: LMDBStore, shared: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(store, 0)
    store.flush()

    def fails(*_: object, **__: object) -> None:
        raise StoreUnavailable("the disk is gone")

    for name in ("reading", "put_coded", "wants", "present", "__contains__"):
        monkeypatch.setattr(LMDBStore, name, fails)
    assert ask(store, 0, 1, 9) == ["memory", "remote", ""]
    assert store.put(key_of(9), chunk(10, seed=9))
    assert store.wants(key_of(12), UNIT)
    assert store.present([key_of(1), key_of(20)]) == {key_of(1)}
    store.flush()
    assert same(read(shared, key_of(9)), chunk(10, seed=9))


def test_an_error_of_both_is_told(disk: LMDBStore, remote: RemoteStore) -> None:
    with LayeredStore(MemoryStore(0), remote, write="through") as store:
        remote.down = True
        with pytest.raises(StoreFull):
            store.put(key_of(9), chunk(10))


def test_damage_here_is_mended_from_there(tmp_path: Path, shared: MemoryStore) -> None:
    shared.put(key_of(0), chunk(BIG))
    with LMDBStore(tmp_path, CAP) as disk:
        disk.put(key_of(0), chunk(BIG))
    tamper(tmp_path, flip(b"h" + key_of(0), 9))
    with LayeredStore(LMDBStore(tmp_path, CAP), shared) as store:
        assert same(read(store, key_of(0)), chunk(BIG))
        store.flush()
        assert same(read(store._near, key_of(0)), chunk(BIG))


def test_tables_come_along_both_ways(toy_codec: None, tmp_path: Path) -> None:
    shared = MemoryStore(CAP)
    hash = shared.put_tables("toy", "reader", TABLES)
    shared.write_by(Toy.with_tables(1, TABLES))
    shared.put(key_of(0), chunk(10))
    near, other = LMDBStore(tmp_path / "a", CAP), MemoryStore(CAP)
    with LayeredStore(near, shared) as store:
        assert store.current_tables("toy", "reader") == hash
        assert read(store, key_of(0)) is not None
        store.flush()
        assert near.tables(hash) == TABLES
        coded = near.coded(key_of(0))
        assert coded is not None
        assert coded.coding.codec == "toy"
    with LMDBStore(tmp_path / "a", CAP) as near, LayeredStore(near, other, write="through") as store:
        store.put_coded(key_of(0), coded)
        assert other.tables(hash) == TABLES


def test_a_deletion_reaches_every_place(store: LayeredStore, remote: RemoteStore, disk: LMDBStore) -> None:
    ask(store, 0, 1)
    store.flush()
    assert store.delete(key_of(0))
    assert ask(store, 0, 1) == ["", "memory"]
    store.prefetch([key_of(2)])
    assert store.delete(key_of(2))
    assert ask(store, 2) == [""]
    assert not store.delete(key_of(2))


def test_what_is_deleted_while_a_request_reads_it_does_not_come_back(
    store: LayeredStore, disk: LMDBStore
) -> None:
    with store.reading() as snapshot:
        assert snapshot.get(key_of(0)) is not None
        assert store.delete(key_of(0))
    store.flush()
    assert key_of(0) not in disk
    assert ask(store, 0) == [""]


def test_a_deletion_says_what_it_did_not_reach(
    store: LayeredStore, remote: RemoteStore, disk: LMDBStore
) -> None:
    ask(store, 0)
    store.flush()
    remote.down = True
    with pytest.raises(
        StoreUnavailable, match=r"from the remote store \(the network is down\).* delete it again"
    ):
        store.delete(key_of(0))
    assert key_of(0) not in disk


def test_what_is_read_ahead_is_there_when_it_is_asked_for(store: LayeredStore, remote: RemoteStore) -> None:
    store.prefetch([key_of(0), key_of(1), key_of(0)])
    assert ask(store, 0, 1, 2) == ["remote"] * 3
    assert sorted(remote.trips) in ([1, 2], [3])  # the latter where the thread had not begun


def test_reading_ahead_is_bounded_and_what_nobody_asks_for_goes(
    disk: LMDBStore, remote: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LayeredStore(disk, remote, prefetch_bytes=2 * UNIT)
    fetcher = store._fetcher
    for n in range(6):
        store.prefetch([key_of(n)])
        for batch in list(fetcher._ahead.values()):
            batch.read.result()
    assert fetcher._held() == 2 * UNIT
    monkeypatch.setattr(fetching_module, "KEPT_S", -1.0)
    store.prefetch([])
    assert fetcher._held() == 0
    store.close()
    off = LayeredStore(MemoryStore(CAP), remote)
    off.prefetch([key_of(0)])
    assert not off._fetcher._ahead


def test_no_request_waits_for_a_chunk_that_it_does_not_want(disk: LMDBStore, remote: RemoteStore) -> None:
    """What is read ahead for others hangs; who asks for something else does not."""
    with LayeredStore(disk, remote, prefetch_bytes=CAP) as store:
        store.put(key_of(20), chunk(10, seed=20))
        store.flush()
        remote.gate.clear()
        store.prefetch([key_of(0)])
        assert ask(store, 20) == ["local"]
        remote.gate.set()


def test_the_settings_make_it(tmp_path: Path) -> None:
    far = {"kind": "lmdb", "path": str(tmp_path / "far"), "cap_gb": 0.01}
    config = StoreConfig(cap_gb=0.01, tiers={"memory_bytes": 10_000, "remote": far, "write": "through"})
    with open_store(config, tmp_path / "near", device=torch.device("cpu")) as store:
        assert isinstance(store, LayeredStore)
        store.put(key_of(0), chunk(10))
        assert [tier.name for tier in store.stats().tiers] == ["memory"]
    with LMDBStore(tmp_path / "far", CAP, read_only=True) as alone:
        assert key_of(0) in alone
    with open_store(config, tmp_path / "near", read_only=True) as store:
        assert isinstance(store, LMDBStore)
    with pytest.raises(ConfigError, match=r"store\.tiers\.remote\.path' is missing"):
        open_store(StoreConfig(tiers={"remote": {"kind": "lmdb"}}), tmp_path / "other")
    with pytest.raises(ConfigError, match=r"store\.tiers\.remote\.kin'"):
        Config(store={"tiers": {"remote": {"kin": "lmdb"}}})


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["laptop", "shared_cache", "precompute_worker"])
def test_a_setting_by_name_opens(name: str, tmp_path: Path) -> None:
    config = Config.load(CONFIGS / f"{name}.yaml").store
    kinds = {config.kind, *([config.tiers.remote.kind] if config.tiers.remote else [])}
    if "valkey" in kinds:
        pytest.importorskip("valkey")
    with open_store(
        config, tmp_path, device=torch.device("cpu")
    ) as store:  # whether the server is there or not
        assert isinstance(store, LayeredStore) == (config.tiers.remote is not None)
        if config.tiers.memory_bytes:
            assert [tier.cap_bytes for tier in store.stats().tiers] == [config.tiers.memory_bytes]
