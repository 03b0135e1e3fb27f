"""The scoring pass: the suffix runs alone over the stored KV, and scores each token by what the suffix takes from it.

    score = attention x norm of the token's value, mean over heads, norm over suffix rows, summed over layers

InfoFlow KV (arXiv 2603.05353, section 4) with true positions. It takes attention alone, over late layers; values
tell how much of it arrives (as in arXiv 2406.12335), and all layers were better than late ones (research/decisions.md).

Every layer's stored KV is placed on the way, so the blending pass finds it in the cache. Tokens without KV (missing
chunks) are hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blendserve.blend.layout import Layout
from blendserve.blend.loader import KVLoader
from blendserve.core import Steps
from blendserve.kernels.ops import attend_with_scores
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.types import Rope
from blendserve.models.forward import run_layers
from blendserve.models.model import Projected


def suffix_scores(ids: Tensor, layout: Layout, loader: KVLoader) -> Steps[Tensor]:
    """ids [T]: of the prompt -> a score for each reusable position [T] on the host, NaN for all others."""
    layers = _SuffixPass(layout, loader)
    yield from run_layers(loader.model, loader.model.embed(ids[layers.suffix]), layers)
    return layers.scores.cpu().masked_fill(~layout.reusable, torch.nan)


class _SuffixPass:
    """Suffix rows over the stored KV."""

    def __init__(self, layout: Layout, loader: KVLoader) -> None:
        self._loader, self._cache, model = loader, loader.cache, loader.model
        self._specs, self._n = model.specs, layout.n_tokens
        n, start = layout.n_tokens, layout.n_tokens - layout.n_suffix
        self.suffix = slice(start, n)
        at = torch.arange(start, n)
        absent = layout.fresh & (torch.arange(n) < start)
        self._absent = absent.nonzero()[:, 0].to(model.device)
        self._plans = {
            window: plan_rows(at.to(model.device), model.group, window, at, absent)
            for window in model.windows
        }
        self.scores = torch.zeros(n, device=model.device)

    def rope(self, l: int) -> Rope:
        return self._loader.ropes[l].at(self.suffix)

    def write(self, l: int, fresh: Projected, keys: Tensor) -> None:
        self._loader.place(l)
        # Memory may hold NaN where nothing is stored, and a weight of 0 does not hide that.
        self._cache.values[l][:, self._absent] = 0
        self._cache.write(l, self.suffix, keys, fresh.v)

    def attend(self, l: int, q: Tensor) -> Tensor | None:
        spec, keys, values = self._specs[l], self._cache.keys[l], self._cache.values[l]
        n, plan = self._n, self._plans[spec.window]
        attended, scores = attend_with_scores(q, keys[:, :n], values[:, :n], spec, plan)
        self.scores += scores
        return attended if l + 1 < len(self._specs) else None
