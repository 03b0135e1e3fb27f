"""A local store in front of a remote one, and a remote store alone that is read ahead. test_machine.py: any history."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blendserve.core import ChunkKV
from blendserve.errors import StoreFull
from blendserve.fetch import KVFetcher
from blendserve.fetch.copies import Copies
from blendserve.fetch.fetcher import ChunkRequest
from blendserve.store import KVStore, LayeredStore, LMDBStore, MemoryStore, ReadAhead, read_record
from blendserve.store.fetching import KEPT_S, REST_S, Fetcher
from tests.support.codecs import Toy
from tests.support.stores import (
    CAP,
    UNIT,
    FaultyStore,
    cache,
    chunk,
    copy_of,
    flip,
    key_of,
    put_kv,
    read,
    same,
    stored,
    tamper,
)
from tests.support.waiting import ManualClock, eventually

TABLES = bytes(range(1, 256)) + b"\0"


class Machine:
    """A layered store, and the same remote store read ahead; another machine has stored chunks 0 to 5."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.far = FaultyStore(MemoryStore(CAP), self.clock)
        for n in range(6):
            put_kv(self.far, key_of(n), kv(n))
        self.near = FaultyStore(LMDBStore(folder / "kv", CAP))
        self.store = LayeredStore(self.near, self.far, prefetch_bytes=CAP, clock=self.clock)
        self.fetcher = cached(self.store)
        self.ahead = ReadAhead(self.far, CAP, self.clock)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.store.close()
    machine.ahead.close()


def kv(n: int) -> ChunkKV:
    return chunk(10, seed=n)


def cached(store: KVStore) -> KVFetcher:
    """With room for copies of two chunks."""
    return KVFetcher(store, copies=Copies([cache(2 * UNIT, name="memory")]))


def ask(by: KVStore | KVFetcher, *numbers: int) -> list[str]:
    """Read and check chunks in one request -> the source of each, "" for an absent one, or the kind of its miss."""
    fetcher, found = by if isinstance(by, KVFetcher) else KVFetcher(by), list[str]()
    with fetcher.fetch([ChunkRequest(key_of(n), 10) for n in numbers]) as fetch:
        for n in numbers:
            key = key_of(n)
            miss = fetch.misses.get(key)
            assert miss or same(copy_of(fetch.views[key]), kv(n))
            found.append(miss.kind if miss else fetch.source[key])
    if isinstance(fetcher.store, LayeredStore):
        fetcher.store.flush()
    return ["" if kind == "absent" else kind for kind in found]


def test_missing_chunks_are_fetched_in_one_batch_and_kept(machine: Machine) -> None:
    store = machine.store
    assert put_kv(store, key_of(6), kv(6))
    assert ask(machine.fetcher, 0, 1, 2, 3, 6, 9) == ["remote"] * 4 + ["local", ""]
    assert stored(machine.near) >= set(range(4))
    # There is room for copies of two. Local chunks are looked up first: remote ones do not evict their copies.
    assert ask(machine.fetcher, 6, 3, 1, 0) == ["local", "memory", "local", "local"]
    assert machine.far.batches == [5]
    stats = store.stats()
    assert stats.remote is not None
    assert (stats.remote.hits, stats.remote.misses) == (4, 1)
    assert stats.to_dict()["remote_hits"] == 4
    assert store.stats("").remote is None  # a tenant learns nothing of other tenants' requests


def test_while_the_remote_store_is_down_the_local_one_serves(machine: Machine) -> None:
    store, far = machine.store, machine.far
    put_kv(store, key_of(0), kv(0))
    store.flush()
    far.down = True
    assert ask(store, 0, 1, 2) == ["local", "unreachable", "unreachable"]
    far.down = False
    far.calls.clear()
    assert ask(store, 1, 2) == ["unreachable"] * 2  # it is not asked again at once
    assert store.contains([key_of(0), key_of(1)]) == {key_of(0)}
    assert store.lease([key_of(1)], 1)
    assert store.admits(key_of(12), UNIT)
    assert far.calls["reading"] == far.calls["lease"] == 0
    machine.clock.advance(REST_S)
    assert ask(store, 1) == ["remote"]


def test_while_the_local_store_is_down_the_remote_one_serves(machine: Machine) -> None:
    store = machine.store
    ask(machine.fetcher, 0)
    machine.near.down = True
    assert ask(machine.fetcher, 0, 1, 9) == ["memory", "remote", ""]
    assert put_kv(store, key_of(9), kv(9))
    assert store.admits(key_of(12), UNIT)
    assert store.contains([key_of(1), key_of(20)]) == {key_of(1)}
    store.flush()
    assert same(read(machine.far, key_of(9)), kv(9))
    machine.near.down = False


def test_a_local_store_without_room_leaves_chunks_to_the_copies_and_the_remote_store(
    machine: Machine,
) -> None:
    far = machine.far
    far.calls.clear()
    store = LayeredStore(MemoryStore(0), far)
    fetcher = cached(store)
    assert [ask(fetcher, 0, 1), ask(fetcher, 0, 1)] == [["remote"] * 2, ["memory"] * 2]
    assert far.batches == [2]
    far.gate.clear()
    assert put_kv(store, key_of(8), kv(8))
    far.gate.set()
    store.close()  # what waits is written first
    assert far.calls["put"] == 1
    far.down = True
    with LayeredStore(MemoryStore(0), far, write="through") as full, pytest.raises(StoreFull):
        put_kv(full, key_of(9), kv(9))


def test_a_damaged_local_chunk_is_replaced_by_the_remote_one(machine: Machine, tmp_path: Path) -> None:
    with LMDBStore(tmp_path, CAP) as near:
        put_kv(near, key_of(0), kv(0))
    tamper(tmp_path, flip(b"h" + key_of(0), 9))
    with LMDBStore(tmp_path, CAP) as near, LayeredStore(near, machine.far) as store:
        assert ask(store, 0) == ["remote"]
        assert same(read(near, key_of(0)), kv(0))


def test_tables_are_copied_with_the_chunks_that_need_them(toy_codec: None) -> None:
    far, near, other = MemoryStore(CAP), MemoryStore(CAP), MemoryStore(CAP)
    hash = far.blobs.put("toy", "reader", TABLES)
    put_kv(far, key_of(0), kv(0), codec=Toy.with_tables(1, TABLES))
    with LayeredStore(near, far) as store:
        assert store.blobs.current("toy", "reader") == hash
        assert ask(store, 0) == ["remote"]
        assert near.blobs.get(hash) == TABLES
        record = read_record(near, key_of(0))
        assert record is not None
        assert record.coding.codec == "toy"
    near = MemoryStore(CAP)
    near.blobs.put("toy", "reader", TABLES)
    with LayeredStore(near, other, write="through") as store:
        store.put(key_of(0), record)
        assert other.blobs.get(hash) == TABLES


def test_chunks_that_are_read_ahead_are_bounded_and_expire(machine: Machine) -> None:
    far, clock = machine.far, machine.clock
    fetcher = Fetcher(far, 2 * UNIT, clock)
    for n in range(6):
        fetcher.start([key_of(n)])
        held = min(n + 1, 2) * UNIT
        eventually(lambda held=held: fetcher.bytes == held)  # type: ignore[misc]
    assert far.batches == [1, 1]
    clock.advance(KEPT_S + 1)
    fetcher.start([])
    assert fetcher.bytes == 0
    fetcher.close()
    with LayeredStore(MemoryStore(CAP), far) as store:
        store.prefetch([key_of(0)])  # by default there is no room to read ahead
    assert far.batches == [1, 1]


def test_a_request_does_not_wait_for_the_prefetch_of_others(machine: Machine) -> None:
    put_kv(machine.near, key_of(20), kv(20))
    machine.far.gate.clear()
    machine.store.prefetch([key_of(0)])
    assert ask(machine.store, 20) == ["local"]
    machine.far.gate.set()
    assert ask(machine.store, 0) == ["remote"]


def test_chunks_that_were_read_ahead_are_not_fetched_again(machine: Machine) -> None:
    ahead, batches = machine.ahead, machine.far.batches
    ahead.prefetch([key_of(0), key_of(1), key_of(9)])
    ahead.prefetch([key_of(0), key_of(2)])  # of another request
    eventually(lambda: sorted(batches) == [1, 3])
    assert ask(ahead, 0, 1, 9) == ["remote", "remote", ""]
    assert ask(ahead, 0, 2) == ["remote", "remote"]
    assert sum(batches) == 4
    assert ask(ahead, 0, 3) == ["remote", "remote"]  # without a prefetch, in one batch
    assert batches[-1] == 2


def test_a_chunk_that_changes_after_its_prefetch_is_looked_up_again(machine: Machine) -> None:
    """As when one request computes the passage that the next one waits for."""
    ahead, far = machine.ahead, machine.far
    for store in (ahead, machine.store):
        far.batches.clear()
        store.prefetch([key_of(9)])
        eventually(lambda: far.batches)
        put_kv(store, key_of(9), kv(9))
        assert ask(store, 9) == ["remote" if store is ahead else "local"]
        store.prefetch([key_of(9)])
        assert store.delete([key_of(9)])
        assert ask(store, 9) == [""]
