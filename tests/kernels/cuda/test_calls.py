"""What is said to torch.cuda, in which order: the part that only a GPU can run, against a double that takes notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from blendserve.fetch.copy_stream import CopyStream, HostCopy
from blendserve.fetch.layers import LayerReader
from blendserve.kernels.cuda import graphs
from blendserve.kernels.cuda.graphs import CudaGraph
from blendserve.kv import stacked
from blendserve.store.view import TensorView
from tests.support.stores import chunk

CPU = torch.device("cpu")  # stands for the GPU: what is "sent" to it is there already
STARTED, ENDED = "own wait_stream computing on computing", "computing wait_stream own on computing"
CAPTURE = "graph capture_begin thread_local on own"


class Notes(list[str]):
    """Every call of a double and the stream that it was made on; the streams as they are entered."""

    def __init__(self) -> None:
        self.streams = ["computing"]

    @contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        self.streams.append(stream.name)
        try:
            yield
        finally:
            self.streams.pop()


class Double:
    """Notes the calls of its methods, with the streams, events and options that they get."""

    def __init__(self, notes: Notes, name: str) -> None:
        self.notes, self.name = notes, name

    def __getattr__(self, method: str) -> Any:
        def call(*given: Any, **options: str) -> None:
            words = [method, *(x.name for x in given if isinstance(x, Double)), *options.values()]
            self.notes.append(f"{self.name} {' '.join(words)} on {self.notes.streams[-1]}")

        return call


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Notes:
    notes = Notes()

    class Event(Double):
        def __init__(self, blocking: bool) -> None:
            assert blocking
            super().__init__(notes, "event")

    class Graph(Double):
        def capture_end(self) -> None:
            notes.append("captured")
            if "forbidden" in notes:
                raise RuntimeError("capture invalidated")

    def kept(part: Tensor, stream: Any) -> None:
        notes.append(f"kept for {stream.name}")

    monkeypatch.setattr(graphs, "capture_stream", lambda device: Double(notes, "own"))
    monkeypatch.setattr(graphs, "end_allocations", lambda device, pool: notes.append("memory given up"))
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **options: torch.zeros(*shape, **options))
    monkeypatch.setattr(Tensor, "record_stream", kept, raising=False)
    for name, double in {
        "Stream": lambda device: Double(notes, "own"),
        "Event": Event,
        "CUDAGraph": lambda: Graph(notes, "graph"),
        "stream": notes.entered,
        "current_stream": lambda device: Double(notes, notes.streams[-1]),
        "graph_pool_handle": lambda: (0, 1),
    }.items():
        monkeypatch.setattr(torch.cuda, name, double)
    return notes


def test_a_layer_is_sent_on_the_stream_of_copies_and_waited_for_by_the_computing_stream(cuda: Notes) -> None:
    kv = chunk(5)

    class View(TensorView):
        def layer(self, l: int) -> tuple[Tensor, Tensor]:
            cuda.append(f"read on {cuda.streams[-1]}")
            return super().layer(l)

    with closing(LayerReader([View(kv)], 1, CopyStream(CPU))) as reader:
        ((keys, values),) = reader.take(0)
    assert cuda[:2] == ["read on own", "event record own on own"]
    assert cuda[2:4] == ["computing wait_event event on computing", "kept for computing"]
    assert torch.equal(keys, kv.keys[0])
    assert torch.equal(values, kv.values[0])
    assert cuda.streams == ["computing"]


def test_a_chunk_comes_home_behind_what_computed_it(cuda: Notes) -> None:
    kv = chunk(5)
    home = HostCopy(kv, CopyStream(CPU))
    assert cuda == [STARTED, "kept for own", STARTED, "kept for own", "event record own on computing"]
    here = home.arrived()
    assert cuda[-1] == "event synchronize on computing"
    assert torch.equal(stacked(here.keys), stacked(kv.keys))
    assert torch.equal(stacked(here.values), stacked(kv.values))


def test_a_step_is_warmed_up_captured_and_replayed_on_the_computing_stream(cuda: Notes) -> None:
    def work() -> Tensor:
        cuda.append(f"work on {cuda.streams[-1]}")
        return torch.ones(3)

    graph = CudaGraph(work, CPU)
    assert cuda == [STARTED, "work on own", CAPTURE, "work on own", "captured", ENDED]
    assert graph() is graph()
    assert cuda[-2:] == ["graph replay on computing"] * 2


def test_a_capture_that_fails_is_ended_and_told(cuda: Notes) -> None:
    def work() -> Tensor:
        if CAPTURE in cuda:
            cuda.append("forbidden")
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.ones(3)

    with pytest.raises(RuntimeError):
        CudaGraph(work, CPU)
    assert cuda[-3:] == ["captured", "memory given up", ENDED]
    assert cuda.streams == ["computing"]
    assert not graphs.capturing.locked()
