"""What only a shared store does: several engines at once, a server that evicts or refuses, leases."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blendserve.bench.servers import Server
from blendserve.cli import main
from blendserve.config import ValkeyConfig
from blendserve.errors import CorruptRecord, StoreFull, StoreUnavailable
from blendserve.store import KVStore, LMDBStore
from blendserve.store.merge import merge
from blendserve.store.network.connection import Connection
from blendserve.store.policies import LRU
from blendserve.store.valkey import chunks, ledger
from blendserve.store.valkey.client import Client, library
from blendserve.store.valkey.ledger import Entry
from blendserve.store.valkey.names import CHUNK, HEADER, chunk_name, segment_name
from blendserve.store.valkey.store import ValkeyStore
from tests.store.helpers import CAP, chunk, key_of, read, same
from tests.store.valkey.servers import PATIENT_S, database, needs_server, settings, store_at

pytestmark = needs_server


@pytest.fixture
def store(path: Path) -> Iterator[ValkeyStore]:
    with ValkeyStore(settings(path), CAP) as store:
        yield store


def client(path: Path) -> Client:
    return library().Valkey.from_url(database(path))


def test_what_is_expected_is_read_in_one_go(store: ValkeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    real = Connection.begin

    def begin(self: Connection, job: object, *how: bool) -> object:
        begun.append(job)
        return real(self, job, *how)  # type: ignore[arg-type]

    keys = [key_of(n) for n in range(8)]
    for key in keys:
        store.put(key, chunk())
    assert read(store, keys[0]) is not None  # how large a chunk is, is known from now on
    monkeypatch.setattr(Connection, "begin", begin)
    with store.reading() as snapshot:
        snapshot.expect(keys)
        assert all(snapshot.get(key) for key in keys)
    assert len(begun) == 1


def test_large_chunks_are_read_a_few_at_a_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = chunks.read

    def counted(client: object, keys: list[bytes]) -> list[chunks.Fields]:
        sizes.append(len(keys))
        return real(client, keys)

    monkeypatch.setattr(chunks, "read", counted)
    with ValkeyStore(settings(path, in_flight_mb=1), CAP) as store:
        keys = [key_of(n) for n in range(6)]
        for key in keys:
            store.put(key, chunk(600))  # 115,200 bytes; a quarter of a megabyte at a time
        for _ in range(2):
            with store.reading() as snapshot:
                snapshot.expect(keys)
                assert all(snapshot.get(key) for key in keys)
    assert sorted(sizes) == [1] * 6 + [2] * 3


def test_a_lease_is_for_one_until_it_is_released_or_expires(store: ValkeyStore, path: Path) -> None:
    with ValkeyStore(settings(path), CAP) as other:
        mine = store.lease(key_of(1), 60)
        assert mine is not None
        assert other.lease(key_of(1), 60) is None
        assert store.lease(key_of(1), 60) is None  # not twice in one process either
        assert other.lease(key_of(2), 60) is not None
        mine.release()
        short = other.lease(key_of(1), 0.001)
        assert short is not None
        time.sleep(0.05)
        late = store.lease(key_of(1), 60)
        assert late is not None
        short.release()  # its time is over: it is not that one's to end
        assert other.lease(key_of(1), 60) is None


def test_chunks_come_from_and_go_to_other_kinds_of_store(store: ValkeyStore, path: Path) -> None:
    with LMDBStore(path, CAP) as local, LMDBStore(path / "back", CAP) as back:
        for n in range(3):
            local.put(key_of(n), chunk(seed=n))
        assert merge(local, store) == (3, 0)
        assert store.stats().pins == 3
        assert merge(store, back) == (3, 0)
        assert all(same(read(back, key_of(n)), chunk(seed=n)) for n in range(3))


def test_a_stack_is_claimed_in_one_round_trip_and_given_back_with_its_writes(
    store: ValkeyStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, asked = [key_of(n) for n in range(4)], list[object]()
    ask = Connection.ask
    with ValkeyStore(settings(path), CAP) as other:
        theirs = other.lease(keys[3], 60)

        def counted(connection: Connection, *args: Any) -> object:
            asked.append(connection)
            return ask(connection, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Connection, "ask", counted)
            granted = store.leases(keys, 60)
            assert len(asked) == 1
            for key in keys[:2]:
                store.put(key, chunk())
            before = len(asked)
            for key in keys[:2]:
                granted[key].release()
            assert len(asked) == before
        assert theirs is not None
        assert [*granted] == keys[:3]
        assert not any(lease.stored for lease in granted.values())
        found = other.leases(keys[:3], 60)
        assert {key: lease.stored for key, lease in found.items()} == {keys[0]: True, keys[1]: True}
        granted[keys[2]].release()
        assert other.lease(keys[2], 60) is not None


def test_a_command_copies_from_a_server_by_its_url(
    store: ValkeyStore, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(key_of(1), chunk(seed=1))
    config = tmp_path / "patient.yaml"
    config.write_text(f"store: {{path: {tmp_path / 'copy'}, valkey: {{deadline_s: {PATIENT_S}}}}}\n")
    assert main(["store", "merge", str(tmp_path / "index"), database(path), "-c", str(config)]) == 0
    with LMDBStore(tmp_path / "copy", CAP, read_only=True) as copy:
        assert same(read(copy, key_of(1)), chunk(seed=1))


def test_damage_is_told_and_mended_by_storing_again(store: ValkeyStore, path: Path) -> None:
    store.put(key_of(1), chunk())
    client(path).hset(chunk_name(key_of(1)), segment_name(2), b"something else")
    with store.reading() as snapshot, pytest.raises(CorruptRecord, match="layer 2"):
        snapshot.get(key_of(1))
    with store.reading() as snapshot:  # it is not read again and again
        assert snapshot.get(key_of(1)) is None
        assert "damaged when it was last read" in str(snapshot.undecodable[key_of(1)])
    assert store.stats().corrupt == 1
    store.put(key_of(1), chunk())
    assert same(read(store, key_of(1)), chunk())


def test_half_a_chunk_and_one_without_a_header_are_damage(store: ValkeyStore, path: Path) -> None:
    server = client(path)
    for n, field in enumerate((HEADER, segment_name(0))):
        store.put(key_of(n), chunk())
        server.hdel(chunk_name(key_of(n)), field)
        with store.reading() as snapshot, pytest.raises(CorruptRecord):
            snapshot.get(key_of(n))
    report = store.verify()
    assert [key for key, _ in report.bad] == sorted(key_of(n).hex() for n in range(2))
    for key, _ in report.bad:
        assert store.delete(bytes.fromhex(key))
    assert (store.verify().bad, store.stats().chunks) == ((), 0)


def test_verify_enters_what_nobody_counted(store: ValkeyStore, path: Path) -> None:
    store.put(key_of(1), chunk())
    server = client(path)
    for name in server.scan_iter():
        if not name.startswith(CHUNK):
            server.unlink(name)
    assert store.stats().chunks == 0
    assert store.verify().good == 1
    assert (store.stats().chunks, store.stats().bytes) == (1, chunk().n_bytes)


def test_verify_counts_anew_what_two_writers_left(store: ValkeyStore, path: Path) -> None:
    """As between one's entry and its bytes another's came: the smaller chunk's entry, the larger one's bytes."""
    store.put(key_of(1), chunk(50))
    store._ledger.enter(key_of(1), Entry(10, 10, 1, 1), 0, False, CAP)
    with store_at(path, CAP, read_only=True) as reader:
        assert [problem for _, problem in reader.verify().bad] == ["it is counted as of another size"]
    assert store.stats().bytes == 10
    assert (store.verify().good, store.verify().bad) == (1, ())
    assert store.stats().bytes == chunk(50).n_bytes


def test_a_store_for_reading_writes_nothing(store: ValkeyStore, path: Path) -> None:
    store.put(key_of(1), chunk())
    before = client(path).dbsize()
    with store_at(path, CAP, read_only=True) as reader:
        assert same(read(reader, key_of(1)), chunk())
        for attempt in (
            lambda: reader.put(key_of(2), chunk()),
            lambda: reader.delete(key_of(1)),
            lambda: reader.pin([key_of(1)]),
            lambda: reader.put_tables("toy", "reader", b"x"),
        ):
            with pytest.raises(StoreUnavailable, match="reading only"):
                attempt()
        assert reader.verify().good == 1
    assert client(path).dbsize() == before


@pytest.fixture
def small() -> Iterator[tuple[Server, KVStore]]:
    """A server of its own with room for some thirty chunks, which evicts what may expire."""
    with Server(maxmemory="8mb", maxmemory_policy="volatile-lru") as server:
        config = ValkeyConfig(url=server.url, deadline_s=PATIENT_S)
        with ValkeyStore(config, 1 << 40, eviction=LRU()) as store:
            yield server, store


def test_the_server_evicts_whole_chunks_and_no_pinned_ones(
    small: tuple[Server, KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, store = small
    monkeypatch.setattr(ledger, "GRACE_S", 0.0)
    for n in range(60):
        store.put(key_of(n), chunk(1000, seed=n), pin=n < 5)
    library().Valkey(port=server.port).config_set("maxmemory", "64mb")  # or buffers of replies evict more
    left = [n for n in range(60) if key_of(n) in store]
    assert left[:5] == [0, 1, 2, 3, 4]
    assert 10 < len(left) < 60
    assert all(same(read(store, key_of(n)), chunk(1000, seed=n)) for n in left)
    report = store.verify()  # which also stops counting what has gone
    assert (report.good, report.bad) == (len(left), ())
    stats = store.stats()
    assert (stats.chunks, stats.pins) == (len(left), 5)
    assert stats.bytes == len(left) * chunk(1000).n_bytes


def test_a_full_server_is_a_full_store(small: tuple[Server, KVStore]) -> None:
    server, store = small
    store.put(key_of(0), chunk(1000), pin=True)
    with pytest.raises(StoreFull, match="maxmemory"):
        deque((store.put(key_of(n), chunk(1000), pin=True) for n in range(1, 60)), maxlen=0)
    assert same(read(store, key_of(0)), chunk(1000))
    library().Valkey(port=server.port).config_set("maxmemory", "0")
    assert store.put(key_of(60), chunk(1000))
