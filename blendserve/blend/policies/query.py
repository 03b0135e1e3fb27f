"""What the question takes from each token: attention times the norm of the token's value, mean over heads, norm over
suffix rows, summed over layers.

InfoFlow KV (arXiv 2603.05353, section 4) with true positions. It takes attention alone, over late layers; values
tell how much of it arrives (as in arXiv 2406.12335), and all layers were better than late ones (research/decisions.md).

The suffix alone runs over the reused KV: S = suffix rows through all layers; every layer's stored KV is placed on the
way, so that the blending pass finds it there. Tokens without KV (missing chunks) are hidden from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blendserve.blend.policies.base import BlendPass, Policy, candidates, no_positions, top
from blendserve.core import Steps
from blendserve.kernels.ops import attend_with_scores
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.types import Rope
from blendserve.models.forward import run_layers
from blendserve.models.model import Projected


class QueryPolicy(Policy):
    """Scores by a pass of the suffix."""

    needs_scoring_pass = True

    def score(self, blend_pass: BlendPass) -> Steps[None]:
        layout = blend_pass.layout
        if 0 < self.n_selected(layout) < layout.n_reusable:
            scores = yield from suffix_scores(blend_pass)
            blend_pass.scores = scores.masked_fill(~layout.reusable, torch.nan)

    def select(self, blend_pass: BlendPass) -> Tensor:
        layout = blend_pass.layout
        n = self.n_selected(layout)
        if blend_pass.scores is None:
            return candidates(layout) if n else no_positions()
        return top(blend_pass.scores.masked_fill(~layout.reusable, float("-inf")), n)


def suffix_scores(blend_pass: BlendPass) -> Steps[Tensor]:
    """One pass of the suffix rows -> a score per position [T]."""
    adapter, layout = blend_pass.adapter, blend_pass.layout
    suffix = blend_pass.ids[layout.n_tokens - layout.n_suffix :]
    blend_pass.row_layers += len(suffix) * adapter.n_layers
    watching = _Watching(blend_pass)
    yield from run_layers(adapter, adapter.embed(suffix), watching)
    return watching.scores.cpu()


class _Watching:
    """The suffix over what is stored, and what it looks at."""

    def __init__(self, blend_pass: BlendPass) -> None:
        self._pass, self._specs = blend_pass, blend_pass.adapter.specs
        n, start = blend_pass.layout.n_tokens, blend_pass.layout.n_tokens - blend_pass.layout.n_suffix
        self._n, self._suffix, device = n, slice(start, n), blend_pass.adapter.device
        at = torch.arange(start, n)
        absent = blend_pass.layout.fresh & (torch.arange(n) < start)
        self._absent = absent.nonzero()[:, 0].to(device)
        self._plans = {
            window: plan_rows(at.to(device), blend_pass.adapter.group, window, at, absent)
            for window in blend_pass.adapter.windows
        }
        self.scores = torch.zeros(n, device=device)

    def rope(self, l: int) -> Rope:
        return self._pass.ropes[l].at(self._suffix)

    def write(self, l: int, fresh: Projected, keys: Tensor) -> None:
        blend_pass = self._pass
        blend_pass.loader.place(l)
        # Memory may hold NaN where nothing is stored, and a weight of 0 does not hide that.
        blend_pass.cache.values[l][:, self._absent] = 0
        blend_pass.cache.write(l, self._suffix, keys, fresh.v)

    def attend(self, l: int, q: Tensor) -> Tensor | None:
        spec, cache, n = self._specs[l], self._pass.cache, self._n
        keys, values = cache.keys[l, :, :n], cache.values[l, :, :n]
        attended, scores = attend_with_scores(q, keys, values, spec, self._plans[spec.window])
        self.scores += scores
        return attended if l + 1 < len(self._specs) else None
