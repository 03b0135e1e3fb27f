"""Chunks written by a background thread: all arrive in order, errors are raised, and the queue is bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import ChunkKV
from blendserve.errors import StoreFull
from blendserve.fetch.write_queue import write_behind
from blendserve.store import MemoryStore
from blendserve.store.codecs.base import Buffer
from blendserve.store.codecs.int8 import Int8
from blendserve.store.codecs.raw import Raw
from tests.support.stores import CAP, UNIT, chunk, key_of, read, same
from tests.support.streams import LateCopyStream
from tests.support.waiting import eventually, is_blocked

WRITER = "blendserve-write_0"


class Int8Writer(Int8):
    """Encodes when it has a permit, in threads that it notes."""

    def __init__(self, permits: int) -> None:
        self.permits, self.threads = threading.Semaphore(permits), set[str]()

    def encode(self, kv: ChunkKV) -> list[Buffer]:
        self.threads.add(threading.current_thread().name)
        assert self.permits.acquire(timeout=60)
        return super().encode(kv)


def made(lengths: list[int], seen: list[int]) -> Iterator[tuple[bytes, ChunkKV]]:
    for n, tokens in enumerate(lengths):
        seen.append(n)
        yield key_of(n), chunk(tokens, seed=n)


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 50))
def test_all_chunks_are_stored_pinned_and_reported_in_order(lengths: list[int], most: int) -> None:
    store, stream, sizes = MemoryStore(CAP), LateCopyStream(), []
    for n, size in enumerate(write_behind(store, Raw(), made(lengths, []), most, stream)):
        assert same(read(store, key_of(n)), chunk(lengths[n], seed=n))  # it has arrived from the device
        sizes.append(size)
    assert sizes == [chunk(n).n_bytes for n in lengths]
    assert store.stats().pins == len(lengths)
    assert set(stream.waited_in) <= {WRITER}


@pytest.mark.parametrize(
    ("tokens", "computed"),
    [(10, [0, 1, 2, 3]), (100, [0, 1])],  # one is written, and 30 tokens wait, or one chunk of more
)
def test_computation_runs_ahead_of_writing_by_a_bounded_queue(tokens: int, computed: list[int]) -> None:
    codec, seen = Int8Writer(permits=0), list[int]()
    store = MemoryStore(CAP)
    with closing(write_behind(store, codec, made([tokens] * 8, seen), 30)) as stored:
        first = threading.Thread(target=next, args=(stored,))
        first.start()
        eventually(lambda: len(seen) >= len(computed) and is_blocked(first))
        codec.permits.release()
        first.join()
        assert seen == computed
        codec.permits.release(8)
        list(stored)
    assert codec.threads == {WRITER}
    assert store.stats().bytes < store.stats().raw_bytes


def test_an_error_of_the_store_is_raised_and_ends_the_writing() -> None:
    store, seen = MemoryStore(2 * UNIT), list[int]()
    with pytest.raises(StoreFull), closing(write_behind(store, Raw(), made([10] * 9, seen), 20)) as stored:
        list(stored)
    assert sorted(store.keys()) == sorted([key_of(0), key_of(1)])
    assert len(seen) <= 6


def test_computed_chunks_are_stored_when_the_computation_fails_or_the_caller_stops() -> None:
    def breaks() -> Iterator[tuple[bytes, ChunkKV]]:
        yield from made([10] * 3, [])
        raise KeyboardInterrupt

    store, seen = MemoryStore(CAP), list[int]()
    with pytest.raises(KeyboardInterrupt):
        list(write_behind(store, Raw(), breaks(), 1000))
    assert store.stats().chunks == 3
    store = MemoryStore(CAP)
    with closing(write_behind(store, Raw(), made([10] * 9, seen), 40)) as stored:
        next(stored)
    assert store.stats().chunks == len(seen) < 9
