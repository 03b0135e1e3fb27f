"""How many of a layout's reused tokens are recomputed, and which ones.

    Policy.shares  -> groups of segments, each with the share of its tokens to recompute
    Selection      -> of each group, the reused tokens with the largest ranks

The cost model, the planner, the prefill, refining and vLLM's jobs read a selection and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from blendserve.blend.layout import Layout, Segment, State

LEAST_RECOMPUTED = 16  # tokens of each reused chunk, unless none is to be recomputed


class Share(NamedTuple):
    """Segments of chunks, and the share of their tokens that is recomputed."""

    segments: tuple[Segment, ...]
    share: float


@dataclass(frozen=True)
class Selection:
    """What a policy recomputes of a layout. No segment is in two shares."""

    layout: Layout
    shares: tuple[Share, ...]

    @cached_property
    def sizes(self) -> list[int]:
        """Number of tokens that are recomputed, of each share."""
        return [self._size(*share) for share in self.shares]

    @property
    def n(self) -> int:
        """Number of tokens that are recomputed."""
        return sum(self.sizes)

    def scaled(self, factor: float) -> Selection:
        """The same with shares that are `factor` times as large, at most 1."""
        shares = (share._replace(share=min(1.0, share.share * factor)) for share in self.shares)
        return replace(self, shares=tuple(shares))

    def best(self, positions: Tensor, ranks: Tensor) -> Tensor:
        """Indices of the positions that are recomputed, ascending, on the host.

        positions [S]: reusable ones, ascending. ranks [S]: the largest of each share are recomputed; of equal ones the
        earlier one.
        """
        chosen = [torch.empty(0, dtype=torch.long)]
        for share, size in zip(self.shares, self.sizes, strict=True):
            index = self.layout.mask(segment.span for segment in share.segments)[positions].nonzero()[:, 0]
            chosen.append(index[top(ranks[index.to(ranks.device)], size).cpu()])
        return torch.cat(chosen).sort().values

    def _size(self, segments: Iterable[Segment], share: float) -> int:
        """A share of the found tokens; exact ones count, but need no recomputation.

        No fewer than LEAST_RECOMPUTED of each reused chunk, unless the share is 0.
        """
        n_found = 0
        reused = Counter[int]()
        is_plain = self.layout.prompt.is_plain
        for segment in segments:
            if segment.state is State.FRESH:
                continue
            n_found += len(segment.span)
            if segment.state is State.REUSED and segment.chunk is not None:
                # Of a plain prompt's text, each stored chunk that was found in it counts.
                chunk = segment.span.start - segment.offset if is_plain else segment.chunk
                reused[chunk] += len(segment.span)
        least = sum(min(LEAST_RECOMPUTED, n) for n in reused.values()) if share else 0
        return min(max(round(share * n_found), least), reused.total())


def top(scores: Tensor, n: int) -> Tensor:
    """Indices of the n largest scores, ascending; of equal scores the earlier one."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:n].sort().values
