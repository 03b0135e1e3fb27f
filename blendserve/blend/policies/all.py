"""Recompute everything that is not exact: equals full prefill."""

from __future__ import annotations

from torch import Tensor

from blendserve.blend.layout import Layout
from blendserve.blend.policies.base import BlendPass, Policy, candidates


class AllPolicy(Policy):
    """Recomputes every reusable token."""

    has_ratio = False

    def n_selected(self, layout: Layout) -> int:
        return layout.n_reusable

    def select(self, layout: Layout, blend_pass: BlendPass) -> Tensor:
        return candidates(layout)
