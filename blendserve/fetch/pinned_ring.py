"""Stored layers sent to a device: memory map -> ring of pinned buffers -> device, on a stream of their own.

    loader thread      read l+1, wait until the device has read slot (l+1) % 3, fill it, issue its copy | read l+2 ...
    copy stream        copy l                                                                   | copy l+1 ...
    computing stream   layer l-1                                           | wait for copy l    | layer l ...

A copy from pageable memory keeps the host busy; pinned memory is read by the device alone. So layers in the store's map
go through a few pinned buffers in turn. Only the loader thread waits for a buffer to become free. Tensors that are
pinned already are sent as they are, and tensors on the device stay there. The computing stream waits for an event, the
computing thread for the loader alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from blendserve.fetch.copy_stream import CopyStream, Event

Layer = list[tuple[Tensor, Tensor]]  # keys before RoPE and values [K, C, D] of each chunk

SLOTS = 3  # one that the device reads, one that is issued, one that is written
ALIGN = 256  # bytes: the start of a tensor within a buffer, for any dtype


@dataclass(frozen=True, slots=True)
class Sent:
    """A layer whose copies were issued."""

    layer: Layer
    memory: list[Tensor]  # on the device: one tensor of each storage that the layer lies in
    event: Event | None  # after the copies; None = nothing was copied


class HostKv:
    """For models on the CPU: layers are read ahead and stay in host memory.

    One layer ahead is enough where reading and computing take the same time each layer. They vary.
    """

    ahead = 3

    def send(self, read: Callable[[], Layer]) -> Sent:
        return Sent(read(), [], None)

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
        self._copies = stream
        self._ring = [_Slot() for _ in range(slots)]
        self._turn = 0

    def send(self, read: Callable[[], Layer]) -> Sent:
        """Issue the copies of the layer that `read` returns; `read`'s own work on the device is on the stream too."""
        with self._copies.entered():
            units = [as_one(pair) for pair in read()]
            parts = [part for unit in units for part in unit]
            direct = [self._copies.holds(part) or self._copies.fetches(part) for part in parts]
            slot = None if all(direct) else self._next_slot()
            rest = [p for p, is_direct in zip(parts, direct, strict=True) if not is_direct]
            copied = iter(self._through(slot, rest))
            on_device = [
                self._sent(p) if is_direct else next(copied)
                for p, is_direct in zip(parts, direct, strict=True)
            ]
            memory = {part.untyped_storage().data_ptr(): part for part in on_device}
            each = iter(on_device)
            layer = [split_kv([next(each) for _ in unit]) for unit in units]
            sent = Sent(layer, list(memory.values()), self._copies.record_event())
        if slot:
            slot.last = sent.event
        return sent

    def wait_on_stream(self, sent: Sent) -> Layer:
        """The layer, for the computing thread: its stream waits for the copies, the thread does not."""
        self._copies.wait_on_stream(sent.memory, sent.event)
        return sent.layer

    def _sent(self, part: Tensor) -> Tensor:
        return part if self._copies.holds(part) else self._copies.send(part)

    def _next_slot(self) -> _Slot:
        """The slot that was filled longest ago; waits until the device has read it."""
        slot = self._ring[self._turn]
        self._turn = (self._turn + 1) % len(self._ring)
        if slot.last is not None:
            slot.last.synchronize()
        return slot

    def _through(self, slot: _Slot | None, parts: Sequence[Tensor]) -> list[Tensor]:
        """All of these, sent as one copy."""
        if slot is None:
            return []
        starts, n_bytes = _offsets(parts)
        if slot.buffer is None or len(slot.buffer) < n_bytes:
            slot.buffer = self._copies.buffer(n_bytes)
        for part, start in zip(parts, starts, strict=True):
            _as(part, slot.buffer, start).copy_(part)
        sent = self._copies.send(slot.buffer[:n_bytes])
        return [_as(part, sent, start) for part, start in zip(parts, starts, strict=True)]


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


def _offsets(parts: Sequence[Tensor]) -> tuple[list[int], int]:
    """The start of each in one buffer, and the buffer's bytes."""
    starts, at = [], 0
    for part in parts:
        starts.append(at)
        at += -(-part.nbytes // ALIGN) * ALIGN
    return starts, at


def _as(part: Tensor, buffer: Tensor, start: int) -> Tensor:
    """The bytes from `start` on as a tensor like `part`."""
    return buffer[start : start + part.nbytes].view(part.dtype).view(part.shape)
