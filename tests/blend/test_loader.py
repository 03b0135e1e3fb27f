"""Stored layers are read ahead, each once; nothing is read after the reader is closed."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
import torch

from blendserve.core import ChunkKV
from blendserve.errors import CorruptRecord
from blendserve.fetch.layers import HOST_AHEAD, LayerReader
from blendserve.kernels import team
from blendserve.store.view import TensorView
from tests.support.kernels import threads
from tests.support.waiting import eventually, is_blocked

LAYERS = 5


class Watched(TensorView):
    """A chunk that notes its reads. That of layer `slow` waits for `gate`."""

    def __init__(self, damaged: int | None = None, slow: int | None = None, coded: bool = False) -> None:
        kv = ChunkKV(*torch.arange(2 * LAYERS * 6.0).view(2, LAYERS, 1, 3, 2))
        super().__init__(kv)
        self.in_memory = False
        self.chunk, self.n_bytes = TensorView(kv), self.raw_bytes // (2 if coded else 1)
        self.damaged, self.slow = damaged, slow
        self.reads: list[int] = []
        self.threads: set[str] = set()
        self.teams: set[int] = set()
        self.gate = threading.Event()

    def layer(self, l: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert l != self.slow or self.gate.wait(60)
        self.threads.add(threading.current_thread().name)
        self.teams.add(torch.get_num_threads())
        self.reads.append(l)
        if l == self.damaged:
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
    view = Watched(damaged=2, coded=True)
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
