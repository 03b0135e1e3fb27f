"""Stored layers on their way to a device: map -> pinned ring -> device, on a stream of their own.

    loader thread      read l+1, wait until slot (l+1) % 3 was fetched, write it, issue its copy | read l+2 ...
    copy stream        copy l                                                                   | copy l+1 ...
    computing stream   layer l-1                                           | wait for copy l    | layer l ...

A copy out of ordinary memory is made by the host, piece by piece, and holds it up; from pinned memory the device fetches
it by itself. So what lies in the store's map goes through a few pinned buffers, taken in turn: one is
written again when what was sent from it has arrived, and only the loader thread waits for that. What is pinned already
is fetched from where it lies, and what is on the device is left there. The computing stream waits for an event; the
computing *thread* waits for nothing but the loader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blendserve.core import ChunkKV

Layer = list[tuple[Tensor, Tensor]]  # keys before RoPE and values [K, C, D] of each chunk

SLOTS = 3  # one that the device fetches, one that is sent, one that is written
ALIGN = 256  # bytes: a tensor may start at any of these within a buffer, whatever its dtype


class Event(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Keep this thread until everything before the event is done."""
        ...


class CopyStream(Protocol):
    """A stream of copies to or from one device. What is issued on it runs in order, beside everything else."""

    def entered(self) -> AbstractContextManager[object]:
        """Whatever torch is told to do inside, for the device, is issued on this stream."""
        ...

    def free_bytes(self) -> int:
        """Bytes that are free on the device."""
        ...

    def buffer(self, n_bytes: int) -> Tensor:
        """Host memory [n_bytes] uint8 that the device can fetch from."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is on the device already."""
        ...

    def fetches(self, tensor: Tensor) -> bool:
        """Whether the device can fetch this host tensor from where it lies."""
        ...

    def send(self, tensor: Tensor) -> Tensor:
        """Its copy on the device: issued, not waited for."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """The copy in host memory of what this thread has told the device to compute: issued, not waited for."""
        ...

    def record_event(self) -> Event:
        """Behind everything issued so far."""
        ...

    def hand_over(self, memory: Sequence[Tensor], event: Event | None) -> None:
        """From now on what the calling thread computes comes after the event, and may use what lies in this memory."""
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
        # torch's allocator of pinned memory notes the copy: a buffer that is dropped is not lent again before its end.
        return tensor.to(self._device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self.entered():
            here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            here.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # the caller may drop it at once
        return here

    def record_event(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting for it is sleeping
        event.record(self._stream)
        return event

    def hand_over(self, memory: Sequence[Tensor], event: Event | None) -> None:
        assert isinstance(event, torch.cuda.Event)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        for part in memory:
            part.record_stream(
                stream
            )  # once dropped, it waits for that stream before it is the stream's again


_streams: dict[tuple[int, bool], CudaCopyStream] = {}
_making = threading.Lock()


def copy_stream_to(device: torch.device, to_host: bool = False) -> CopyStream | None:
    """The stream of copies to a device, or from it to the host; None where the store's own memory is as good as any.

    One each for a CUDA device, shared by all requests: what one of them has sent is there for the next.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    with _making:
        if (index, to_host) not in _streams:
            _streams[index, to_host] = CudaCopyStream(torch.device("cuda", index))
        return _streams[index, to_host]


@dataclass(frozen=True, slots=True)
class Sent:
    """A layer that is on its way."""

    layer: Layer
    memory: list[Tensor]  # on the device: one tensor of each piece that the layer lies in
    event: Event | None  # it has arrived by then; None = it need not go anywhere


class InPlace:
    """For readers that compute where the store's memory is: nothing is sent, and some layers are read ahead.

    One is enough where a layer always takes as long to read, and to compute. Links, decoding and others' work vary.
    """

    ahead = 3

    def send(self, read: Callable[[], Layer]) -> Sent:
        return Sent(read(), [], None)

    def hand_over(self, sent: Sent) -> Layer:
        return sent.layer


@dataclass(slots=True)
class _Slot:
    """One buffer of the ring."""

    buffer: Tensor | None = None
    last: Event | None = None  # what was sent from it has arrived by then


class Staging:
    """Sends layers over a stream, through a ring of `slots` buffers. Used by one thread, but for `hand_over`."""

    ahead = 2  # one is copied while the next is read

    def __init__(self, stream: CopyStream, slots: int = SLOTS) -> None:
        self._copies = stream
        self._ring = [_Slot() for _ in range(slots)]
        self._turn = 0

    def send(self, read: Callable[[], Layer]) -> Sent:
        """Issue the copies of the layer that `read` gives; what `read` itself does on the device is on the stream too."""
        with self._copies.entered():
            units = [joined(pair) for pair in read()]
            parts = [part for unit in units for part in unit]
            near = [self._copies.holds(part) or self._copies.fetches(part) for part in parts]
            slot = None if all(near) else self._next_slot()
            copied = iter(
                self._through(slot, [p for p, is_near in zip(parts, near, strict=True) if not is_near])
            )
            there = [
                self._fetched(p) if is_near else next(copied) for p, is_near in zip(parts, near, strict=True)
            ]
            memory = {part.untyped_storage().data_ptr(): part for part in there}
            rest = iter(there)
            layer = [apart([next(rest) for _ in unit]) for unit in units]
            sent = Sent(layer, list(memory.values()), self._copies.record_event())
        if slot:
            slot.last = sent.event
        return sent

    def hand_over(self, sent: Sent) -> Layer:
        """To the computing thread, which need not wait before it uses the layer."""
        self._copies.hand_over(sent.memory, sent.event)
        return sent.layer

    def _fetched(self, part: Tensor) -> Tensor:
        return part if self._copies.holds(part) else self._copies.send(part)

    def _next_slot(self) -> _Slot:
        """The one that was written longest ago, as soon as it may be written again."""
        slot = self._ring[self._turn]
        self._turn = (self._turn + 1) % len(self._ring)
        if slot.last is not None:
            slot.last.synchronize()
        return slot

    def _through(self, slot: _Slot | None, parts: Sequence[Tensor]) -> list[Tensor]:
        """All of these, sent as one."""
        if slot is None:
            return []
        starts, n_bytes = _side_by_side(parts)
        if slot.buffer is None or len(slot.buffer) < n_bytes:
            slot.buffer = self._copies.buffer(n_bytes)
        for part, start in zip(parts, starts, strict=True):
            _as(part, slot.buffer, start).copy_(part)
        there = self._copies.send(slot.buffer[:n_bytes])
        return [_as(part, there, start) for part, start in zip(parts, starts, strict=True)]


def joined(pair: tuple[Tensor, Tensor]) -> Sequence[Tensor]:
    """Keys and values as one [2, K, C, D] where they lie one behind the other, as in a record: half of the copies."""
    keys, values = pair
    alike = keys.shape == values.shape and keys.dtype == values.dtype
    if not (alike and keys.is_contiguous() and values.is_contiguous()):
        return pair
    one = keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    if not one or values.storage_offset() - keys.storage_offset() != keys.numel():
        return pair
    return (keys.as_strided((2, *keys.shape), (keys.numel(), *keys.stride())),)


def apart(unit: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What `joined` joined."""
    keys, values = unit if len(unit) == 2 else unit[0].unbind()
    return keys, values


def _side_by_side(parts: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each starts in one buffer, and the buffer's bytes."""
    starts, at = [], 0
    for part in parts:
        starts.append(at)
        at += -(-part.nbytes // ALIGN) * ALIGN
    return starts, at


def _as(part: Tensor, buffer: Tensor, start: int) -> Tensor:
    """The bytes from `start` on as a tensor like `part`."""
    return buffer[start : start + part.nbytes].view(part.dtype).view(part.shape)


class HostCopy:
    """A chunk's KV on its way to host memory: issued when this is made; another thread may wait for it."""

    def __init__(self, kv: ChunkKV, stream: CopyStream | None = None) -> None:
        """stream: by default the one to the host from where the KV is."""
        stream = stream or copy_stream_to(kv.keys.device, to_host=True)
        self._kv = ChunkKV(stream.to_host(kv.keys), stream.to_host(kv.values), ids=kv.ids) if stream else kv
        self._event = stream.record_event() if stream else None

    def arrived(self) -> ChunkKV:
        """The chunk in host memory; what was computed after it is not waited for."""
        if self._event is not None:
            self._event.synchronize()
        return self._kv
