"""Full reuse (PromptCache-like): the lower baseline."""

from __future__ import annotations

from torch import Tensor

from blendserve.blend.layout import Layout
from blendserve.blend.policies.base import BlendPass, Policy, nowhere


class NonePolicy(Policy):
    """Recomputes nothing."""

    has_ratio = False

    def n_selected(self, layout: Layout) -> int:
        return 0

    def select(self, layout: Layout, blend_pass: BlendPass) -> Tensor:
        return nowhere()
