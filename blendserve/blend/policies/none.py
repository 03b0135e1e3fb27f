"""Full reuse (PromptCache-like): the lower baseline."""

from __future__ import annotations

from torch import Tensor

from blendserve.blend.layout import Layout
from blendserve.blend.policies.base import Policy, Scene, nowhere


class NonePolicy(Policy):
    """Recomputes nothing."""

    has_ratio = False

    def n_chosen(self, layout: Layout) -> int:
        return 0

    def choose(self, layout: Layout, scene: Scene) -> Tensor:
        return nowhere()
