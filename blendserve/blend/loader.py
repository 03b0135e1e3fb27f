"""Stored layers, placed into a request's cache: re-rotation of keys to where their chunk stands.

A reader thread reads ahead (fetch/layers.py). Rotating and placing stay on the computing thread, as they use the
same cores. Layers of a chunk in transit are waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from blendserve.blend.layout import Segment
from blendserve.fetch.copy_stream import copy_stream_to
from blendserve.fetch.layers import Layer, LayerReader
from blendserve.kernels.ops import place
from blendserve.kernels.types import Ropes
from blendserve.models.kv_cache import KVCache
from blendserve.models.kv_model import KVModel
from blendserve.timing import Clock


class KVLoader:
    """Places stored KV into a request's cache, layer by layer, each layer once; its time is the clock's "load".

    Close it before the snapshot that the segments come from ends: another thread reads ahead.
    """

    def __init__(
        self,
        model: KVModel,
        cache: KVCache,
        segments: Sequence[Segment],
        ropes: Ropes,
        clock: Clock | None = None,
    ) -> None:
        """ropes: of all positions of the prompt, for each layer."""
        self.model = model
        self.cache = cache
        self.ropes = ropes
        self._segments = segments
        self._clock = clock or Clock(model.device)
        # Several runs may be of one chunk. The prefix is in memory, so it is not counted as loaded.
        views = {id(segment.view): segment.view for segment in segments if segment.view}
        of_chunks = {id(segment.view) for segment in segments if segment.chunk is not None}
        self._is_counted = [view in of_chunks for view in views]
        self._nth = {view: n for n, view in enumerate(views)}
        self._reader = LayerReader([*views.values()], model.n_kv_layers, copy_stream_to(model.device))
        self._placed = [False] * model.n_kv_layers
        self.bytes_loaded = 0

    def place(self, l: int) -> None:
        """Read, check, rotate and place layer l. Raises CorruptRecord, ChunkLost."""
        if not self._placed[l]:
            with self._clock.stage("load"):
                layer = self._reader.take(l)
                chunks = [(s.span.start, *self._tokens(layer, s)) for s in self._segments if not s.is_placed]
                cache = self.cache.keys[l], self.cache.values[l]
                place(chunks, *cache, self.ropes[l], self.model.rotary)
                for s in self._segments:
                    if s.is_placed:
                        self.cache.write(l, slice(s.span.start, s.span.stop), *self._tokens(layer, s))
                self._count(layer)
            self._placed[l] = True

    def state_maps(self, l: int) -> dict[int, tuple[Tensor, Tensor]]:
        """The state maps of recurrent layer l, by where their tokens start. Once for each layer; raises as `place`."""
        with self._clock.stage("load"):
            layer = self._reader.take(l)
            self._count(layer)
        return {s.span.start: layer[self._nth[id(s.view)]] for s in self._segments}

    def _count(self, layer: Layer) -> None:
        for pair, is_counted in zip(layer, self._is_counted, strict=True):
            self.bytes_loaded += is_counted * sum(x.numel() * x.element_size() for x in pair)

    def _tokens(self, layer: Layer, segment: Segment) -> tuple[Tensor, Tensor]:
        """Keys and values [K, n, D] of a segment's tokens."""
        keys, values = layer[self._nth[id(segment.view)]]
        tokens = slice(segment.offset, segment.offset + len(segment.span))
        return keys[:, tokens], values[:, tokens]

    @property
    def read_s(self) -> float:
        """Reading time of the reader thread, most of it in parallel with this thread."""
        return self._reader.seconds

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.close()
