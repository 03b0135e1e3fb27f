"""What the question takes from each token: attention times the norm of the token's value, mean over heads, norm over
suffix rows, summed over layers.

InfoFlow KV (arXiv 2603.05353, section 4) with true positions. It takes attention alone, over late layers; values
tell how much of it arrives (as in arXiv 2406.12335), and all layers were better than late ones (docs/research/log.md).

The suffix alone runs over the reused KV: S = suffix rows through all layers; every layer's stored KV is placed on the
way, so that the blending pass finds it there. Tokens without KV (missing chunks) are hidden from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blendserve.blend.layout import Layout
from blendserve.blend.policies.base import Policy, Scene, candidates, nowhere, top
from blendserve.kernels.ops import attend_with_scores
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.types import Rope
from blendserve.models.adapter import Projected
from blendserve.models.forward import run_layers


class QueryPolicy(Policy):
    """Scores by a pass of the suffix."""

    has_scoring_pass = True

    def choose(self, layout: Layout, scene: Scene) -> Tensor:
        n = self.n_chosen(layout)
        if n == 0:
            return nowhere()
        if n == int(layout.reusable.sum()):
            return candidates(layout)
        scores = suffix_scores(scene)
        scene.scores = scores.masked_fill(~layout.reusable, torch.nan)
        return top(scores.masked_fill(~layout.reusable, float("-inf")), n)


def suffix_scores(scene: Scene) -> Tensor:
    """One pass of the suffix rows -> a score per position [T]."""
    adapter, layout = scene.adapter, scene.layout
    suffix = scene.ids[layout.n_tokens - layout.n_suffix :]
    scene.row_layers += len(suffix) * adapter.n_layers
    watching = _Watching(scene)
    run_layers(adapter, adapter.embed(suffix), watching, scene.before_layer)
    return watching.scores.cpu()


class _Watching:
    """The suffix over what is stored, and what it looks at."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self._specs = scene, scene.adapter.specs
        n, start = scene.layout.n_tokens, scene.layout.n_tokens - scene.layout.n_suffix
        self._n, self._suffix, device = n, slice(start, n), scene.adapter.device
        at = torch.arange(start, n)
        absent = scene.layout.fresh & (torch.arange(n) < start)
        self._absent = absent.nonzero()[:, 0].to(device)
        self._plans = {
            window: plan_rows(at.to(device), scene.adapter.group, window, at, absent)
            for window in scene.adapter.windows
        }
        self.scores = torch.zeros(n, device=device)

    def rope(self, l: int) -> Rope:
        return self._scene.ropes[l].at(self._suffix)

    def write(self, l: int, fresh: Projected, keys: Tensor) -> None:
        scene = self._scene
        scene.loader.place(l)
        # Memory may hold NaN where nothing is stored, and a weight of 0 does not hide that.
        scene.cache.values[l][:, self._absent] = 0
        scene.cache.write(l, self._suffix, keys, fresh.v)

    def attend(self, l: int, q: Tensor) -> Tensor | None:
        spec, cache, n = self._specs[l], self._scene.cache, self._n
        keys, values = cache.keys[l, :, :n], cache.values[l, :, :n]
        attended, scores = attend_with_scores(q, keys, values, spec, self._plans[spec.window])
        self.scores += scores
        return attended if l + 1 < len(self._specs) else None
