"""Recompute everything that is not exact: equals full prefill."""

from __future__ import annotations

from torch import Tensor

from blendserve.blend.layout import Layout
from blendserve.blend.policies.base import Policy, Scene, candidates


class AllPolicy(Policy):
    """Recomputes every reusable token."""

    has_ratio = False

    def n_chosen(self, layout: Layout) -> int:
        return int(layout.reusable.sum())

    def choose(self, layout: Layout, scene: Scene) -> Tensor:
        return candidates(layout)
