"""Layers come some ahead, each read once, and nothing is read any more once the reader is closed."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from contextlib import closing

import pytest
import torch

from blendserve.blend.loader import LayerReader
from blendserve.core import ChunkKV
from blendserve.errors import CorruptRecord
from blendserve.kernels import team
from blendserve.kernels.cuda.staging import InPlace
from blendserve.store.memory import MemoryChunk

LAYERS = 5


class Watched:
    """Tells which layers were read, in which threads; `gate` holds every read back, `may_go_on` that of layer `slow`;
    `damaged` fails one."""

    def __init__(self, damaged: int | None = None, slow: int | None = None) -> None:
        self.chunk = MemoryChunk(ChunkKV(*torch.arange(2 * LAYERS * 6.0).view(2, LAYERS, 1, 3, 2)))
        self.n_layers, self.n_tokens, self.n_bytes = LAYERS, self.chunk.n_tokens, self.chunk.n_bytes
        self.raw_bytes, self.version = self.chunk.raw_bytes, self.chunk.version
        self.read: list[int] = []
        self.threads: set[str] = set()
        self.teams: set[int] = set()
        self.damaged, self.slow, self.may_go_on = damaged, slow, threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.done = threading.Semaphore(0)

    def layer(self, l: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.gate.wait(10)
        if l == self.slow:
            self.may_go_on.wait(10)
        self.read.append(l)
        self.threads.add(threading.current_thread().name)
        self.teams.add(torch.get_num_threads())
        self.done.release()
        if l == self.damaged:
            raise CorruptRecord(b"k", f"layer {l}")
        return self.chunk.layer(l)


def test_gives_every_layer_and_reads_each_once_in_a_thread_of_its_own() -> None:
    views = [Watched(), Watched()]
    with closing(LayerReader(views, LAYERS)) as reader:
        for l in range(LAYERS):
            for view, (keys, values) in zip(views, reader.take(l), strict=True):
                wanted = view.chunk.layer(l)
                assert torch.equal(keys, wanted[0])
                assert torch.equal(values, wanted[1])
    for view in views:
        assert view.read == list(range(LAYERS))
        assert threading.current_thread().name not in view.threads


@pytest.mark.parametrize("times_smaller", [1, 2])
def test_threads_that_read_have_no_team(times_smaller: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        views = [Watched(), Watched()]
        for view in views:
            view.n_bytes = view.raw_bytes // times_smaller  # what is smaller is decoded side by side
        with closing(LayerReader(views, LAYERS)) as reader:
            reader.take(0)
        assert [view.teams for view in views] == [{1}, {1}]
        side_by_side = {name for view in views for name in view.threads if "decode" in name}
        assert bool(side_by_side) == (times_smaller > 1)
        assert torch.get_num_threads() == 3
        others: list[int] = []
        later = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert others == [3]
    finally:
        torch.set_num_threads(before)


def test_the_next_layers_are_read_while_the_caller_is_busy() -> None:
    view = Watched()
    with closing(LayerReader([view], LAYERS)) as reader:
        reader.take(0)
        for _ in range(1 + InPlace.ahead):  # layers that nobody has asked for
            assert view.done.acquire(timeout=300)
        assert view.read == [*range(1 + InPlace.ahead)]
        assert InPlace.ahead + 1 < LAYERS  # and not all of them


def coded(view: Watched) -> Watched:
    view.n_bytes = view.raw_bytes // 2
    return view


def released(view: Watched, seconds: float = 0.05) -> None:
    """Let what is being read go on, a moment after it is waited for."""
    view.gate.clear()
    threading.Timer(seconds, view.gate.set).start()


def test_who_waits_for_decoding_leaves_a_core_to_it_until_layers_are_there_in_time() -> None:
    view = coded(Watched())
    released(view)
    with closing(LayerReader([view], LAYERS)) as reader:
        reader.take(0)
        assert team.leaves() == 1
        for _ in range(1 + InPlace.ahead):
            assert view.done.acquire(timeout=300)
        wait_until_done(reader)
        reader.take(1)
        assert team.leaves() == 0
        wait_until_done(reader)
        released(view)  # the last layer is late, and another one would be
        reader.take(2)
        reader.take(3)
        left = team.leaves()
        reader.take(4)
    assert left == 0
    assert team.leaves() == 0


def test_a_layer_that_is_there_is_not_in_time_where_the_next_one_is_not() -> None:
    view = coded(Watched(slow=2))
    with closing(LayerReader([view], LAYERS)) as reader:
        reader.take(0)
        wait([reader._ahead[1]], timeout=300)
        reader.take(1)
        left = team.leaves()
        view.may_go_on.set()
    assert left == 1


def wait_until_done(reader: LayerReader) -> None:
    wait([*reader._ahead.values()], timeout=300)


def test_raw_layers_are_waited_for_with_all_threads() -> None:
    view = Watched()
    released(view)
    with closing(LayerReader([view], LAYERS)) as reader:
        reader.take(0)
        assert team.leaves() == 0


def test_a_closed_reader_leaves_no_cores() -> None:
    view = coded(Watched(damaged=0))
    released(view)
    reader = LayerReader([view], LAYERS)
    with pytest.raises(CorruptRecord):
        reader.take(0)
    assert team.leaves() == 1
    reader.close()
    assert team.leaves() == 0


@pytest.mark.parametrize(("threads", "views", "left"), [(1, 3, 1), (2, 3, 1), (4, 2, 2), (4, 9, 3)])
def test_as_many_threads_decode_as_chunks_and_other_cores(threads: int, views: int, left: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        all_coded = [coded(Watched()) for _ in range(views)]
        released(all_coded[0])
        with closing(LayerReader(all_coded, LAYERS)) as reader:
            reader.take(0)
            assert team.leaves() == left
    finally:
        torch.set_num_threads(before)


def test_a_layer_out_of_turn_is_read_too() -> None:
    view = Watched()
    with closing(LayerReader([view], LAYERS)) as reader:
        assert torch.equal(reader.take(3)[0][0], view.chunk.layer(3)[0])
        assert torch.equal(reader.take(4)[0][0], view.chunk.layer(4)[0])


def test_damage_is_told_to_who_takes_that_layer() -> None:
    with closing(LayerReader([Watched(damaged=2)], LAYERS)) as reader:
        reader.take(0)
        reader.take(1)
        with pytest.raises(CorruptRecord):
            reader.take(2)


def test_closing_waits_for_what_is_being_read_and_starts_nothing_more() -> None:
    view = Watched()
    view.gate.clear()
    reader = LayerReader([view], LAYERS)
    closer = threading.Thread(target=reader.close)
    closer.start()
    closer.join(0.1)
    held = closer.is_alive()  # unless the read had not begun: then there is nothing to wait for
    view.gate.set()
    closer.join(10)
    assert not closer.is_alive()
    assert view.read == ([0] if held else [])
    reader.close()
