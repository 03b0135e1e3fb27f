"""Stored chunks put in their places in the prompt.

    [ prefix | chunk 0 | chunk 1 | chunk 2 (missing) | ... | suffix ]
      exact    exact     reusable  fresh               ...   fresh

exact     the KV computed behind this very prefix, at this very position: nothing to recompute
reusable  the KV computed elsewhere: rotated to its place; a policy chooses which of its tokens to recompute
fresh     no KV to start from: computed in this request
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blendserve.blend.cache import KVCache
from blendserve.blend.load import LayerReader
from blendserve.blend.place import place
from blendserve.core import Prompt, Span
from blendserve.gpu.staging import lane_to
from blendserve.models.adapter import Adapter, Ropes
from blendserve.store.base import ChunkView
from blendserve.timing import Clock


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored chunk and where it goes."""

    span: Span
    view: ChunkView


@dataclass(frozen=True, slots=True)
class Layout:
    """What each token of the prompt starts from. The three masks [T] do not overlap and cover everything."""

    pieces: tuple[Piece, ...]
    reusable_spans: tuple[Span, ...]
    exact: Tensor
    reusable: Tensor
    fresh: Tensor
    first: Span | None  # the first chunk, when it is exact
    n_suffix: int

    @property
    def n_tokens(self) -> int:
        return int(self.exact.shape[0])

    @property
    def n_found(self) -> int:
        """Context tokens that came from the store: what the ratio is a share of."""
        return sum(len(s) for s in self.reusable_spans) + (len(self.first) if self.first else 0)


def lay_out(
    prompt: Prompt, prefix: ChunkView | None, chunks: Sequence[ChunkView | None], *, behind_prefix: bool
) -> Layout:
    """Sort the prompt's tokens by what was found in the store.

    `behind_prefix`: whether chunk KV was computed behind this prompt's prefix, which makes the first chunk exact.
    """
    n = len(prompt)
    exact, reusable = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    pieces, spans, first = [], [], None
    if prefix is not None and prompt.prefix:
        pieces.append(Piece(Span(0, len(prompt.prefix)), prefix))
        exact[: len(prompt.prefix)] = True
    for span, view in zip(prompt.spans, chunks, strict=True):
        if view is None or not len(span):
            continue
        pieces.append(Piece(span, view))
        if behind_prefix and span.start == len(prompt.prefix):
            first = span
            exact[span.start : span.stop] = True
        else:
            spans.append(span)
            reusable[span.start : span.stop] = True
    return Layout(
        tuple(pieces), tuple(spans), exact, reusable, ~(exact | reusable), first, len(prompt.suffix)
    )


class Assembly:
    """Places stored KV into a request's cache, layer by layer, each layer once; its time is the clock's "load".

    Close it before the snapshot that the pieces come from ends: another thread reads ahead.
    """

    def __init__(
        self,
        adapter: Adapter,
        cache: KVCache,
        pieces: Sequence[Piece],
        ropes: Ropes,
        clock: Clock | None = None,
    ) -> None:
        self._adapter, self._cache, self._pieces, self._ropes = adapter, cache, pieces, ropes
        self._clock = clock or Clock(adapter.device)
        self._reader = LayerReader(
            [piece.view for piece in pieces], adapter.n_layers, lane_to(adapter.device)
        )
        self._placed = [False] * adapter.n_layers
        self.bytes_loaded = 0

    def place(self, l: int) -> None:
        """Read, check, rotate and place layer l. Raises CorruptRecord."""
        if not self._placed[l]:
            with self._clock.stage("load"):
                layer, spans = self._reader.take(l), [piece.span for piece in self._pieces]
                place(self._adapter, spans, layer, self._cache.keys[l], self._cache.values[l], self._ropes[l])
                self.bytes_loaded += sum(2 * keys.numel() * keys.element_size() for keys, _ in layer)
            self._placed[l] = True

    @property
    def seconds_reading(self) -> float:
        """What the store took for it, most of it while this thread did something else."""
        return self._reader.seconds

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.close()
