"""Three nodes of cluster mode: chunks lie on all of them, and the store is as on one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from blendserve.bench.servers import Server, cluster
from blendserve.config import ValkeyConfig
from blendserve.errors import StoreFull
from blendserve.store.policies import LRU
from blendserve.store.valkey.client import library
from blendserve.store.valkey.store import ValkeyStore
from tests.store.helpers import CAP, chunk, key_of, read, same
from tests.store.valkey.servers import PATIENT_S, needs_server

pytestmark = needs_server
N = 24


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Server]]:
    with cluster(3) as servers:
        yield servers


@pytest.fixture
def store(nodes: list[Server]) -> Iterator[ValkeyStore]:
    for node in nodes:
        library().Valkey(port=node.port).flushall()
    with opened(nodes[1]) as store:
        yield store


def opened(node: Server, cap: int = CAP, deadline_s: float = PATIENT_S) -> ValkeyStore:
    return ValkeyStore(ValkeyConfig(url=node.url, deadline_s=deadline_s), cap, eviction=LRU())


def test_chunks_lie_on_every_node_and_are_read_in_one_go(store: ValkeyStore, nodes: list[Server]) -> None:
    keys = [key_of(n) for n in range(N)]
    for n, key in enumerate(keys):
        assert store.put(key, chunk(seed=n), pin=n % 2 == 0)
    assert all(library().Valkey(port=node.port).dbsize() > 2 for node in nodes)
    with store.reading() as snapshot:
        snapshot.expect([*keys, key_of(99)])
        views = [snapshot.get(key) for key in keys]
        assert all(view is not None and view.n_tokens == 5 for view in views)
        assert snapshot.get(key_of(99)) is None
        assert not snapshot.undecodable
    assert all(same(read(store, key), chunk(seed=n)) for n, key in enumerate(keys))


def test_what_is_counted_and_checked_is_of_all_nodes(store: ValkeyStore) -> None:
    for n in range(N):
        store.put(key_of(n, namespace=str(n % 2)), chunk(seed=n), pin=n < 4)
    stats = store.stats()
    assert (stats.chunks, stats.pins, stats.tokens) == (N, 4, 5 * N)
    assert store.stats("1").chunks == N // 2
    assert (store.verify().good, store.verify().bad) == (N, ())
    assert store.delete(key_of(0, namespace="0"))
    assert store.unpin(key_of(n, namespace=str(n % 2)) for n in range(4)) == 3
    assert len(list(store.keys())) == N - 1
    hash = store.put_tables("toy", "reader", b"tables")
    assert store.tables(hash) == b"tables"
    assert [info.hash for info in store.all_tables()] == [hash]


def test_a_quota_holds_over_all_nodes(nodes: list[Server], store: ValkeyStore) -> None:
    room = 3 * chunk().n_bytes
    with opened(nodes[0], room) as small:
        small.put(key_of(0), chunk(), pin=True)
        for n in range(1, N):
            assert small.put(key_of(n), chunk(seed=n))
        assert set(small.keys()) == {key_of(0), key_of(N - 2), key_of(N - 1)}
        assert small.stats().evictions == N - 3
        with pytest.raises(StoreFull):
            small.put(key_of(99), chunk(50))
    assert store.verify().good == 3


def test_a_lease_is_one_for_all(nodes: list[Server], store: ValkeyStore) -> None:
    with opened(nodes[2]) as other:
        mine = store.lease(key_of(1), 60)
        assert mine is not None
        assert other.lease(key_of(1), 60) is None
        mine.release()
        assert other.lease(key_of(1), 60) is not None


def test_a_lost_node_costs_hits_and_its_return_brings_them_back(
    nodes: list[Server], store: ValkeyStore
) -> None:
    with opened(nodes[0], deadline_s=0.5) as hasty:
        assert store.put(key_of(1), chunk())
        nodes[2].hang()
        try:
            with hasty.reading() as snapshot:
                snapshot.expect([key_of(n) for n in range(N)])
                assert [snapshot.get(key_of(n)) for n in range(N)] == [None] * N
                assert {why.kind for why in snapshot.undecodable.values()} == {"unreachable"}
        finally:
            nodes[2].resume()
        for _ in range(600):
            if same(read(hasty, key_of(1)), chunk()):
                break
            time.sleep(0.1)
        else:
            pytest.fail("the chunk was never found again")
