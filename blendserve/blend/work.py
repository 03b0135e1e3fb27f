"""What a prefill does, as the cost model counts it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blendserve.blend.layout import Layout
from blendserve.blend.policies.base import Policy


@dataclass(frozen=True, slots=True)
class Work:
    """passes over the layers; token rows run; (row, key) pairs attended; tokens read, rotated and placed."""

    passes: int
    rows: float
    pairs: float
    loaded: float

    def row(self) -> list[float]:
        return [float(self.passes), self.rows, self.pairs, self.loaded]


def work_of(layout: Layout, policy: Policy, n_layers: int) -> Work:
    """The work of prefilling this layout with this policy."""
    work = rows_work(layout, policy.n_selected(layout))
    n_reusable, chosen = int(layout.reusable.sum()), policy.n_selected(layout)
    passes, rows, pairs = work.passes, work.rows, work.pairs
    if policy.needs_scoring_pass and 0 < chosen < n_reusable:
        rows, pairs, passes = rows + layout.n_suffix, pairs + layout.n_suffix * layout.n_tokens, passes + 1
    if policy.check_layers and chosen:
        dense = min(1.0, max(policy.check_layers) / n_layers) * (n_reusable - chosen)
        rows, pairs = rows + dense, pairs + dense * _mean_keys(layout)
    return Work(passes, rows, pairs, work.loaded)


def chunk_work(n: int, context: int, runs_context: bool) -> Work:
    """Computing one chunk of n tokens alone behind `context` others, which may have to run first."""
    first = context if runs_context else 0
    return Work(1 + bool(first), n + first, n * (context + (n + 1) / 2) + first**2 / 2, 0.0)


def rows_work(layout: Layout, chosen: int) -> Work:
    """One pass over what is fresh and so many of the reusable tokens."""
    keys = torch.arange(1, layout.n_tokens + 1, dtype=torch.float64)  # that a row at each position sees
    pairs = float(keys[layout.fresh].sum()) + chosen * _mean_keys(layout)
    return Work(1, float(layout.fresh.sum()) + chosen, pairs, float(layout.n_loaded))


def _mean_keys(layout: Layout) -> float:
    """Keys that a reusable token sees, on average."""
    at = layout.reusable.nonzero()[:, 0]
    return float(at.double().mean()) + 1 if len(at) else 0.0
