"""`ratio="auto"`: recompute for free what can be recomputed while KV is still loading.

CacheBlend's loading controller (arXiv 2405.16444, section 5.1): with the store and the machine as they were measured, the
ratio is raised until recomputing takes nearly as long as loading. It never falls below the floor set for quality.

The `query` policy stays at its floor: its own pass needs every layer before anything can be chosen, so that pass is all
that loading can hide behind, and rows recomputed afterwards are not free.
"""

from __future__ import annotations

from dataclasses import replace

from blendserve.blend.assemble import Layout
from blendserve.blend.profit import CostModel, work_of
from blendserve.config import BlendConfig, changed

MEMORY = 0.5  # weight of the last request in the running mean
HIDDEN = 0.8  # of loading that recomputing is to fill: estimates are off by a fifth, and layer 0 hides behind nothing


class LoadRate:
    """What reading a stored token takes, by the requests so far."""

    def __init__(self) -> None:
        self.seconds_per_token: float | None = None

    def saw(self, seconds: float, tokens: int) -> None:
        """One request read so many tokens' KV in so many seconds."""
        if tokens:
            known, new = self.seconds_per_token, seconds / tokens
            self.seconds_per_token = new if known is None else (1 - MEMORY) * known + MEMORY * new


def free_ratio(
    costs: CostModel, layout: Layout, blend: BlendConfig, n_layers: int, seconds_per_token: float | None
) -> float:
    """The largest ratio whose recomputation hides behind loading; the floor while no load has been measured.

    Also the floor for `query`, see above.
    """
    n_reusable = int(layout.reusable.sum())
    highest = (n_reusable - 1) / max(1, layout.n_found)  # with all of them there would be nothing to choose
    if seconds_per_token is None or highest <= blend.floor or blend.policy == "query":
        return blend.floor

    def compute(ratio: float) -> float:  # a rule's dense layers hide no more than their own layers' loading
        work = work_of(layout, changed(blend, policy="chunk_head", ratio=ratio), n_layers)
        return costs.seconds(replace(work, loaded=0.0))

    loading = HIDDEN * seconds_per_token * sum(len(piece.span) for piece in layout.pieces)
    least, most = compute(blend.floor), compute(highest)
    room = (loading - least) / (most - least) if most > least else 0.0  # work grows in proportion to the rows
    return blend.floor + min(1.0, max(0.0, room)) * (highest - blend.floor)
