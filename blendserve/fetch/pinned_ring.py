"""Stored layers sent to a device: memory map -> ring of pinned buffers -> device, on a stream of their own.

    reader thread      read l+1, wait until the device has read slot (l+1) % 3, fill it, issue its copy | read l+2 ...
    copy stream        copy l                                                                   | copy l+1 ...
    computing stream   layer l-1                                           | wait for copy l    | layer l ...

A copy from pageable memory keeps the host busy; pinned memory is read by the device alone. So layers in the store's map
go through a few pinned buffers in turn. Only the reader thread waits for a buffer to become free. Tensors that are
pinned already are sent as they are, and tensors on the device stay there. The computing stream waits for an event, the
computing thread for the reader alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from blendserve.fetch.copy_stream import CopyStream, Event

Layer = list[tuple[Tensor, Tensor]]  # keys before RoPE and values [K, C, D] of each chunk

SLOTS = 3  # one that the device reads, one that is issued, one that is written
ALIGN = 256  # bytes: the start of a tensor within a buffer, for any dtype


@dataclass(frozen=True, slots=True)
class Sent:
    """A layer whose copies were issued."""

    layer: Layer
    memory: Sequence[Tensor] = ()  # on the device: one tensor of each storage that the layer lies in
    event: Event | None = None  # after the copies


class HostKv:
    """For models on the CPU: layers stay in host memory.

    One layer ahead is enough where reading and computing take the same time each layer. They vary.
    """

    ahead = 3

    def send(self, read: Callable[[], Layer]) -> Sent:
        return Sent(read())

    def wait_on_stream(self, sent: Sent) -> Layer:
        return sent.layer


@dataclass(slots=True)
class _Slot:
    """One buffer of the ring."""

    buffer: Tensor | None = None
    last: Event | None = None  # after the last copy from it


class PinnedRing:
    """Sends layers over a stream, through a ring of `slots` buffers. One thread uses it, but for `wait_on_stream`."""

    ahead = 2  # one is copied while the next is read

    def __init__(self, stream: CopyStream, slots: int = SLOTS) -> None:
        self._stream = stream
        self._ring = [_Slot() for _ in range(slots)]

    def send(self, read: Callable[[], Layer]) -> Sent:
        """Issue the copies of the layer that `read` returns; `read`'s own work on the device is on the stream too."""
        stream, slot = self._stream, None
        with stream.entered():
            units = [as_one(pair) for pair in read()]
            parts = [part for unit in units for part in unit]
            pageable = [part for part in parts if not (stream.is_on_device(part) or stream.is_pinned(part))]
            if pageable:
                slot = self._ring.pop(0)  # the one that was filled longest ago
                self._ring.append(slot)
            copied = {
                id(part): copy for part, copy in zip(pageable, self._through(slot, pageable), strict=True)
            }
            sent = [[self._on_device(part, copied) for part in unit] for unit in units]
            memory = {part.untyped_storage().data_ptr(): part for unit in sent for part in unit}
            event = stream.record_event()
        if slot:
            slot.last = event
        return Sent([split_kv(unit) for unit in sent], [*memory.values()], event)

    def wait_on_stream(self, sent: Sent) -> Layer:
        """The layer, for the computing thread: its stream waits for the copies, the thread does not."""
        self._stream.wait_on_stream(sent.memory, sent.event)
        return sent.layer

    def _on_device(self, part: Tensor, copied: Mapping[int, Tensor]) -> Tensor:
        if id(part) in copied:
            return copied[id(part)]
        return part if self._stream.is_on_device(part) else self._stream.send(part)

    def _through(self, slot: _Slot | None, parts: Sequence[Tensor]) -> list[Tensor]:
        """All of these, sent as one copy from the slot's buffer, as soon as the device has read it."""
        if slot is None:
            return []
        if slot.last is not None:
            slot.last.synchronize()
        starts = [0, *accumulate(-(-part.nbytes // ALIGN) * ALIGN for part in parts)]
        if slot.buffer is None or len(slot.buffer) < starts[-1]:
            slot.buffer = self._stream.buffer(starts[-1])
        for part, start in zip(parts, starts, strict=False):
            _as(part, slot.buffer, start).copy_(part)
        sent = self._stream.send(slot.buffer[: starts[-1]])
        return [_as(part, sent, start) for part, start in zip(parts, starts, strict=False)]


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


def _as(part: Tensor, buffer: Tensor, start: int) -> Tensor:
    """The bytes from `start` on as a tensor like `part`."""
    return buffer[start : start + part.nbytes].view(part.dtype).view(part.shape)
