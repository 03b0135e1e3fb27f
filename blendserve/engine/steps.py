"""One decoding step of several requests: their rows share the matmuls, each attends to its own slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from blendserve.blend.attention import RowPlan, attend, plan_rows
from blendserve.blend.cache import KVCache
from blendserve.engine.slots import Slots
from blendserve.gpu.batches import BatchSteps, worthwhile
from blendserve.models.adapter import Adapter, AttentionSpec, Projected


@torch.inference_mode()
def step(adapter: Adapter, cache: KVCache, at: int, token: int) -> Tensor:
    """Run one token at position `at`, append its KV -> logits [V] for the next."""
    known = torch.tensor([at])
    position = known.to(adapter.device)
    ropes = adapter.rope(position)
    windows = {spec.window for spec in adapter.specs}
    plans = {window: plan_rows(position, adapter.group, window, known) for window in windows}
    hidden = adapter.embed(torch.tensor([token], device=adapter.device))
    here = slice(at, at + 1)
    for l, spec in enumerate(adapter.specs):
        row = adapter.project(l, hidden)
        cache.write(l, here, adapter.rotate(row.k, ropes[l]), row.v)
        q = adapter.rotate(row.q, ropes[l])
        hidden = adapter.finish(
            l, hidden, attend(q, cache.keys[l], cache.values[l], spec, plans[spec.window])
        )
    return adapter.logits(hidden)[0]


@dataclass(frozen=True, slots=True)
class Row:
    """A token on its way in, and where it goes."""

    cache: KVCache
    at: int
    token: int


class BatchDecoder:
    """The decoding steps of a server's slots: launched row by row, or on a GPU out of one graph."""

    def __init__(self, adapter: Adapter, slots: Slots) -> None:
        self._adapter, self._slots = adapter, slots
        fits = worthwhile(adapter, slots.n)
        self._graph = BatchSteps(adapter, slots.keys, slots.values) if fits else None

    def step(self, rows: Sequence[Row]) -> Tensor:
        """`step_together` of rows whose caches are slots."""
        plain = partial(step_together, self._adapter, rows)
        if self._graph is None:
            return plain()
        return self._graph([(self._slots.number(row.cache), row.at, row.token) for row in rows], plain)


@torch.inference_mode()
def step_together(adapter: Adapter, rows: Sequence[Row]) -> Tensor:
    """Run each row's token at its position, append its KV -> logits [B, V]. Equals decode.step of each, to rounding."""
    device = adapter.device
    ropes = adapter.rope(torch.tensor([row.at for row in rows], device=device))
    hidden = adapter.embed(torch.tensor([row.token for row in rows], device=device))
    plans = [_plans(adapter, row) for row in rows]
    for l, spec in enumerate(adapter.specs):
        fresh = adapter.project(l, hidden)
        turned = Projected(adapter.rotate(fresh.q, ropes[l]), adapter.rotate(fresh.k, ropes[l]), fresh.v)
        attended = [_attend(l, row, turned, b, spec, plans[b][spec.window]) for b, row in enumerate(rows)]
        hidden = adapter.finish(l, hidden, torch.cat(attended))
    return adapter.logits(hidden)


def _plans(adapter: Adapter, row: Row) -> dict[int | None, RowPlan]:
    at = torch.tensor([row.at], device=adapter.device)
    return {w: plan_rows(at, adapter.group, w) for w in {spec.window for spec in adapter.specs}}


def _attend(l: int, row: Row, turned: Projected, b: int, spec: AttentionSpec, plan: RowPlan) -> Tensor:
    """Row b of the step over its own slot -> [1, H * D]."""
    only = slice(b, b + 1)
    row.cache.write(l, slice(row.at, row.at + 1), turned.k[:, only], turned.v[:, only])
    return attend(turned.q[:, only], row.cache.keys[l], row.cache.values[l], spec, plan)
