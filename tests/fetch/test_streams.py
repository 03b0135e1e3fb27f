"""Layers on their way to a device that is late, and chunks from it that a background thread writes.

Each layer arrives as it was read, and the computing thread waits for none. Chunks are stored in order, errors are raised,
and the queue is bounded.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import ChunkKV
from blendserve.errors import ChunkLost, StoreFull
from blendserve.fetch.layers import LayerReader
from blendserve.fetch.write_queue import write_behind
from blendserve.store import MemoryStore
from blendserve.store.codecs.base import Buffer
from blendserve.store.codecs.int8 import Int8
from blendserve.store.codecs.raw import Raw
from blendserve.store.view import TensorView
from tests.support.stores import CAP, UNIT, chunk, key_of, read, same
from tests.support.streams import LateCopyStream, LateMark
from tests.support.waiting import eventually, is_blocked

LAYERS = 9
WRITER = "blendserve-write_0"


class Unstable(TensorView):
    """A view as of a map: what it gave for a layer is gone when it is read again."""

    def __init__(self, kv: ChunkKV) -> None:
        super().__init__(kv)
        self.in_memory = False
        self.chunk = TensorView(kv)
        both = torch.stack([kv.keys[0], kv.values[0]])  # side by side, as in a record
        self.page = both[0], both[1]
        self.reads: list[int] = []

    def layer(self, l: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads.append(l)
        for page, part in zip(self.page, self.chunk.layer(l), strict=True):
            page.copy_(part)
        return self.page


def is_layer(layer: Sequence[tuple[torch.Tensor, torch.Tensor]], views: Sequence[Unstable], l: int) -> bool:
    """Whether it is layer l of all chunks."""
    pairs = zip(layer, (view.chunk.layer(l) for view in views), strict=True)
    return all(torch.equal(a, b) for found, wanted in pairs for a, b in zip(found, wanted, strict=True))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.sampled_from([torch.bfloat16, torch.float32]))
def test_a_layer_is_whole_once_its_own_mark_has_passed_and_stays_so(
    lengths: list[int], dtype: torch.dtype
) -> None:
    views = [Unstable(chunk(n, LAYERS, dtype=dtype, seed=i)) for i, n in enumerate(lengths)]
    stream, layers = LateCopyStream(), []
    with closing(LayerReader(views, LAYERS, stream)) as reader:
        for l in range(LAYERS):
            layers.append(reader.take(l))
            mark = stream.handed[l]
            assert isinstance(mark, LateMark)
            stream.run(mark.upto)
            assert is_layer(layers[l], views, l)
    assert stream.waited_in == []
    assert all(is_layer(layer, views, l) for l, layer in enumerate(layers))
    assert [view.reads for view in views] == [list(range(LAYERS))] * len(views)
    n_copies = sum(1 if n else 2 for n in lengths)  # keys and values of a chunk together, unless it is empty
    assert len(stream.copies) == n_copies * LAYERS


def test_tensors_on_the_device_are_left_there() -> None:
    stream, kv = LateCopyStream(), chunk(6, LAYERS)
    with stream.entered():
        there = TensorView(ChunkKV(stream.send(kv.keys), stream.send(kv.values)))
    here = TensorView(chunk(3, LAYERS, seed=1))
    with closing(LayerReader([there, here], LAYERS, stream)) as reader:
        layers = [reader.take(l) for l in range(LAYERS)]
    stream.finish()
    assert len(stream.copies) == 2 + 2 * LAYERS  # `here` has keys and values apart
    for l, layer in enumerate(layers):
        assert layer[0][0].data_ptr() == there.layer(l)[0].data_ptr()
        assert torch.equal(layer[0][1], kv.values[l])
        assert torch.equal(layer[1][1], here.layer(l)[1])


class Lost(Unstable):
    """All layers but the first are lost."""

    def layer(self, l: int) -> tuple[torch.Tensor, torch.Tensor]:
        if l:
            raise ChunkLost(b"key")
        return super().layer(l)


def read_ahead() -> weakref.ref[LayerReader]:
    """A reader that was closed while the errors of further layers waited to be taken."""
    with closing(LayerReader([Lost(chunk(3, LAYERS))], LAYERS)) as reader:
        reader.take(0)
        eventually(lambda: reader.is_ahead)
    return weakref.ref(reader)


def test_a_closed_reader_keeps_no_error_of_layers_that_were_read_ahead() -> None:
    """The collector does not run: a kept error would hold the frames, and so the memory, of its request."""
    gc.disable()
    reader = read_ahead()
    eventually(lambda: reader() is None)
    gc.enable()


# Writing


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
