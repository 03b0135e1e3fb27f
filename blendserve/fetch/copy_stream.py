"""Copies between host memory and a CUDA device, on a stream of their own beside the computing stream."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from blendserve.core import ChunkKV


class Event(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Block this thread until everything before the event is done."""
        ...


class CopyStream(Protocol):
    """A stream of copies to or from one device. Its work runs in order, beside all other streams."""

    def entered(self) -> AbstractContextManager[object]:
        """Inside, torch issues the device's work on this stream."""
        ...

    def free_bytes(self) -> int:
        """Free bytes on the device."""
        ...

    def buffer(self, n_bytes: int) -> Tensor:
        """Host memory [n_bytes] uint8 that the device can read: pinned."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is on the device already."""
        ...

    def fetches(self, tensor: Tensor) -> bool:
        """Whether the device can read this host tensor in place: it is pinned."""
        ...

    def send(self, tensor: Tensor) -> Tensor:
        """Issue a copy to the device, without waiting."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """Issue a copy to host memory of a tensor that the current stream computes, without waiting."""
        ...

    def record_event(self) -> Event:
        """An event after everything issued so far."""
        ...

    def wait_on_stream(self, memory: Sequence[Tensor], event: Event | None) -> None:
        """Make the calling thread's stream wait for the event before it uses this memory."""
        ...


class CudaCopyStream:
    """A stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def entered(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def buffer(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def fetches(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def send(self, tensor: Tensor) -> Tensor:
        # torch's allocator of pinned memory records the copy: it does not reuse a freed buffer before the copy's end.
        return tensor.to(self._device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self.entered():
            here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            here.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # the caller may free it at once
        return here

    def record_event(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # synchronize() sleeps
        event.record(self._stream)
        return event

    def wait_on_stream(self, memory: Sequence[Tensor], event: Event | None) -> None:
        assert isinstance(event, torch.cuda.Event)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        for (
            part
        ) in memory:  # the allocator must not reuse it for this stream before the computing stream is done
            part.record_stream(stream)


_streams: dict[tuple[int, bool], CudaCopyStream] = {}
_making = threading.Lock()


def copy_stream_to(device: torch.device, to_host: bool = False) -> CopyStream | None:
    """The stream of copies to a device, or from it to the host; None for a CPU, which reads the store's memory.

    All requests share one for each CUDA device, so that a chunk which one request has sent is there for the next.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    with _making:
        if (index, to_host) not in _streams:
            _streams[index, to_host] = CudaCopyStream(torch.device("cuda", index))
        return _streams[index, to_host]


class HostCopy:
    """A copy of a chunk's KV to host memory. The constructor issues it; another thread may wait for it."""

    def __init__(self, kv: ChunkKV, stream: CopyStream | None = None) -> None:
        """stream: by default the one from the KV's device to the host."""
        stream = stream or copy_stream_to(kv.keys.device, to_host=True)
        self._kv = ChunkKV(stream.to_host(kv.keys), stream.to_host(kv.values), ids=kv.ids) if stream else kv
        self._event = stream.record_event() if stream else None

    def arrived(self) -> ChunkKV:
        """Wait for the copy -> the chunk in host memory. Work issued after the copy is not waited for."""
        if self._event is not None:
            self._event.synchronize()
        return self._kv
