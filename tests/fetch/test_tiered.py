"""A local store in front of a remote one, and a remote store alone. test_machine.py: any history."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from blendserve.fetch import KVFetcher, TieredStore
from blendserve.fetch.copies import Copies
from blendserve.fetch.fetcher import Hold
from blendserve.fetch.source import StoreSource
from blendserve.fetch.tiered import REST_S
from blendserve.store import LMDBStore, MemoryStore, read_record
from tests.support.codecs import Toy
from tests.support.stores import (
    CAP,
    UNIT,
    FaultyStore,
    cache,
    copy_of,
    key_of,
    kv,
    put_kv,
    read,
    requests,
    same,
    stored,
)
from tests.support.waiting import ManualClock, eventually, is_blocked

TABLES = bytes(range(1, 256)) + b"\0"


class Machine:
    """A tiered store, and its remote store alone; another machine has stored chunks 0 to 5."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.far = FaultyStore(MemoryStore(CAP), self.clock)
        for n in range(6):
            put_kv(self.far, key_of(n), kv(n))
        self.near = FaultyStore(LMDBStore(folder / "kv", CAP))
        self.store = TieredStore(self.near, self.far, clock=self.clock)
        copies = Copies([cache(2 * UNIT, name="memory")])  # of two chunks
        self.fetcher = KVFetcher(self.store, copies, prefetch_bytes=CAP)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.far.gate.set()
    machine.store.close()


def ask(fetcher: KVFetcher, *numbers: int) -> list[str]:
    """Read and check chunks in one request -> the source of each, "" for an absent one, or the kind of its miss."""
    found = list[str]()
    with fetcher.fetch(requests(*numbers)) as fetch:
        for n in numbers:
            key = key_of(n)
            miss = fetch.misses.get(key)
            assert miss or same(copy_of(fetch.views[key]), kv(n))
            found.append(miss.kind if miss else fetch.source[key])
    fetcher.flush()
    return ["" if kind == "absent" else kind for kind in found]


def test_missing_chunks_are_fetched_in_one_batch_and_kept(machine: Machine) -> None:
    store, fetcher = machine.store, machine.fetcher
    assert put_kv(store, key_of(6), kv(6))
    assert ask(fetcher, 0, 1, 2, 3, 6, 9) == ["remote"] * 4 + ["local", ""]
    assert stored(machine.near) >= set(range(4))
    # There is room for copies of two. Local chunks are looked up first: remote ones do not evict their copies.
    assert ask(fetcher, 6, 3, 1, 0) == ["local", "memory", "local", "local"]
    assert machine.far.batches == [5]
    stats = fetcher.stats()
    assert stats.remote is not None
    assert (stats.remote.hits, stats.remote.misses) == (4, 1)
    assert stats.to_dict()["remote_hits"] == 4
    assert fetcher.stats("").remote is None  # a tenant learns nothing of other tenants' requests


def test_while_the_remote_store_is_down_the_local_one_serves(machine: Machine) -> None:
    store, far, fetcher = machine.store, machine.far, KVFetcher(machine.store)
    put_kv(store, key_of(0), kv(0))
    store.flush()
    far.down = True
    assert ask(fetcher, 0, 1, 2) == ["local", "unreachable", "unreachable"]
    far.down = False
    far.calls.clear()
    assert ask(fetcher, 1, 2) == ["unreachable"] * 2  # it is not asked again at once
    assert store.contains([key_of(0), key_of(1)]) == {key_of(0)}
    assert store.lease([key_of(1)], 1)
    assert not far.calls
    machine.clock.advance(REST_S)
    assert ask(fetcher, 1) == ["remote"]
    assert fetcher.stats().to_dict()["remote_failures"] == 2


def test_while_the_local_store_is_down_the_remote_one_serves(machine: Machine) -> None:
    store = machine.store
    ask(machine.fetcher, 0)
    machine.near.down = True
    assert ask(machine.fetcher, 0, 1, 9) == ["memory", "remote", "unreachable"]
    assert put_kv(store, key_of(9), kv(9))
    assert store.admits(key_of(12), UNIT)
    assert store.contains([key_of(1), key_of(20)]) == {key_of(1)}
    store.flush()
    assert same(read(machine.far, key_of(9)), kv(9))
    assert machine.fetcher.locate([key_of(1), key_of(20)], remote=True) == {key_of(1): "memory"}
    machine.near.down = False


def test_what_waits_is_written_before_the_store_closes(
    machine: Machine,
) -> None:
    far, store = machine.far, TieredStore(MemoryStore(0), machine.far)
    far.calls.clear()
    far.gate.clear()
    assert put_kv(store, key_of(8), kv(8))
    far.gate.set()
    store.close()
    assert far.calls["put"] == 1


def test_tables_are_copied_with_the_chunks_that_need_them(toy_codec: None) -> None:
    far, near, other = MemoryStore(CAP), MemoryStore(CAP), MemoryStore(CAP)
    hash = far.blobs.put("toy", "reader", TABLES)
    put_kv(far, key_of(0), kv(0), codec=Toy.with_tables(1, TABLES))
    with TieredStore(near, far) as store:
        assert store.blobs.current("toy", "reader") == hash
        assert ask(KVFetcher(store), 0) == ["remote"]
        assert near.blobs.get(hash) == TABLES
        record = read_record(near, key_of(0))
        assert record is not None
        assert record.coding.codec == "toy"
    near = MemoryStore(CAP)
    near.blobs.put("toy", "reader", TABLES)
    with TieredStore(near, other) as store:
        store.put(key_of(0), record)
        store.flush()
        assert other.blobs.get(hash) == TABLES


def test_prefetched_chunks_are_bounded_and_end_with_their_holds(machine: Machine) -> None:
    batches, holds = machine.far.batches, list[Hold]()
    fetcher = KVFetcher(MemoryStore(0), source=StoreSource(machine.far), prefetch_bytes=2 * UNIT)
    assert fetcher.remote
    for n in range(4):
        holds.append(fetcher.prefetch(requests(n)))
        held = min(n + 1, 2) * UNIT
        eventually(lambda held=held: fetcher.remote.incoming.n_bytes == held)  # type: ignore[misc]
    assert batches == [1, 1]
    assert ask(fetcher, 0, 1, 2) == ["remote"] * 3
    assert batches == [1, 1, 1]  # of the third chunk alone
    for hold in holds:
        hold.close()
    assert fetcher.remote.incoming.n_bytes == 0
    KVFetcher(machine.store).prefetch(requests(0))  # by default there is no room to prefetch
    assert len(batches) == 3


@pytest.mark.parametrize("pin", [False, True])
def test_a_full_write_queue_drops_what_a_request_leaves_and_a_pinned_chunk_waits_for_room(pin: bool) -> None:
    far = FaultyStore(MemoryStore(CAP))
    with TieredStore(MemoryStore(CAP), far, waiting_bytes=2 * UNIT) as store:
        far.gate.clear()
        for n in range(2):
            put_kv(store, key_of(n), kv(n))
        last = threading.Thread(target=put_kv, args=(store, key_of(2), kv(2), pin))
        last.start()
        eventually(lambda: not last.is_alive() or (pin and is_blocked(last)))
        far.gate.set()
        last.join()
        store.flush()
        remote = store.stats().remote
        assert remote
        assert (stored(far), remote.dropped) == ({0, 1, 2} if pin else {0, 1}, not pin)
        assert far.stats().pins == pin


@pytest.mark.parametrize("cap", [CAP, 0])
def test_a_lease_ends_when_its_chunk_is_written_or_cannot_be(cap: int) -> None:
    """Not before, though the chunk is larger than what may wait."""
    there = MemoryStore(cap)
    far = FaultyStore(there)
    with TieredStore(MemoryStore(CAP), far, waiting_bytes=1) as store:
        assert store.lease([key_of(0)], 60)
        far.gate.clear()
        assert put_kv(store, key_of(0), kv(0))
        store.release([key_of(0)])
        assert not there.lease([key_of(0)], 60)
        far.gate.set()
        store.flush()
        assert there.lease([key_of(0)], 60)


def test_a_stored_chunk_reaches_the_remote_store_though_copies_of_it_are_forgotten(machine: Machine) -> None:
    """As of every chunk that a request or a precompute run stores, while the queue is behind."""
    machine.far.gate.clear()
    for n in range(10, 14):
        put_kv(machine.store, key_of(n), kv(n))
    machine.fetcher.forget([key_of(n) for n in range(11, 14)])  # that wait behind the first one
    machine.far.gate.set()
    machine.store.flush()
    assert stored(machine.far) >= set(range(10, 14))


def test_chunks_are_copied_here_without_a_prompt(machine: Machine) -> None:
    assert machine.fetcher.copy_here([key_of(n) for n in (0, 1, 9)]) == 2
    machine.store.flush()
    assert stored(machine.near) == {0, 1}
    assert machine.fetcher.copy_here([key_of(n) for n in range(3)]) == 3
    assert machine.fetcher.locate([key_of(n) for n in (0, 5, 9)], remote=True) == {
        key_of(0): "local",
        key_of(5): "remote",
    }
