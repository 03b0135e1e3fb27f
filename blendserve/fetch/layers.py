"""Reads the layers of chunks ahead of the prefill, decodes them in threads, and sends them to the device.

    prefill thread   place 0 | compute 0     | place 1 | compute 1     | ...
    reader thread    read 0  | read 1        | read 2     | read 3     | ...

Reading waits for a disk: the first touch of a mapped page, under the checksum, without the GIL (CacheBlend, arXiv
2405.16444, section 5, overlaps the same two for a GPU). For a GPU the reader thread also sends each layer there
(fetch/pinned_ring.py), while it reads the next one.

Decoding coded KV takes longer than a pass of few rows, and both need the same cores. While the prefill waits for layers,
it leaves a core to each decoding thread (kernels/team.py); where layers are in time, it uses all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from blendserve.fetch.copy_stream import CopyStream
from blendserve.fetch.pinned_ring import HostKv, Layer, PinnedRing, Sent
from blendserve.kernels import team
from blendserve.store.view import ChunkView
from blendserve.timing import Clock


class LayerReader:
    """Reads layers 0, 1, 2, ... of some chunks; close it before the views end."""

    def __init__(self, views: Sequence[ChunkView], n_layers: int, stream: CopyStream | None = None) -> None:
        """stream: the way to the device where layers are wanted; None = they are wanted where the store has them."""
        self._views, self._n_layers = views, n_layers
        self._way = PinnedRing(stream) if stream else HostKv()
        beside = None if stream else team.alone  # the prefill needs the cores
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="blendserve-load", initializer=beside)
        self._decoding = _decoding(views)
        self._decoders = None
        if self._decoding > 1:
            self._decoders = ThreadPoolExecutor(
                self._decoding, thread_name_prefix="blendserve-decode", initializer=team.alone
            )
        self._ahead: dict[int, Future[Sent]] = {}
        self._clock = Clock()
        self._start(0)

    def take(self, l: int) -> Layer:
        """Layer l, as soon as it is there; the next ones are started on. Raises CorruptRecord, ChunkLost, StoreError."""
        if not self._views:
            return []
        self._start(l)
        due = self._ahead.pop(l)
        in_time = due.done() and self.is_ahead
        team.leave(0 if in_time else self._decoding)
        sent = due.result()
        for after in range(l + 1, l + 1 + self._way.ahead):
            self._start(after)
        return self._way.wait_on_stream(sent)

    @property
    def is_ahead(self) -> bool:
        """Whether every layer that was started is read."""
        return all(sent.done() for sent in self._ahead.values())

    @property
    def seconds(self) -> float:
        """Spent reading so far, whether the prefill waited for it or not."""
        return self._clock.seconds["read"]

    def close(self) -> None:
        """Wait for what is being read; idempotent. By the thread that takes layers."""
        team.leave(0)
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._decoders:
            self._decoders.shutdown(wait=True)

    def _start(self, l: int) -> None:
        if l < self._n_layers and self._views and l not in self._ahead:
            self._ahead[l] = self._pool.submit(self._read, l)

    def _read(self, l: int) -> Sent:
        with self._clock.stage("read"):
            return self._way.send(lambda: self._layers(l))

    def _layers(self, l: int) -> Layer:
        each = self._decoders.map if self._decoders else map
        return list(each(lambda view: view.layer(l), self._views))


def _decoding(views: Sequence[ChunkView]) -> int:
    """Threads that decode chunks side by side, one core left to the prefill; 0 where nothing is coded."""
    if all(view.n_bytes >= view.raw_bytes for view in views):
        return 0
    return max(1, min(torch.get_num_threads() - 1, len(views)))
