"""Copies between host memory and a CUDA device, on a stream of their own beside the computing stream."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from blendserve.kv import ChunkKV


class Event(Protocol):
    """A point in the work of a stream: a torch.cuda.Event."""

    def synchronize(self) -> None:
        """Block this thread until everything before the event is done."""


class CopyStream:
    """A stream of copies to or from one CUDA device. Its work runs in order, beside all other streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def entered(self) -> AbstractContextManager[object]:
        """Inside, torch issues the device's work on this stream."""
        return torch.cuda.stream(self._stream)

    def free_bytes(self) -> int:
        """Free bytes on the device."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def pinned(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to pinned memory, which the device reads without the host; itself if it is there."""
        return tensor.pin_memory()

    def send(self, tensor: Tensor) -> Tensor:
        """Issue a copy to the device, without waiting; inside `entered`. A tensor on the device is returned as it is.

        torch's allocator of pinned memory records the copy: it reuses a freed buffer only after the copy's end.
        """
        if tensor.device == self._device:
            return tensor
        return self.pinned(tensor).to(self._device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Issue a copy to host memory of a tensor that the current stream computes, without waiting."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self.entered():
            here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            here.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # the caller may free it at once
        return here

    def record_event(self) -> Event:
        """An event after everything issued so far; waiting for it sleeps."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait_on_stream(self, memory: Sequence[Tensor], event: Event | None) -> None:
        """Make the calling thread's stream wait for the event before it uses this memory."""
        assert isinstance(event, torch.cuda.Event)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        for part in memory:  # the allocator may not reuse it before the computing stream is done
            part.record_stream(stream)


def copy_stream_to(device: torch.device, to_host: bool = False) -> CopyStream | None:
    """The stream of copies to a device, or from it to the host; None for a CPU, which reads the store's memory.

    All requests share one for each CUDA device, so that a chunk which one request has sent is there for the next.
    """
    if device.type != "cuda":
        return None
    return _copy_stream(torch.cuda.current_device() if device.index is None else device.index, to_host)


@cache
def _copy_stream(index: int, to_host: bool) -> CopyStream:
    return CopyStream(torch.device("cuda", index))


class HostCopy:
    """A copy of a chunk's KV to host memory. The constructor issues it; another thread may wait for it."""

    def __init__(self, kv: ChunkKV, stream: CopyStream | None = None) -> None:
        """stream: by default the one from the KV's device to the host."""
        stream = stream or copy_stream_to(kv.keys[0].device, to_host=True)
        self._kv = replace(kv.map(stream.to_host), ids=kv.ids) if stream else kv
        self._event = stream.record_event() if stream else None

    def arrived(self) -> ChunkKV:
        """Wait for the copy -> the chunk in host memory. Work issued after the copy is not waited for."""
        if self._event is not None:
            self._event.synchronize()
        return self._kv


def as_one(pair: tuple[Tensor, Tensor]) -> Sequence[Tensor]:
    """Keys and values as one [2, K, C, D] where values follow keys in memory, as in a record: half of the copies."""
    keys, values = pair
    alike = keys.shape == values.shape and keys.dtype == values.dtype
    if not (alike and keys.is_contiguous() and values.is_contiguous()):
        return pair
    one = keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    if not one or values.storage_offset() - keys.storage_offset() != keys.numel():
        return pair
    return (keys.as_strided((2, *keys.shape), (keys.numel(), *keys.stride())),)


def split_kv(unit: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values of what `as_one` returned."""
    keys, values = unit if len(unit) == 2 else unit[0].unbind()
    return keys, values
