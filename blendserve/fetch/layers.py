"""Reads the layers of chunks ahead of the prefill, decodes them in threads, and sends them to the device.

    prefill thread   place 0 | compute 0     | place 1 | compute 1     | ...
    reader thread    read 0  | read 1        | read 2     | read 3     | ...

Reading waits for a disk: the first touch of a mapped page, under the checksum, without the GIL (CacheBlend, arXiv
2405.16444, section 5, overlaps the same two for a GPU). For a GPU the reader thread also copies each layer to pinned
memory and issues its copy to the device, on a stream beside the computing one, which waits for the copy's event.

Decoding coded KV takes longer than a pass of few rows, and both need the same cores. While the prefill waits for layers,
it leaves a core to each decoding thread (kernels/team.py); where layers are in time, it uses all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from blendserve.fetch.copy_stream import CopyStream, Event, as_one, split_kv
from blendserve.kernels import team
from blendserve.store.view import ChunkView
from blendserve.timing import Clock

Layer = list[tuple[Tensor, Tensor]]  # keys before RoPE and values [K, C, D] of each chunk

# One layer ahead is enough where reading and computing take the same time each layer. They vary. On a device each layer
# ahead takes memory.
HOST_AHEAD, DEVICE_AHEAD = 3, 2


@dataclass(frozen=True, slots=True)
class SentLayer:
    """A layer whose copies to the device were issued, or that stays in host memory."""

    layer: Layer
    memory: Sequence[Tensor] = ()  # on the device: one tensor of each storage that the layer lies in
    event: Event | None = None  # after the copies


class LayerReader:
    """Reads layers 0, 1, 2, ... of some chunks, each once; close it before the views end."""

    def __init__(self, views: Sequence[ChunkView], n_layers: int, stream: CopyStream | None = None) -> None:
        """stream: the way to the device where layers are used; None = they are used where the store has them."""
        self._views = views
        self._n_layers = n_layers
        self._stream = stream
        self._n_ahead = DEVICE_AHEAD if stream else HOST_AHEAD
        self._n_decoding = _decoding_threads(views)
        self._decoders = None
        if self._n_decoding > 1:
            self._decoders = ThreadPoolExecutor(
                self._n_decoding, thread_name_prefix="blendserve-decode", initializer=team.alone
            )
        self._clock = Clock()
        # Two queues in C cost the prefill thread a fraction of a future for each layer.
        self._orders = SimpleQueue[int]()
        self._results = SimpleQueue[tuple[int, SentLayer | BaseException]]()
        self._n_ordered = self._n_taken = 0  # layers
        self._closed = False
        self._thread: threading.Thread | None = None
        if stream or not all(view.in_memory for view in views):
            self._thread = threading.Thread(target=self._loop, name="blendserve-load", daemon=True)
            self._thread.start()
            self._order(0)

    def take(self, l: int) -> Layer:
        """Layer l, as soon as it is read; the next ones are read meanwhile. A layer that is passed over is skipped.

        Raises CorruptRecord, ChunkLost, StoreError.
        """
        if not self._thread:
            return self._layers(l)
        self._order(l)
        team.leave(0 if self.is_ahead else self._n_decoding)
        sent = self._result(l)
        self._order(l + self._n_ahead)
        if self._stream:
            self._stream.wait_on_stream(sent.memory, sent.event)
        return sent.layer

    @property
    def is_ahead(self) -> bool:
        """Whether every layer that was ordered is read."""
        return self._results.qsize() >= self._n_ordered - self._n_taken

    @property
    def seconds(self) -> float:
        """Spent reading so far, whether the prefill waited for it or not."""
        return self._clock.seconds["read"]

    def close(self) -> None:
        """Wait for the layer that is being read; idempotent. By the thread that takes layers."""
        team.leave(0)
        self._closed = True
        if self._thread:
            self._orders.put(self._n_layers)
            self._thread.join()
        self._results = SimpleQueue()  # an error in it refers to the thread's frame, and that to this reader
        if self._decoders:
            self._decoders.shutdown(wait=True)

    def _order(self, upto: int) -> None:
        """Order the layers up to this one."""
        while self._n_ordered <= min(upto, self._n_layers - 1):
            self._orders.put(self._n_ordered)
            self._n_ordered += 1

    def _result(self, l: int) -> SentLayer:
        while True:
            at, result = self._results.get()
            self._n_taken += 1
            if at < l:
                continue
            if isinstance(result, SentLayer):
                return result
            try:
                raise result
            finally:
                del result  # an error refers to this frame, and the frame would refer to the error

    def _loop(self) -> None:
        if not self._stream:
            team.alone()  # the prefill needs the cores
        while (l := self._orders.get()) < self._n_layers and not self._closed:
            try:
                with self._clock.stage("read"):
                    self._results.put((l, self._send(l)))
            except BaseException as error:  # raised where the layer is taken
                self._results.put((l, error))

    def _send(self, l: int) -> SentLayer:
        """Read a layer; issue its copies. What the views do on the device is on the stream of copies, too."""
        if not self._stream:
            return SentLayer(self._layers(l))
        with self._stream.entered():
            sent = [[self._stream.send(part) for part in as_one(pair)] for pair in self._layers(l)]
            memory = {part.untyped_storage().data_ptr(): part for unit in sent for part in unit}
            event = self._stream.record_event()
        return SentLayer([split_kv(unit) for unit in sent], [*memory.values()], event)

    def _layers(self, l: int) -> Layer:
        each = self._decoders.map if self._decoders else map
        return list(each(lambda view: view.layer(l), self._views))


def _decoding_threads(views: Sequence[ChunkView]) -> int:
    """Threads that decode chunks in parallel, one core left to the prefill; 0 where nothing is coded."""
    if all(view.n_bytes >= view.raw_bytes for view in views):
        return 0
    return max(1, min(torch.get_num_threads() - 1, len(views)))
