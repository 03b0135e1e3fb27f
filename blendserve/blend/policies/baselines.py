"""Policies that look at no KV: the bounds, and baselines for other policies."""

from __future__ import annotations

import torch
from torch import Tensor

from blendserve.blend.layout import Layout, State
from blendserve.blend.policies.base import Policy


class NonePolicy(Policy):
    """Recomputes nothing: full reuse, as in PromptCache (arXiv 2311.04934)."""

    has_ratio = False

    def n_selected(self, layout: Layout) -> int:
        return 0


class AllPolicy(Policy):
    """Recomputes every reusable token: equals full prefill."""

    has_ratio = False

    def n_selected(self, layout: Layout) -> int:
        return layout.n_reusable


class RandomPolicy(Policy):
    """A random set: the same one in prompts with as many reusable tokens."""

    def rank(self, layout: Layout, scores: Tensor | None) -> Tensor:
        positions = layout.reusable.nonzero()[:, 0]
        order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(0))
        ranks = torch.zeros(layout.n_tokens, dtype=torch.long)
        ranks[positions[order]] = -torch.arange(len(positions))
        return ranks


class ChunkHeadPolicy(Policy):
    """The first tokens of each chunk, where attention sinks form (EPIC's LegoLink, arXiv 2410.15332, section 4)."""

    def rank(self, layout: Layout, scores: Tensor | None) -> Tensor:
        ranks = torch.zeros(layout.n_tokens, dtype=torch.long)
        for span in layout.spans(State.REUSED):
            ranks[span.start : span.stop] = -torch.arange(len(span))
        return ranks
