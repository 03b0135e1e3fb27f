"""Stored layers, read and checked one ahead of who needs them.

    this thread      place 0 | compute 0     | place 1 | compute 1     | ...
    loader thread    read 0  | read 1        | read 2                  | ...

Reading is what waits for a disk: the first touch of a mapped page, under the checksum, without the GIL. Rotating and
placing stay with the thread that computes, as they use the same cores (CacheBlend, arXiv 2405.16444, section 5, overlaps
the same two for a GPU).

For a reader on a GPU the loader thread also sends each layer there (gpu/staging.py), and stays two ahead: one layer
is copied while the next is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from blendserve.gpu.staging import InPlace, Lane, Layer, Sent, Staging
from blendserve.store.base import ChunkView
from blendserve.timing import Clock


class LayerReader:
    """Reads layers 0, 1, 2, ... of some chunks; close it before what the views belong to is."""

    def __init__(self, views: Sequence[ChunkView], n_layers: int, lane: Lane | None = None) -> None:
        """lane: the way to the device where layers are wanted; None = they are wanted where the store has them."""
        self._views, self._n_layers = views, n_layers
        self._way = Staging(lane) if lane else InPlace()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="blendserve-load")
        self._ahead: dict[int, Future[Sent]] = {}
        self._clock = Clock()
        self._start(0)

    def take(self, l: int) -> Layer:
        """Layer l, as soon as it is there; the next ones are started on. Raises CorruptRecord, StoreError."""
        if not self._views:
            return []
        self._start(l)
        sent = self._ahead.pop(l).result()
        for after in range(l + 1, l + 1 + self._way.ahead):
            self._start(after)
        return self._way.hand_over(sent)

    @property
    def seconds(self) -> float:
        """Spent reading so far, whether anybody waited for it or not."""
        return self._clock.seconds["read"]

    def close(self) -> None:
        """Wait for what is being read; idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self, l: int) -> None:
        if l < self._n_layers and self._views and l not in self._ahead:
            self._ahead[l] = self._pool.submit(self._read, l)

    def _read(self, l: int) -> Sent:
        with self._clock.stage("read"):
            return self._way.send(lambda: [view.layer(l) for view in self._views])
