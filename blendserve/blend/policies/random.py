"""A seeded random set: the control that every other policy has to beat."""

from __future__ import annotations

import torch
from torch import Tensor

from blendserve.blend.layout import Layout
from blendserve.blend.policies.base import BlendPass, Policy, candidates


class RandomPolicy(Policy):
    """Reads `seed`."""

    def select(self, layout: Layout, blend_pass: BlendPass) -> Tensor:
        found = candidates(layout)
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(self.config.seed))
        return found[order[: self.n_selected(layout)]].sort().values
