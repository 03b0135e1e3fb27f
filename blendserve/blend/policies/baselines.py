"""Policies that look at no KV: the bounds, and what every other policy has to beat."""

from __future__ import annotations

import torch
from torch import Tensor

from blendserve.blend.layout import Layout
from blendserve.blend.policies.base import BlendPass, Policy, candidates, no_positions, top


class NonePolicy(Policy):
    """Recomputes nothing: full reuse, as in PromptCache (arXiv 2311.04934)."""

    has_ratio = False

    def n_selected(self, layout: Layout) -> int:
        return 0

    def select(self, blend_pass: BlendPass) -> Tensor:
        return no_positions()


class AllPolicy(Policy):
    """Recomputes every reusable token: equals full prefill."""

    has_ratio = False

    def n_selected(self, layout: Layout) -> int:
        return layout.n_reusable

    def select(self, blend_pass: BlendPass) -> Tensor:
        return candidates(blend_pass.layout)


class RandomPolicy(Policy):
    """A random set, by `seed`."""

    def select(self, blend_pass: BlendPass) -> Tensor:
        found = candidates(blend_pass.layout)
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(self.config.seed))
        return found[order[: self.n_selected(blend_pass.layout)]].sort().values


class ChunkHeadPolicy(Policy):
    """The first tokens of each chunk, where attention sinks form (EPIC's LegoLink, arXiv 2410.15332, section 4)."""

    def select(self, blend_pass: BlendPass) -> Tensor:
        layout = blend_pass.layout
        nearness = torch.full((layout.n_tokens,), float("-inf"))
        for span in layout.reusable_spans:
            nearness[span.start : span.stop] = -torch.arange(len(span), dtype=nearness.dtype)
        return top(nearness, self.n_selected(layout))
