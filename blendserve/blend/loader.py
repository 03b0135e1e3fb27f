"""Stored layers, read and checked ahead of who needs them, and put in their places.

    this thread      place 0 | compute 0     | place 1 | compute 1     | ...
    loader thread    read 0  | read 1        | read 2     | read 3     | ...

Reading is what waits for a disk: the first touch of a mapped page, under the checksum, without the GIL. Rotating and
placing stay with the thread that computes, as they use the same cores (CacheBlend, arXiv 2405.16444, section 5, overlaps
the same two for a GPU).

For a reader on a GPU the loader thread also sends each layer there (kernels/cuda/staging.py): one layer
is copied while the next is read.

Coded KV takes longer to decode than a pass of few rows to compute, and both want the same cores. While layers are
waited for, who computes leaves a core to each thread that decodes (kernels/team.py): with a team on all of them every
small loop waits for the thread whose core is taken. Where layers are there in time, it takes them all.

Of a chunk that is still coming from another machine the loader thread waits for a layer, and so does who places it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from blendserve.blend.layout import Placement
from blendserve.kernels import team
from blendserve.kernels.cuda.staging import CopyStream, InPlace, Layer, Sent, Staging, copy_stream_to
from blendserve.kernels.ops import place
from blendserve.kernels.types import Ropes
from blendserve.models.adapter import Adapter
from blendserve.models.kv_cache import KVCache
from blendserve.store.base import ChunkView
from blendserve.timing import Clock


class LayerReader:
    """Reads layers 0, 1, 2, ... of some chunks; close it before what the views belong to is."""

    def __init__(self, views: Sequence[ChunkView], n_layers: int, stream: CopyStream | None = None) -> None:
        """stream: the way to the device where layers are wanted; None = they are wanted where the store has them."""
        self._views, self._n_layers = views, n_layers
        self._way = Staging(stream) if stream else InPlace()
        beside = None if stream else team.alone  # who computes needs the cores
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
        """Layer l, as soon as it is there; the next ones are started on. Raises CorruptRecord, LeftBehind, StoreError."""
        if not self._views:
            return []
        self._start(l)
        due = self._ahead.pop(l)
        in_time = due.done() and self.is_ahead
        team.leave(0 if in_time else self._decoding)
        sent = due.result()
        for after in range(l + 1, l + 1 + self._way.ahead):
            self._start(after)
        return self._way.hand_over(sent)

    @property
    def is_ahead(self) -> bool:
        """Whether every layer that was started is read."""
        return all(sent.done() for sent in self._ahead.values())

    @property
    def seconds(self) -> float:
        """Spent reading so far, whether anybody waited for it or not."""
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
    """Threads that decode chunks side by side, one core left to who computes; 0 where nothing is coded."""
    if all(view.n_bytes >= view.raw_bytes for view in views):
        return 0
    return max(1, min(torch.get_num_threads() - 1, len(views)))


class KVLoader:
    """Places stored KV into a request's cache, layer by layer, each layer once; its time is the clock's "load".

    Close it before the snapshot that the placements come from ends: another thread reads ahead.
    """

    def __init__(
        self,
        adapter: Adapter,
        cache: KVCache,
        placements: Sequence[Placement],
        ropes: Ropes,
        clock: Clock | None = None,
    ) -> None:
        self._adapter, self._cache, self._placements, self._ropes = adapter, cache, placements, ropes
        self._clock = clock or Clock(adapter.device)
        views = {
            id(placement.view): placement.view for placement in placements
        }  # several runs may be of one chunk
        self._nth = {view: n for n, view in enumerate(views)}
        self._reader = LayerReader([*views.values()], adapter.n_layers, copy_stream_to(adapter.device))
        self._placed = [False] * adapter.n_layers
        self.bytes_loaded = 0

    def place(self, l: int) -> None:
        """Read, check, rotate and place layer l. Raises CorruptRecord, LeftBehind."""
        if not self._placed[l]:
            with self._clock.stage("load"):
                layer = self._reader.take(l)
                chunks = [(p.span.start, *self._run(layer, p)) for p in self._placements]
                cache = self._cache.keys[l], self._cache.values[l]
                place(chunks, *cache, self._ropes[l], self._adapter.rotary)
                self.bytes_loaded += sum(2 * keys.numel() * keys.element_size() for keys, _ in layer)
            self._placed[l] = True

    def _run(self, layer: Layer, placement: Placement) -> tuple[Tensor, Tensor]:
        """Keys and values [K, n, D] of the tokens that are placed."""
        keys, values = layer[self._nth[id(placement.view)]]
        tokens = slice(placement.at, placement.at + len(placement.span))
        return keys[:, tokens], values[:, tokens]

    @property
    def seconds_reading(self) -> float:
        """What the store took for it, most of it while this thread did something else."""
        return self._reader.seconds

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.close()
