"""Stored layers, read and checked one ahead of who needs them.

    this thread      place 0 | compute 0     | place 1 | compute 1     | ...
    loader thread    read 0  | read 1        | read 2                  | ...

Reading is what waits for a disk: the first touch of a mapped page, under the checksum, without the GIL. Rotating and
placing stay with the thread that computes, as they use the same cores (CacheBlend, arXiv 2405.16444, section 5, overlaps
the same two for a GPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from blendserve.store.base import ChunkView
from blendserve.timing import Clock

Layer = list[tuple[Tensor, Tensor]]  # keys before RoPE and values [K, C, D] of each chunk


class LayerReader:
    """Reads layers 0, 1, 2, ... of some chunks; close it before what the views belong to is."""

    def __init__(self, views: Sequence[ChunkView], n_layers: int) -> None:
        self._views, self._n_layers = views, n_layers
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="blendserve-load")
        self._ahead: tuple[int, Future[Layer]] | None = None
        self._clock = Clock()
        self._start(0)

    def take(self, l: int) -> Layer:
        """Layer l, as soon as it is there; the next one is started on. Raises CorruptRecord, StoreError."""
        ahead, self._ahead = self._ahead, None
        layer = ahead[1].result() if ahead and ahead[0] == l else self._read(l)
        self._start(l + 1)
        return layer

    @property
    def seconds(self) -> float:
        """Spent reading so far, whether anybody waited for it or not."""
        return self._clock.seconds["read"]

    def close(self) -> None:
        """Wait for what is being read; idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self, l: int) -> None:
        if l < self._n_layers and self._views:
            self._ahead = l, self._pool.submit(self._read, l)

    def _read(self, l: int) -> Layer:
        with self._clock.stage("read"):
            return [view.layer(l) for view in self._views]
