"""The first k tokens of each chunk, where attention sinks form (EPIC's LegoLink, arXiv 2410.15332, section 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from blendserve.blend.layout import Layout
from blendserve.blend.policies.base import BlendPass, Policy, top


class ChunkHeadPolicy(Policy):
    """Tokens by their distance from their chunk's start, the nearest first."""

    def select(self, layout: Layout, blend_pass: BlendPass) -> Tensor:
        nearness = torch.full((layout.n_tokens,), float("-inf"))
        for span in layout.reusable_spans:
            nearness[span.start : span.stop] = -torch.arange(len(span), dtype=nearness.dtype)
        return top(nearness, self.n_selected(layout))
