"""Blending prefill: stored KV where it may stay, fresh rows where it must not, first-token logits at the end.

    active rows = suffix + tokens without stored KV + tokens that the policy chose

Only active rows run through the layers. At each layer the stored KV is placed, corrected, and overwritten at the active
rows with what they just computed; the rows then attend by position to all of it. With nothing stored this is ordinary
prefill; with everything chosen it equals it.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from blendserve.blend.assemble import Assembly, Layout
from blendserve.blend.attention import RowPlan, attend, plan_rows
from blendserve.blend.cache import KVCache
from blendserve.blend.correct import make_correction
from blendserve.blend.probe import suffix_attention
from blendserve.blend.rows import Rows
from blendserve.blend.select import POLICIES, Policy
from blendserve.config import BlendConfig
from blendserve.core import Prompt
from blendserve.errors import ConfigError
from blendserve.models.adapter import Adapter
from blendserve.timing import Clock


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What decode starts from, and what the report is made of."""

    cache: KVCache
    logits: Tensor  # [V], for the token after the prompt
    recomputed: Tensor  # positions that the policy chose and that ran through the last layer
    bytes_loaded: int
    seconds_reading: float  # by the store's thread
    cost: float  # row-layers / (T * L)


@torch.inference_mode()
def prefill(
    adapter: Adapter,
    prompt: Prompt,
    layout: Layout,
    blend: BlendConfig,
    new_tokens: int = 0,
    clock: Clock | None = None,
    cache: KVCache | None = None,
) -> Prefilled:
    """Run the prompt, reusing what the layout found; leaves room for `new_tokens` in the cache.

    cache: the caller's own, of at least that room; default: a new one.
    Raises CorruptRecord when a stored layer fails its checksum: lay out again without that chunk; ConfigError for a check
    layer that the reader does not have.
    """
    check_policy(blend, adapter.n_layers)
    cache = cache or KVCache(adapter, len(prompt) + new_tokens)
    run = _Run(adapter, prompt, layout, blend, cache, clock or Clock(adapter.device))
    with closing(run.assembly):
        return run.go()


def check_policy(blend: BlendConfig, n_layers: int) -> None:
    """Raises ConfigError for a check layer that the reader does not have."""
    if blend.policy == "deviation" and not 0 < max(blend.check_layers, default=0) < n_layers:
        raise ConfigError(
            f"setting 'blend.check_layers' cannot be {list(blend.check_layers)}: name at least one layer, "
            f"from 1 to the reader's last, {n_layers - 1}"
        )


class _Run:
    """One request's state, dropped with it."""

    def __init__(
        self,
        adapter: Adapter,
        prompt: Prompt,
        layout: Layout,
        blend: BlendConfig,
        cache: KVCache,
        clock: Clock,
    ) -> None:
        self.adapter, self.layout, self.clock = adapter, layout, clock
        device = adapter.device
        self.ids = torch.tensor(prompt.ids, dtype=torch.long, device=device)
        self.ropes = adapter.rope(torch.arange(len(prompt), device=device))
        self.cache = cache
        self.assembly = Assembly(adapter, self.cache, layout.pieces, self.ropes, clock)
        self.policy: Policy = POLICIES[blend.policy](blend)
        self.correction = make_correction(
            blend.correction, adapter, self.cache, self.ropes, layout.reusable_spans
        )
        self.row_layers = 0

    def go(self) -> Prefilled:
        loaded = self.clock.seconds["load"]
        with self.clock.stage("select"):
            chosen = self.policy.enter(self.layout, self._query_scores)
        self.clock.seconds["select"] -= self.clock.seconds["load"] - loaded  # a pass places KV on its way
        active = self.layout.fresh.clone()
        active[chosen] = True
        rows = Rows.on(self.adapter.device, active.nonzero()[:, 0])
        hidden = self.adapter.embed(self.ids[rows.there])
        plans = self._plans(rows)
        for l in range(self.adapter.n_layers):
            self.row_layers += len(rows)
            hidden, kept = self._layer(l, hidden, rows, plans)
            if kept is not None:
                rows = kept
                plans = self._plans(rows)
        logits = self.adapter.logits(hidden[-1:])[0]
        recomputed = rows.here[self.layout.reusable[rows.here]]
        cost = self.row_layers / (self.layout.n_tokens * self.adapter.n_layers)
        loaded, reading = self.assembly.bytes_loaded, self.assembly.seconds_reading
        return Prefilled(self.cache, logits, recomputed, loaded, reading, cost)

    def _layer(
        self, l: int, hidden: Tensor, rows: Rows, plans: dict[int | None, RowPlan]
    ) -> tuple[Tensor, Rows | None]:
        """One layer over the active rows; also those that go on, when the policy drops some here."""
        adapter, n = self.adapter, self.layout.n_tokens
        fresh = adapter.project(l, hidden)
        rope = self.ropes[l].at(rows.there)
        q, k = adapter.rotate(fresh.q, rope), adapter.rotate(fresh.k, rope)
        self.assembly.place(l)
        with self.clock.stage("select"):
            kept = self._narrow(l, rows, fresh.v) if self.policy.narrows(l) else None
        if kept is None:
            with self.clock.stage("correct"):
                self.correction.apply(l, rows, k, fresh.v)
        self.cache.write(l, rows.there, k, fresh.v)
        left = None
        if kept is not None:
            which = kept.to(adapter.device)
            left = Rows(rows.here[kept], rows.there[which])
            q, hidden, plans = q[:, which], hidden[which], self._plans(left)
        if l == adapter.n_layers - 1:  # only the last row's output is read
            q, hidden, plans = q[:, -1:], hidden[-1:], self._plans(rows.last)
        spec = adapter.specs[l]
        attended = attend(q, self.cache.keys[l, :, :n], self.cache.values[l, :, :n], spec, plans[spec.window])
        return adapter.finish(l, hidden, attended), left

    def _plans(self, rows: Rows) -> dict[int | None, RowPlan]:
        """By window."""
        windows = {spec.window for spec in self.adapter.specs}
        return {window: plan_rows(rows.there, self.adapter.group, window, rows.here) for window in windows}

    def _narrow(self, l: int, rows: Rows, values: Tensor) -> Tensor | None:
        """Indices into `rows` of those that go on past layer l's projection; None = all. Waits for a GPU's choice."""
        candidate = self.layout.reusable[rows.here]
        which = candidate.nonzero()[:, 0]
        if not len(which):
            return None
        asked = which.to(values.device)
        stored = self.cache.values[l][:, rows.there[asked]]
        kept = self.policy.narrow(l, self.layout, values[:, asked], stored)
        if kept is None:
            return None
        return torch.cat([(~candidate).nonzero()[:, 0], which[kept.cpu()]]).sort().values

    def _query_scores(self) -> Tensor:
        suffix = self.ids[self.layout.n_tokens - self.layout.n_suffix :]
        self.row_layers += len(suffix) * self.adapter.n_layers
        hidden = self.adapter.embed(suffix)
        return suffix_attention(self.adapter, hidden, self.layout, self.cache, self.assembly, self.ropes)
