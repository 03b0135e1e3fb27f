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

from blendserve.core import Prompt, Span
from blendserve.store.base import ChunkView


@dataclass(frozen=True, slots=True)
class Placement:
    """A stored chunk and where it goes."""

    span: Span
    view: ChunkView


@dataclass(frozen=True, slots=True)
class Layout:
    """What each token of the prompt starts from. The three masks [T] do not overlap and cover everything."""

    placements: tuple[Placement, ...]
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

    @property
    def n_loaded(self) -> int:
        """Tokens whose KV is read from the store."""
        return sum(len(placement.span) for placement in self.placements)

    def budget(self, ratio: float) -> int:
        """Tokens to recompute: a share of the found context tokens; exact ones count, but need no recomputation."""
        return min(round(ratio * self.n_found), int(self.reusable.sum()))


def lay_out(
    prompt: Prompt, prefix: ChunkView | None, chunks: Sequence[ChunkView | None], *, behind_prefix: bool
) -> Layout:
    """Sort the prompt's tokens by what was found in the store.

    `behind_prefix`: whether chunk KV was computed behind this prompt's prefix, which makes the first chunk exact.
    """
    n = len(prompt)
    exact, reusable = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    placements, spans, first = [], [], None
    if prefix is not None and prompt.prefix:
        placements.append(Placement(Span(0, len(prompt.prefix)), prefix))
        exact[: len(prompt.prefix)] = True
    for span, view in zip(prompt.spans, chunks, strict=True):
        if view is None or not len(span):
            continue
        placements.append(Placement(span, view))
        if behind_prefix and span.start == len(prompt.prefix):
            first = span
            exact[span.start : span.stop] = True
        else:
            spans.append(span)
            reusable[span.start : span.stop] = True
    return Layout(
        tuple(placements), tuple(spans), exact, reusable, ~(exact | reusable), first, len(prompt.suffix)
    )
