"""What only a server does: round trips are counted, other engines write, the server evicts or is full."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.support.valkey import Server
from blendserve.config import ValkeyConfig
from blendserve.errors import StoreFull
from blendserve.fetch import KVFetcher
from blendserve.fetch.fetcher import Fetch
from blendserve.fetch.incoming import ChunkRequest
from blendserve.store import LMDBStore, VerifyReport
from blendserve.store.bounded import BoundedClient
from blendserve.store.key import TAG_BYTES
from blendserve.store.valkey import ValkeyStore
from blendserve.store.valkey_client import library
from blendserve.store.valkey_layout import BLOBS, CHUNK, NAMESPACES, chunk_name, namespace_name, read_fields
from tests.support.commands import cli
from tests.support.stores import CAP, chunk, copy_of, key_of, put_kv, read, same, stored
from tests.support.valkey import PATIENT_S, cluster, database, needs_server, store_at
from tests.support.waiting import eventually

pytestmark = needs_server


@pytest.fixture
def store(path: Path) -> Iterator[ValkeyStore]:
    with store_at(path, CAP) as store:
        yield store


def fetched(fetcher: KVFetcher, keys: Sequence[bytes], tokens: int = 5) -> AbstractContextManager[Fetch]:
    return fetcher.fetch([ChunkRequest(key, tokens) for key in keys])


def test_leasing_reading_and_describing_take_one_round_trip_each(store: ValkeyStore) -> None:
    keys, fetcher, ask = [key_of(n) for n in range(4)], KVFetcher(store), BoundedClient.ask
    with mock.patch.object(BoundedClient, "ask", autospec=True, side_effect=ask) as trip:
        assert store.lease(keys, 60) == set(keys)
        assert trip.call_count == 1
        for key in keys[:2]:
            put_kv(store, key, chunk())
        trip.reset_mock()
        store.release(keys[:2])  # a put ends a lease
        assert trip.call_count == 0
        with fetched(fetcher, keys[:1]) as fetch:  # from now on the size of a chunk is known
            assert keys[0] in fetch.views
        trip.reset_mock()
        with fetched(fetcher, keys[:2]) as fetch:
            assert fetch.views.keys() == set(keys[:2])
        assert trip.call_count == 1
        assert store.describe([key_of(n) for n in range(200)]).keys() == set(keys[:2])
        assert trip.call_count == 2
    assert store.lease([key_of(9)], 0.001)
    assert eventually(lambda: store.lease([key_of(9)], 60))  # by the server's own clock


def test_large_chunks_are_read_in_small_batches(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key_of(n) for n in range(6)]
    monkeypatch.setattr(ValkeyConfig, "in_flight_mb", 1)
    with (
        mock.patch("blendserve.store.valkey_layout.read_fields", side_effect=read_fields) as batches,
        store_at(path, CAP) as store,
    ):
        for key in keys:
            put_kv(store, key, chunk(600))  # 115,200 bytes; a quarter of a megabyte at a time
        fetcher = KVFetcher(store)
        for _ in range(2):
            with fetched(fetcher, keys, 600) as fetch:
                assert fetch.views.keys() == set(keys)
    assert sorted(len(call.kwargs["keys"]) for call in batches.call_args_list) == [1] * 6 + [2] * 3


def test_store_merge_copies_from_a_server_by_its_url(store: ValkeyStore, path: Path, tmp_path: Path) -> None:
    put_kv(store, key_of(1), chunk(seed=1))
    config = tmp_path / "patient.yaml"
    config.write_text(f"store: {{location: {tmp_path / 'copy'}, deadline_s: {PATIENT_S}}}\n")
    assert cli("store", "merge", tmp_path / "index", database(path), "-c", config).code == 0
    with LMDBStore(tmp_path / "copy", CAP, read_only=True) as copy:
        assert same(read(copy, key_of(1)), chunk(seed=1))


def test_entries_are_made_what_they_should_be(store: ValkeyStore, path: Path) -> None:
    """As a lost server, eviction or two concurrent writers leave them. What another program writes is no entry."""
    server, (key, small) = library().Valkey.from_url(database(path)), (key_of(1), key_of(2))
    put_kv(store, key, chunk(50))
    for name in server.scan_iter():
        if not name.startswith(CHUNK):
            server.unlink(name)
    assert store.stats().chunks == 0
    assert store.verify().good == 1
    assert (store.stats().chunks, store.stats().bytes) == (1, chunk(50).n_bytes)
    put_kv(store, small, chunk(1))
    entries = namespace_name(key[:TAG_BYTES], "entries")
    server.hset(entries, key, server.hget(entries, small))
    assert store.verify() == VerifyReport(2, ())
    assert store.stats().bytes == chunk(50).n_bytes + chunk(1).n_bytes
    server.unlink(chunk_name(small))
    with store_at(path, CAP, read_only=True) as reader:
        assert reader.stats().chunks == 1
        assert server.hexists(entries, small)
    assert store.stats().chunks == 1
    assert not server.hexists(entries, small)


GARBAGE = b"not numbers", b"", b"NaN", b"-", b"1 2 3", b"9" * 40, b"\xff\x00" * 50


def test_what_another_program_writes_counts_as_absent(store: ValkeyStore, path: Path) -> None:
    server, kept = library().Valkey.from_url(database(path)), [key_of(1), key_of(2)]
    name = partial(namespace_name, kept[0][:TAG_BYTES])
    for key in kept:
        assert put_kv(store, key, chunk())
    before = store.stats()
    for value in GARBAGE:
        for hash, field in ((name("entries"), key_of(9)), (name("entries"), b"short"), (BLOBS, value)):
            server.hset(hash, field, value)
        server.hset(name("counts"), "hits", value)
        server.hset(name("counts"), value, value)
        server.sadd(NAMESPACES, value)
        server.set(CHUNK + value, value)
        after = store.stats()
        assert (after.chunks, after.bytes, after.hits) == (before.chunks, before.bytes, before.hits)
        assert set(store.keys()) == set(kept)
        assert (store.verify().good, store.verify().bad) == (2, ())


def test_a_use_renews_the_time_of_an_unpinned_chunk_alone(path: Path) -> None:
    server = library().Valkey.from_url(database(path))
    with store_at(path, CAP) as store:
        for n in range(3):
            put_kv(store, key_of(n), chunk(), pin=n == 0)
            assert (server.ttl(chunk_name(key_of(n))) < 0) == (n == 0)
        for n in (1, 2):
            server.expire(chunk_name(key_of(n)), 1000)
        assert all(read(store, key_of(n)) for n in (0, 1))
    assert [server.ttl(chunk_name(key_of(n))) > 1000 for n in range(3)] == [False, True, False]
    assert server.ttl(chunk_name(key_of(0))) == -1


def opened(node: Server, deadline_s: float = PATIENT_S) -> ValkeyStore:
    return ValkeyStore(ValkeyConfig(url=node.url, deadline_s=deadline_s), CAP)


def test_a_full_server_evicts_whole_unpinned_chunks_or_is_a_full_store() -> None:
    """It has room for some thirty chunks, and evicts keys that may expire."""
    with Server(maxmemory="8mb", maxmemory_policy="volatile-lru") as server, opened(server) as store:
        for n in range(60):
            put_kv(store, key_of(n), chunk(1000, seed=n), pin=n < 5)
        limit = partial(library().Valkey(port=server.port).config_set, "maxmemory")
        limit("64mb")  # or buffers of replies evict more
        left = stored(store, 60)
        assert left >= {0, 1, 2, 3, 4}
        assert 10 < len(left) < 60
        assert all(same(read(store, key_of(n)), chunk(1000, seed=n)) for n in left)
        assert store.verify() == VerifyReport(len(left), ())  # and the entries of evicted chunks are dropped
        stats = store.stats()
        assert (stats.chunks, stats.pins) == (len(left), 5)
        assert stats.bytes == len(left) * chunk(1000).n_bytes
        limit("8mb")
        with pytest.raises(StoreFull):
            deque((put_kv(store, key_of(n), chunk(1000), pin=True) for n in range(5, 60)), maxlen=0)
        assert same(read(store, key_of(0)), chunk(1000))
        limit("0")
        assert put_kv(store, key_of(60), chunk(1000))


# Three nodes of cluster mode

N = 24


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Server]]:
    with cluster(3) as servers:
        yield servers


def test_a_cluster_is_one_store_whose_chunks_lie_on_every_node(nodes: list[Server]) -> None:
    keys = [key_of(n, namespace=str(n % 2)) for n in range(N)]
    with opened(nodes[1]) as store:
        for n, key in enumerate(keys):
            assert put_kv(store, key, chunk(seed=n), pin=n < 4)
        assert all(library().Valkey(port=node.port).dbsize() > 2 for node in nodes)
        with fetched(KVFetcher(store), [*keys, key_of(99)]) as fetch:
            assert all(same(copy_of(fetch.views[key]), chunk(seed=n)) for n, key in enumerate(keys))
            assert {key: miss.kind for key, miss in fetch.misses.items()} == {key_of(99): "absent"}
        stats = store.stats()
        assert (stats.chunks, stats.pins, stats.tokens, store.stats("1").chunks) == (N, 4, 5 * N, N // 2)
        assert store.verify() == VerifyReport(N, ())
        assert (store.delete(keys[:1]), store.pin(keys[:4], pinned=False)) == (1, 3)
        assert set(store.keys()) == set(keys[1:])
        hash = store.blobs.put("toy", "reader", b"tables")
        assert (store.blobs.get(hash), [info.hash for info in store.blobs.list()]) == (b"tables", [hash])
        with opened(nodes[0]) as other:  # leases hold over all nodes
            some = [key_of(n, namespace="other") for n in range(N)]
            assert store.lease(some, 60) == set(some)
            store.release(some[:1])
            assert put_kv(other, some[1], chunk())
            assert other.lease(some, 60) == set(some[:2])


def test_a_node_that_hangs_costs_hits_until_it_returns(nodes: list[Server]) -> None:
    with opened(nodes[1]) as patient, opened(nodes[0], deadline_s=1.0) as hasty:
        assert put_kv(patient, key_of(1), chunk())
        nodes[2].hang()
        try:
            with fetched(KVFetcher(hasty), [key_of(n) for n in range(N)]) as fetch:
                assert {miss.kind for miss in fetch.misses.values()} == {"unreachable"}
                assert not fetch.views
        finally:
            nodes[2].resume()

        def is_found() -> bool:
            with fetched(KVFetcher(hasty), [key_of(1)]) as fetch:
                return key_of(1) in fetch.views

        assert eventually(is_found)
