"""Layers come one ahead, each read once, and nothing is read any more once the reader is closed."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
import torch

from blendserve.blend.loader import LayerReader
from blendserve.core import ChunkKV
from blendserve.errors import CorruptRecord
from blendserve.store.memory import MemoryChunk

LAYERS = 5


class Watched:
    """Tells which layers were read, in which threads; `gate` holds every read back, `damaged` fails one."""

    def __init__(self, damaged: int | None = None) -> None:
        self.chunk = MemoryChunk(ChunkKV(*torch.arange(2 * LAYERS * 6.0).view(2, LAYERS, 1, 3, 2)))
        self.n_layers, self.n_tokens, self.n_bytes = LAYERS, self.chunk.n_tokens, self.chunk.n_bytes
        self.raw_bytes, self.version = self.chunk.raw_bytes, self.chunk.version
        self.read: list[int] = []
        self.threads: set[str] = set()
        self.teams: set[int] = set()
        self.damaged = damaged
        self.gate = threading.Event()
        self.gate.set()
        self.done = threading.Semaphore(0)

    def layer(self, l: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.gate.wait(10)
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


def test_the_next_layer_is_read_while_the_caller_is_busy() -> None:
    view = Watched()
    with closing(LayerReader([view], LAYERS)) as reader:
        reader.take(0)
        assert view.done.acquire(timeout=300)
        assert view.done.acquire(timeout=300)  # layer 1, which nobody has asked for
        assert view.read == [0, 1]


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
