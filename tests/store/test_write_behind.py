"""Writing behind: everything arrives in order, errors come back, and what waits is bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import ChunkKV
from blendserve.errors import StoreError, StoreFull
from blendserve.store import MemoryStore
from blendserve.store.codecs.base import Buffer
from blendserve.store.codecs.int8 import Int8
from blendserve.store.write_behind import write_behind
from tests.kernels.cuda.streams import LateCopyStream
from tests.store.helpers import CAP, chunk, key_of, read, same

UNIT = chunk(10).n_bytes


class Slow(MemoryStore):
    """A put waits until it is let go; notes the threads that put."""

    def __init__(self, cap_bytes: int = CAP) -> None:
        super().__init__(cap_bytes)
        self.go = threading.Semaphore(0)
        self.threads: set[str] = set()

    def put(self, key: bytes, kv: ChunkKV, pin: bool = False) -> bool:
        assert self.go.acquire(timeout=300)
        self.threads.add(threading.current_thread().name)
        return super().put(key, kv, pin)


def made(lengths: list[int], seen: list[int] | None = None) -> Iterator[tuple[bytes, ChunkKV]]:
    for n, tokens in enumerate(lengths):
        if seen is not None:
            seen.append(n)
        yield key_of(n), chunk(tokens, seed=n)


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 50))
def test_all_is_stored_pinned_and_told_in_order(lengths: list[int], most: int) -> None:
    store = MemoryStore(CAP)
    sizes = []
    for n, size in enumerate(write_behind(store, made(lengths), most)):
        assert same(read(store, key_of(n)), chunk(lengths[n], seed=n))
        sizes.append(size)
    assert sizes == [chunk(n).n_bytes for n in lengths]
    assert store.stats().pins == len(lengths)


def test_the_next_ones_are_computed_while_one_is_written_but_no_more_than_that() -> None:
    store, seen = Slow(), list[int]()
    with closing(write_behind(store, made([10] * 8, seen), 30)) as stored:
        threading.Timer(0.2, store.go.release).start()
        next(stored)
        assert seen == [0, 1, 2, 3]  # the fourth was one too many: then the first was waited for
        for _ in range(8):
            store.go.release()
        assert len(list(stored)) == 7
    assert threading.current_thread().name not in store.threads


def test_a_chunk_larger_than_that_is_still_written_behind() -> None:
    store, seen = Slow(), list[int]()
    with closing(write_behind(store, made([100, 100, 100], seen), 30)) as stored:
        threading.Timer(0.2, store.go.release).start()
        next(stored)
        assert seen == [0, 1]
        for _ in range(2):
            store.go.release()
        list(stored)


def test_an_error_of_the_store_comes_back_and_ends_it() -> None:
    store, seen = MemoryStore(2 * UNIT), list[int]()
    with pytest.raises(StoreFull), closing(write_behind(store, made([10] * 9, seen), 20)) as stored:
        list(stored)
    assert sorted(store.keys()) == sorted(key_of(n) for n in range(2))
    assert len(seen) <= 6


def test_what_was_computed_is_stored_when_the_rest_fails() -> None:
    def breaks() -> Iterator[tuple[bytes, ChunkKV]]:
        yield from made([10] * 3)
        raise KeyboardInterrupt

    store = MemoryStore(CAP)
    with pytest.raises(KeyboardInterrupt):
        list(write_behind(store, breaks(), 1000))
    assert store.stats().chunks == 3


def test_what_was_computed_is_stored_when_the_caller_stops() -> None:
    store, seen = MemoryStore(CAP), list[int]()
    with closing(write_behind(store, made([10] * 9, seen), 40)) as stored:
        next(stored)
    assert store.stats().chunks == len(seen) < 9


def test_from_a_device_that_is_late_each_chunk_arrives_before_it_is_written() -> None:
    store, stream = MemoryStore(CAP), LateCopyStream()
    list(write_behind(store, made([10] * 5), 1000, stream))
    assert all(same(read(store, key_of(n)), chunk(10, seed=n)) for n in range(5))
    assert set(stream.waited_in) == {"blendserve-write_0"}
    assert not torch.equal(chunk(10).keys, chunk(10, seed=1).keys)


class Noting(Int8):
    """Notes who encodes, and can fail at it."""

    def __init__(self, fails: bool = False) -> None:
        self.threads: list[str] = []
        self.fails = fails

    def encode(self, kv: ChunkKV) -> list[Buffer]:
        self.threads.append(threading.current_thread().name)
        if self.fails:
            raise StoreError("the tables are for another reader")
        return super().encode(kv)


def test_chunks_are_coded_by_the_thread_that_writes_them() -> None:
    codec = Noting()
    store = MemoryStore(CAP, codec=codec)
    assert len(list(write_behind(store, made([10] * 4), 20))) == 4
    assert set(codec.threads) == {"blendserve-write_0"}
    assert store.stats().bytes < store.stats().raw_bytes


def test_what_a_codec_cannot_do_comes_back_and_ends_it() -> None:
    store, seen = MemoryStore(CAP, codec=Noting(fails=True)), list[int]()
    with pytest.raises(StoreError, match="another reader"):
        list(write_behind(store, made([10] * 9, seen), 20))
    assert store.stats().chunks == 0
    assert len(seen) <= 4
