"""Stored chunks put in their places in the prompt.

    [ prefix | chunk 0 | chunk 1 | chunk 2 (missing) | ... | suffix ]
      exact    exact     reusable  fresh               ...   fresh

exact     the KV computed behind this very prefix, at this very position: nothing to recompute
reusable  the KV computed elsewhere: rotated to its place; a policy chooses which of its tokens to recompute
fresh     no KV to start from: computed in this request

A chunk that is not stored may be there in pieces of others (near.py): runs of its tokens are reusable then, others fresh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blendserve.core import Prompt, Span
from blendserve.store.key import ChunkKey
from blendserve.store.view import ChunkView


@dataclass(frozen=True, slots=True)
class Placement:
    """A stored chunk, or a run of its tokens, and where it goes."""

    span: Span
    view: ChunkView
    at: int = 0  # where the run starts in the stored chunk


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens that a chunk has in common with a stored one."""

    span: Span  # in the chunk
    view: ChunkView
    at: int  # where they start in the stored one
    donor: ChunkKey


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


NOWHERE: Mapping[int, Sequence[Run]] = {}


def lay_out(
    prompt: Prompt,
    prefix: ChunkView | None,
    chunks: Sequence[ChunkView | None],
    *,
    behind_prefix: bool,
    near: Mapping[int, Sequence[Run]] = NOWHERE,
) -> Layout:
    """Sort the prompt's tokens by what was found in the store.

    `behind_prefix`: whether chunk KV was computed behind this prompt's prefix, which makes the first chunk exact, and of
    one that is there in runs the first run, if it starts both chunks: all that it has read is the same.
    near: runs of the chunks, by number, that are not there themselves.
    """
    n = len(prompt)
    exact, reusable = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    placements, spans, first = [], [], None
    if prefix is not None and prompt.prefix:
        placements.append(Placement(Span(0, len(prompt.prefix)), prefix))
        exact[: len(prompt.prefix)] = True
    for i, (chunk, view) in enumerate(zip(prompt.spans, chunks, strict=True)):
        for piece in [Placement(chunk, view)] if view is not None else _placed(near.get(i, ()), chunk):
            span = piece.span
            if not len(span):
                continue
            placements.append(piece)
            if behind_prefix and span.start == len(prompt.prefix) and not piece.at:
                first = span
                exact[span.start : span.stop] = True
            else:
                spans.append(span)
                reusable[span.start : span.stop] = True
    return Layout(
        tuple(placements), tuple(spans), exact, reusable, ~(exact | reusable), first, len(prompt.suffix)
    )


def _placed(runs: Sequence[Run], chunk: Span) -> list[Placement]:
    """Runs of a chunk that stands here."""
    spans = [Span(chunk.start + run.span.start, chunk.start + run.span.stop) for run in runs]
    return [Placement(span, run.view, run.at) for span, run in zip(spans, runs, strict=True)]


def preceding_share(span: Span) -> float:
    """The share of what stands before a chunk in all text up to its end: its tokens move the more, the larger it is."""
    return max(1, span.start) / max(1, span.stop)
