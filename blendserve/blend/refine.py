"""Refining: more of a blended prompt is recomputed between the first and the second token of its answer.

    first token     from the blending prefill at `blend.ratio`
    other tokens    over the same cache, in which the tokens of `blend.refine` and the suffix ran again

The time to the first token stays that of `blend.ratio`; the gap before the second one is longer by this pass. Its rows
are those with the largest scores of the prefill's own scoring pass, those of the prefill among them: they draw most
attention, and were computed over stale KV. They attend to what the prefill left, corrected KV included, and overwrite
their own; no correction is fitted again. With all tokens this equals full prefill, if no chunk was missing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blendserve.blend.prefill import PassResult, PrefillPlan
from blendserve.core import Steps, TokenIds
from blendserve.kernels.ops import attend
from blendserve.kernels.rows import Rows, plan_layers
from blendserve.kernels.types import Rope
from blendserve.models.forward import LayerPass, run_layers
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel, Projected


def rows_to_refine(plan: PrefillPlan, result: PassResult) -> Tensor:
    """Positions that `refine` runs, ascending; none if the prefill recomputed as many, or had no scores."""
    layout = plan.layout
    policy = plan.policy.for_refining
    if policy is None or result.scores is None or policy.selection(layout).n <= len(result.recomputed):
        return torch.empty(0, dtype=torch.long)
    selected = policy.select(layout, result.scores)
    return torch.cat([selected, torch.arange(layout.n_tokens - layout.n_suffix, layout.n_tokens)])


@torch.inference_mode()
def refine(model: DecoderModel, ids: TokenIds, rows: Tensor, cache: KVCache) -> Steps[None]:
    """Run rows [S] of a prompt again over the cache that its prefill left, and overwrite their KV."""
    layers = _RefinePass(model, cache, Rows.on(model.device, rows), len(ids))
    yield from run_layers(model, model.embed(torch.tensor(ids, device=model.device)[rows]), layers)


class _RefinePass(LayerPass):
    """Rows over a cache that holds the whole prompt, up to the last layer that keeps KV, whose output is not read."""

    def __init__(self, model: DecoderModel, cache: KVCache, rows: Rows, n_tokens: int) -> None:
        self._cache = cache
        self._rows = rows
        self._n_tokens = n_tokens
        self._model = model
        self._ropes = model.rope(rows.device)
        self._plans = plan_layers(rows, model.attention_forms)

    def rope(self, l: int) -> Rope:
        return self._ropes[l]

    def write(self, l: int, fresh: Projected, keys: Tensor) -> None:
        self._cache.write(l, self._rows.device, keys, fresh.v)

    def attend(self, l: int, q: Tensor) -> Tensor | None:
        if l == self._model.n_kv_layers - 1:
            return None
        keys, values = (side[l][:, : self._n_tokens] for side in (self._cache.keys, self._cache.values))
        return attend(q, *self._model.attended_kv(l, keys, values), self._model.specs[l], self._plans[l])
