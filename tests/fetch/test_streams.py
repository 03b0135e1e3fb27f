"""Layers that are read ahead, on their way to a device that is late, and chunks from it that a thread writes.

Each layer is read once and arrives as it was read; the computing thread waits for none. Chunks are stored in order,
errors are raised, and the queue is bounded.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Container, Iterator, Sequence
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.errors import CorruptRecord, StoreFull
from blendserve.fetch.layers import HOST_AHEAD, LayerReader
from blendserve.fetch.write_queue import write_behind
from blendserve.kernels import team
from blendserve.kv import ChunkKV
from blendserve.store import MemoryStore
from blendserve.store.codecs.base import Buffer
from blendserve.store.codecs.int8 import Int8
from blendserve.store.codecs.raw import Raw
from blendserve.store.view import TensorView
from tests.support.kernel_switches import threads
from tests.support.stores import CAP, UNIT, chunk, key_of, read, same
from tests.support.streams import LateCopyStream, LateMark
from tests.support.waiting import eventually, is_blocked

LAYERS = 9
WRITER = "blendserve-write_0"
SOME = chunk(3, LAYERS)


class Watched(TensorView):
    """A chunk that notes its reads. Layers in `damaged` fail, that of `slow` waits for `gate`."""

    def __init__(
        self, kv: ChunkKV = SOME, damaged: Container[int] = (), slow: int | None = None, coded: bool = False
    ) -> None:
        super().__init__(kv)
        self.in_memory = False
        self.chunk, self.n_bytes = TensorView(kv), self.raw_bytes // (2 if coded else 1)
        self.damaged, self.slow, self.gate = damaged, slow, threading.Event()
        self.reads, self.threads, self.teams = list[int](), set[str](), set[int]()

    def layer(self, l: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert l != self.slow or self.gate.wait(60)
        self.threads.add(threading.current_thread().name)
        self.teams.add(torch.get_num_threads())
        self.reads.append(l)
        if l in self.damaged:
            raise CorruptRecord(b"k", f"layer {l}")
        return self.chunk.layer(l)


@pytest.mark.parametrize("coded", [False, True])
def test_every_layer_is_read_once_ahead_by_threads_of_one_core(coded: bool) -> None:
    """Chunks are decoded side by side."""
    views = [Watched(coded=coded), Watched(coded=coded)]
    with threads(3), closing(LayerReader(views, LAYERS)) as reader:
        for l in range(LAYERS):
            for view, pair in zip(views, reader.take(l), strict=True):
                assert all(map(torch.equal, pair, view.chunk.layer(l)))
            eventually(lambda: reader.is_ahead)
            assert len(views[0].reads) == min(l + 1 + HOST_AHEAD, LAYERS)
        assert torch.get_num_threads() == 3
    assert [view.reads for view in views] == [list(range(LAYERS))] * 2
    assert [view.teams for view in views] == [{1}, {1}]
    names = views[0].threads | views[1].threads
    assert threading.current_thread().name not in names
    assert any("decode" in name for name in names) == coded


@pytest.mark.parametrize(
    ("n_threads", "views", "coded", "left"),
    [(1, 3, True, 1), (2, 3, True, 1), (4, 2, True, 2), (4, 9, True, 3), (4, 9, False, 0)],
)
def test_cores_are_left_to_decoding_while_the_next_layer_is_late(
    n_threads: int, views: int, coded: bool, left: int
) -> None:
    late, others = Watched(slow=2, coded=coded), [Watched(coded=coded) for _ in range(views - 1)]
    with threads(n_threads), closing(LayerReader([late, *others], LAYERS)) as reader:
        reader.take(0)
        eventually(lambda: 1 in late.reads)
        reader.take(1)
        assert team.leaves() == left
        late.gate.set()
        eventually(lambda: reader.is_ahead)
        reader.take(2)
        assert team.leaves() == 0


def test_a_damaged_layer_fails_where_it_is_taken_and_any_layer_may_be_taken_first() -> None:
    view = Watched(damaged={2}, coded=True)
    with closing(LayerReader([view], LAYERS)) as reader:
        reader.take(0)
        with pytest.raises(CorruptRecord):
            reader.take(2)
        for l in (3, 4):
            assert torch.equal(reader.take(l)[0][0], view.chunk.layer(l)[0])
    assert team.leaves() == 0


def test_closing_waits_for_the_read_that_runs_and_starts_no_other() -> None:
    view = Watched(slow=0)
    reader = LayerReader([view], LAYERS)
    closer = threading.Thread(target=reader.close)
    closer.start()
    eventually(lambda: is_blocked(closer) or not closer.is_alive())
    view.gate.set()
    closer.join(60)
    assert not closer.is_alive()
    assert view.reads in ([0], [])  # [] where the read had not begun
    reader.close()


def read_ahead() -> weakref.ref[LayerReader]:
    """A reader that was closed while the errors of further layers waited to be taken."""
    with closing(LayerReader([Watched(damaged=range(1, LAYERS))], LAYERS)) as reader:
        reader.take(0)
        eventually(lambda: reader.is_ahead)
    return weakref.ref(reader)


def test_a_closed_reader_keeps_no_error_of_layers_that_were_read_ahead() -> None:
    """The collector does not run: a kept error would hold the frames, and so the memory, of its request."""
    gc.disable()
    reader = read_ahead()
    eventually(lambda: reader() is None)
    gc.enable()


# On the way to a device


class Unstable(Watched):
    """A view as of a map: what it gave for a layer is gone when it is read again."""

    def __init__(self, kv: ChunkKV, apart: bool) -> None:
        """apart: keys and values are not side by side, as they are in a record."""
        super().__init__(kv)
        both = torch.stack([kv.keys[0], kv.values[0]])
        self.page = (both[0].clone(), both[1].clone()) if apart else (both[0], both[1])

    def layer(self, l: int) -> tuple[torch.Tensor, torch.Tensor]:
        for page, part in zip(self.page, super().layer(l), strict=True):
            page.copy_(part)
        return self.page


def is_layer(layer: Sequence[tuple[torch.Tensor, torch.Tensor]], views: Sequence[Unstable], l: int) -> bool:
    """Whether it is layer l of all chunks."""
    pairs = zip(layer, (view.chunk.layer(l) for view in views), strict=True)
    return all(torch.equal(a, b) for found, wanted in pairs for a, b in zip(found, wanted, strict=True))


@given(
    st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=4),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_a_layer_is_whole_once_its_own_mark_has_passed_and_stays_so(
    chunks: list[tuple[int, bool]], dtype: torch.dtype
) -> None:
    views = [Unstable(chunk(n, LAYERS, dtype=dtype, seed=i), apart) for i, (n, apart) in enumerate(chunks)]
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
    n_copies = sum(2 if apart else 1 for n, apart in chunks if n)
    assert sum(1 for copy, _ in stream.copies if copy.numel()) == n_copies * LAYERS


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
