"""A stream whose device is as slow as it may be: copies run when somebody waits for them, and no sooner."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from blendserve.fetch.copy_stream import CopyStream, Event


class LateMark:
    """Waiting for it lets everything run that was issued before."""

    def __init__(self, stream: LateCopyStream, upto: int) -> None:
        self.stream, self.upto = stream, upto

    def synchronize(self) -> None:
        self.stream.waited_in.append(threading.current_thread().name)
        self.stream.run(self.upto)


class LateCopyStream(CopyStream):
    """Tensors "on the device" are those that it sent."""

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []  # (there, here) that were issued
        self.ran = 0
        self.buffers: list[Tensor] = []
        self.waited_in: list[str] = []
        self.handed: list[Event | None] = []
        self.inside = 0
        self._using = threading.Lock()

    def free_bytes(self) -> int:
        return 1 << 30

    def run(self, upto: int) -> None:
        with self._using:
            while self.ran < upto:
                there, here = self.copies[self.ran]
                there.copy_(here)
                self.ran += 1

    def finish(self) -> None:
        self.run(len(self.copies))

    @contextmanager
    def entered(self) -> Iterator[None]:
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def pinned(self, tensor: Tensor) -> Tensor:
        if any(within(tensor, buffer) for buffer in self.buffers):
            return tensor
        self.buffers.append(tensor.clone())
        return self.buffers[-1]

    def send(self, tensor: Tensor) -> Tensor:
        assert self.inside
        if any(within(tensor, there) for there, _ in self.copies):
            return tensor
        there = torch.full_like(tensor, 77)
        here = self.pinned(tensor)
        with self._using:
            self.copies.append((there, here))
        return there

    def to_host(self, tensor: Tensor) -> Tensor:
        """The computing stream is never late here: what is brought is there already."""
        here = torch.full_like(tensor, 77)
        with self._using:
            self.copies.append((here, tensor))
        return here

    def record_event(self) -> LateMark:
        return LateMark(self, len(self.copies))

    def wait_on_stream(self, memory: Sequence[Tensor], event: Event | None) -> None:
        """The computing stream waits, which the test does later by `run`."""
        self.handed.append(event)


def within(part: Tensor, whole: Tensor) -> bool:
    """Whether they share memory."""
    at = part.untyped_storage().data_ptr()  # 0 of an empty one
    return at != 0 and at == whole.untyped_storage().data_ptr()
