"""What is said to torch.cuda, in which order: the part that only a GPU can run, against a double that takes notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blendserve.fetch.copy_stream import CopyStream, HostCopy
from blendserve.fetch.layers import LayerReader
from blendserve.kernels.cuda import graphs
from blendserve.kernels.cuda.graphs import CudaGraph
from blendserve.store.view import TensorView
from tests.support.stores import chunk

CPU = torch.device("cpu")  # stands for the GPU: what is "sent" to it is there already


class Notes(list[str]):
    """Everything that was asked for, and the streams as they are entered."""

    def __init__(self) -> None:
        self.streams = ["computing"]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notes]:
    notes = Notes()

    def stream_named(name: str) -> Any:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: notes.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: notes.append(f"{name} waits for the event of {event.of}"),
        )

    class Event:
        def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
            assert blocking

        def record(self, stream: Any) -> None:
            self.of = stream.name
            notes.append(f"event on {stream.name}")

        def synchronize(self) -> None:
            notes.append(f"thread waits for the event of {self.of}")

    class Graph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            assert notes.streams[-1] == "own"
            notes.append(f"capture {capture_error_mode}")

        def capture_end(self) -> None:
            notes.append("captured")
            if "forbidden" in notes:
                raise RuntimeError("capture invalidated")

        def replay(self) -> None:
            notes.append(f"replay on {notes.streams[-1]}")

    @contextmanager
    def stream(entered: Any) -> Iterator[None]:
        notes.streams.append(entered.name)
        try:
            yield
        finally:
            notes.streams.pop()

    monkeypatch.setattr(graphs, "end_allocations", lambda device, pool: notes.append("memory given up"))
    monkeypatch.setattr(
        torch, "empty", lambda *shape, pin_memory=False, **options: torch.zeros(*shape, **options)
    )
    kept = lambda part, stream: notes.append(f"kept for {stream.name}")  # noqa: E731
    monkeypatch.setattr(Tensor, "record_stream", kept, raising=False)
    for name, double in {
        "Stream": lambda device: stream_named("own"),
        "Event": Event,
        "CUDAGraph": Graph,
        "stream": stream,
        "current_stream": lambda device: stream_named(notes.streams[-1]),
        "graph_pool_handle": lambda: (0, 1),
    }.items():
        monkeypatch.setattr(torch.cuda, name, double)
    graphs.capture_stream.cache_clear()
    yield notes
    graphs.capture_stream.cache_clear()


def test_a_layer_is_sent_on_the_stream_of_copies_and_waited_for_by_the_computing_stream_alone(
    cuda: Notes,
) -> None:
    kv = chunk(5)

    class View(TensorView):
        def layer(self, l: int) -> tuple[Tensor, Tensor]:
            cuda.append(f"read on {cuda.streams[-1]}")
            return super().layer(l)

    with closing(LayerReader([View(kv)], 1, CopyStream(CPU))) as reader:
        ((keys, values),) = reader.take(0)
    assert cuda[:2] == ["read on own", "event on own"]
    assert cuda[2:4] == ["computing waits for the event of own", "kept for computing"]
    assert torch.equal(keys, kv.keys[0])
    assert torch.equal(values, kv.values[0])
    assert cuda.streams == ["computing"]


def test_a_chunk_comes_home_behind_what_computed_it(cuda: Notes) -> None:
    kv = chunk(5)
    home = HostCopy(kv, CopyStream(CPU))
    one = ["own waits for computing", "kept for own"]
    assert cuda == [*one, *one, "event on own"]
    here = home.arrived()
    assert cuda[-1] == "thread waits for the event of own"
    assert torch.equal(here.keys, kv.keys)
    assert torch.equal(here.values, kv.values)


def test_a_step_is_warmed_up_captured_and_replayed_on_the_computing_stream(cuda: Notes) -> None:
    def work() -> Tensor:
        cuda.append(f"work on {cuda.streams[-1]}")
        return torch.ones(3)

    graph = CudaGraph(work, CPU)
    warmed_up = ["own waits for computing", "work on own"]
    assert cuda == [*warmed_up, "capture thread_local", "work on own", "captured", "computing waits for own"]
    assert graph() is graph()
    assert cuda[-2:] == ["replay on computing"] * 2


def test_a_capture_that_fails_is_ended_and_told(cuda: Notes) -> None:
    def work() -> Tensor:
        if "capture thread_local" in cuda:
            cuda.append("forbidden")
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.ones(3)

    with pytest.raises(RuntimeError):
        CudaGraph(work, CPU)
    assert cuda[-3:] == ["captured", "memory given up", "computing waits for own"]
    assert cuda.streams == ["computing"]
    assert not graphs.capturing.locked()
