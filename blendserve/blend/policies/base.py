"""Which tokens of the reused chunks are recomputed. Each policy is a formula to check against its paper.

A policy is asked twice: `enter` gives the reusable positions whose rows enter layer 0; `narrow`, at each layer, may drop
some of them again. What every policy must recompute anyway (suffix, missing chunks) is not its business.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from blendserve.blend.assemble import Layout
from blendserve.config import BlendConfig

Scores = Callable[[], Tensor]  # a pass that gives one score a position, [T]


def budget(layout: Layout, ratio: float) -> int:
    """Tokens to recompute: a share of the found context tokens; exact ones count, but need no recomputation."""
    return min(round(ratio * layout.n_found), int(layout.reusable.sum()))


def top(scores: Tensor, n: int) -> Tensor:
    """Indices of the n largest scores, ascending; of equal scores the earlier one."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:n].sort().values


class Policy(ABC):
    """Chooses positions; see the table of POLICIES."""

    name: ClassVar[str]

    def __init__(self, config: BlendConfig) -> None:
        self.config = config

    def enter(self, layout: Layout, query_scores: Scores) -> Tensor:
        """Reusable positions that enter layer 0, ascending."""
        raise NotImplementedError

    def narrows(self, l: int) -> bool:
        """Whether rows may be dropped at layer l."""
        return False

    def narrow(self, l: int, layout: Layout, fresh: Tensor, cached: Tensor) -> Tensor | None:
        """At such a layer: indices, into the candidate rows, of those that go on; None = all of them.

        fresh, cached: values [K, S, D] of the candidate rows, just computed and from the store.
        """
        return None


class Nothing(Policy):
    """Full reuse (PromptCache-like): the lower baseline."""

    name = "none"

    def enter(self, layout: Layout, query_scores: Scores) -> Tensor:
        return torch.empty(0, dtype=torch.long)


class All(Policy):
    """Recompute everything that is not exact: equals full prefill."""

    name = "all"

    def enter(self, layout: Layout, query_scores: Scores) -> Tensor:
        return layout.reusable.nonzero()[:, 0]


class Random(Policy):
    """A seeded random set: the control that every other policy has to beat."""

    name = "random"

    def enter(self, layout: Layout, query_scores: Scores) -> Tensor:
        candidates = layout.reusable.nonzero()[:, 0]
        generator = torch.Generator().manual_seed(self.config.seed)
        order = torch.randperm(len(candidates), generator=generator)
        return candidates[order[: budget(layout, self.config.share)]].sort().values


class ChunkHead(Policy):
    """The first k tokens of each chunk, where attention sinks form (EPIC's LegoLink, arXiv 2410.15332, section 4)."""

    name = "chunk_head"

    def enter(self, layout: Layout, query_scores: Scores) -> Tensor:
        depth = torch.full((layout.n_tokens,), float("-inf"))  # minus the distance from the chunk's start
        for span in layout.reusable_spans:
            depth[span.start : span.stop] = -torch.arange(len(span), dtype=depth.dtype)
        return top(depth, budget(layout, self.config.share))


class Query(Policy):
    """What the question takes from each token: attention times the norm of the token's value, mean over heads, norm over
    suffix rows, summed over layers.

    InfoFlow KV (arXiv 2603.05353, section 4) with true positions. It takes attention alone, over late layers; values
    tell how much of it arrives (as in arXiv 2406.12335), and all layers were better than late ones (docs/log.md).
    """

    name = "query"

    def enter(self, layout: Layout, query_scores: Scores) -> Tensor:
        n = budget(layout, self.config.share)
        if n == 0:
            return torch.empty(0, dtype=torch.long)
        if n == int(layout.reusable.sum()):
            return layout.reusable.nonzero()[:, 0]
        return top(query_scores().masked_fill(~layout.reusable, float("-inf")), n)


class Deviation(Policy):
    """CacheBlend's rule (arXiv 2405.16444, section 4.3): the largest squared L2 of fresh V - cached V at a check layer.

    All rows run through the layers below the check layer. Several check layers are the paper's gradual filtering: the
    share kept falls linearly from twice the ratio to the ratio. The released code compares V alone, as here.
    """

    name = "deviation"

    def enter(self, layout: Layout, query_scores: Scores) -> Tensor:
        if budget(layout, self.config.share) == 0:
            return torch.empty(0, dtype=torch.long)
        return layout.reusable.nonzero()[:, 0]

    def narrows(self, l: int) -> bool:
        return l in self.config.check_layers

    def narrow(self, l: int, layout: Layout, fresh: Tensor, cached: Tensor) -> Tensor | None:
        checks = sorted(set(self.config.check_layers))
        left = len(checks) - 1 - checks.index(l)
        share = self.config.share * (1 + left / max(1, len(checks) - 1))
        deviation = (fresh.float() - cached.float()).square().sum(dim=(0, 2))
        return top(deviation, budget(layout, min(1.0, share)))


POLICIES: dict[str, type[Policy]] = {p.name: p for p in (Query, Deviation, ChunkHead, Random, Nothing, All)}
