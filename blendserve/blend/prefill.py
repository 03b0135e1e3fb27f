"""Blending prefill: stored KV where it may stay, fresh rows where it must not, first-token logits at the end.

    active rows = suffix + tokens without stored KV + tokens that the policy chose

Only active rows run through the layers. At each layer the stored KV is placed, corrected, and overwritten at the active
rows with what they just computed; the rows then attend by position to all of it. With nothing stored this is ordinary
prefill; with everything chosen it equals it.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blendserve.blend.corrections.base import Correction, LayerPriors, make_correction
from blendserve.blend.layout import Layout
from blendserve.blend.loader import KVLoader
from blendserve.blend.policies.base import BlendPass, Policy, make_policy, no_positions
from blendserve.config import BlendConfig
from blendserve.core import Prompt, Steps
from blendserve.kernels.ops import attend
from blendserve.kernels.rows import RowPlan, Rows, plans_by_window
from blendserve.kernels.types import Rope
from blendserve.models.forward import run_layers
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel, Projected
from blendserve.timing import Clock


@dataclass(frozen=True, slots=True)
class PassResult:
    """What decode starts from, and what the report is made of."""

    cache: KVCache
    logits: Tensor  # [V], for the token after the prompt
    recomputed: Tensor = field(default_factory=no_positions)  # selected by the policy, to the last layer
    bytes_loaded: int = 0
    read_s: float = 0.0  # by the reader thread, with its waits for another machine
    cost: float = 1.0  # row-layers / (T * L)
    scores: Tensor | None = None  # [T] on the host, by which the policy selected; NaN where it gave none
    corrected: bool = False  # whether reused KV was changed


@torch.inference_mode()
def blend_prefill(
    adapter: DecoderModel,
    prompt: Prompt,
    layout: Layout,
    blend: BlendConfig,
    new_tokens: int = 0,
    clock: Clock | None = None,
    cache: KVCache | None = None,
    priors: LayerPriors | None = None,
) -> Steps[PassResult]:
    """Run the prompt, reusing what the layout found; leaves room for `new_tokens` in the cache.

    cache: of at least that room; a new one if None. priors: for corrections that use them.
    Raises CorruptRecord when a stored layer fails its checksum, ChunkLost when it does not arrive: lay out again without
    that chunk; ConfigError for settings of the policy that do not fit the model.
    """
    policy = make_policy(blend)
    policy.validate(adapter.n_layers)
    cache, clock = cache or KVCache(adapter, len(prompt) + new_tokens), clock or Clock(adapter.device)
    ids = torch.tensor(prompt.ids, dtype=torch.long, device=adapter.device)
    ropes = adapter.rope(torch.arange(len(prompt), device=adapter.device))
    with closing(KVLoader(adapter, cache, layout.loaded, ropes, clock)) as loader:
        blend_pass = BlendPass(adapter, ids, layout, cache, loader, ropes)
        load_s = clock.seconds["load"]
        with clock.stage("select"):
            yield from policy.score(blend_pass)
            chosen = policy.select(blend_pass)
        clock.seconds["select"] -= clock.seconds["load"] - load_s  # a scoring pass places KV, too
        active = layout.fresh.clone()
        active[chosen] = True
        spans = layout.reusable_spans
        correction = make_correction(blend.correction, adapter, cache, ropes, spans, priors)
        layers = _ActiveRows(blend_pass, policy, correction, active.nonzero()[:, 0], clock)
        hidden = yield from run_layers(adapter, adapter.embed(ids[layers.rows.device]), layers)
        return layers.result(adapter.logits(hidden[-1:])[0])


class _ActiveRows:
    """One request's rows on their way through the layers."""

    def __init__(
        self,
        blend_pass: BlendPass,
        policy: Policy,
        correction: Correction | None,
        active: Tensor,
        clock: Clock,
    ) -> None:
        """active: positions [S], ascending."""
        self._pass, self._policy, self._correction, self._clock = blend_pass, policy, correction, clock
        self._is_corrected = False  # in any layer
        self.rows = Rows.on(blend_pass.adapter.device, active)  # the rows that go on
        self._plans = self._plan(self.rows)

    def rope(self, l: int) -> Rope:
        return self._pass.ropes[l].at(self.rows.device)

    def write(self, l: int, fresh: Projected, keys: Tensor) -> Tensor | slice | None:
        blend_pass, rows = self._pass, self.rows
        blend_pass.row_layers += len(rows)
        blend_pass.loader.place(l)
        with self._clock.stage("select"):
            kept = self._filter(l, keys, fresh.v) if l in self._policy.check_layers else None
        if kept is None and self._correction:  # rows that are about to be dropped are no sample to learn from
            with self._clock.stage("correct"):
                self._is_corrected |= self._correction.apply(l, rows, keys, fresh.v)
        blend_pass.cache.write(l, rows.device, keys, fresh.v)
        # The last layer finishes the last row alone, which is never dropped.
        is_last = l == blend_pass.adapter.n_layers - 1
        left: Tensor | slice | None = slice(-1, None) if is_last else None
        if kept is not None:
            index = kept.to(rows.device.device)
            self.rows = Rows(rows.host[kept], rows.device[index])
            left = index if left is None else left
        if left is not None:
            self._plans = self._plan(self.rows.last if is_last else self.rows)
        return left

    def attend(self, l: int, q: Tensor) -> Tensor:
        spec, cache, n = self._pass.adapter.specs[l], self._pass.cache, self._pass.layout.n_tokens
        return attend(q, cache.keys[l, :, :n], cache.values[l, :, :n], spec, self._plans[spec.window])

    def result(self, logits: Tensor) -> PassResult:
        """logits [V]: after the last layer."""
        blend_pass, rows = self._pass, self.rows.host
        layout, loader = blend_pass.layout, blend_pass.loader
        recomputed = rows[layout.reusable[rows]]
        cost = blend_pass.row_layers / (layout.n_tokens * blend_pass.adapter.n_layers)
        read = loader.bytes_loaded, loader.read_s
        return PassResult(
            blend_pass.cache, logits, recomputed, *read, cost, blend_pass.scores, self._is_corrected
        )

    def _plan(self, rows: Rows) -> dict[int | None, RowPlan]:
        return plans_by_window(rows, self._pass.adapter.group, self._pass.adapter.windows)

    def _filter(self, l: int, keys: Tensor, values: Tensor) -> Tensor | None:
        """Indices of the rows that go on past layer l's projection; None: all. Waits for a GPU's choice."""
        layout, cache, rows = self._pass.layout, self._pass.cache, self.rows
        is_candidate = layout.reusable[rows.host]
        which = is_candidate.nonzero()[:, 0]
        if not len(which):
            return None
        index = which.to(values.device)
        at = rows.device[index]
        fresh = keys[:, index], values[:, index]
        stored = cache.keys[l][:, at], cache.values[l][:, at]
        kept = self._policy.filter(l, self._pass, rows.host[which], fresh, stored)
        if kept is None:
            return None
        return torch.cat([(~is_candidate).nonzero()[:, 0], which[kept.cpu()]]).sort().values
