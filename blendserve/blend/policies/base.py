"""What a policy is: a formula that tells which reused tokens are recomputed. It reads scores, and runs no model.

    scores of the scoring pass (scoring.py), if it needs one  -> `rank`  -> reusable positions that enter layer 0
    computed and stored KV of these rows, at its check layers -> `score` -> rows that go on

Suffix and missing chunks are computed with every policy.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from blendserve.blend.layout import LayerKV, Layout
from blendserve.config import BlendConfig
from blendserve.registry import POLICIES


class Policy:
    """Selects the positions that are recomputed. A subclass has `rank`, a scoring pass, or check layers."""

    has_ratio: ClassVar[bool] = True  # whether the ratio changes anything
    has_check_layers: ClassVar[bool] = False  # whether `check_layers` does
    needs_scoring_pass: ClassVar[bool] = False  # the suffix through all layers, before any other row

    def __init__(self, config: BlendConfig) -> None:
        self.config = config

    def validate(self, n_layers: int) -> None:
        """Raises ConfigError for settings that do not fit a model of `n_layers` layers."""
        return

    def n_selected(self, layout: Layout) -> int:
        """Number of tokens that are recomputed, for the cost model too."""
        return layout.budget(self.config.min_ratio)

    def is_scored(self, layout: Layout) -> bool:
        """Whether the scoring pass runs; without a choice it does not."""
        return self.needs_scoring_pass and 0 < self.n_selected(layout) < layout.n_reusable

    def rank(self, layout: Layout, scores: Tensor | None) -> Tensor:
        """A number for each position [T]; the largest are selected. scores [T]: of the scoring pass."""
        assert scores is not None
        return scores

    def select(self, layout: Layout, scores: Tensor | None = None) -> Tensor:
        """Reusable positions that enter layer 0, ascending; with check layers all, unless none is recomputed."""
        positions, n = layout.reusable.nonzero()[:, 0], self.n_selected(layout)
        if n == 0 or n == len(positions) or self.check_layers:
            return positions if n else positions[:0]
        return positions[top(self.rank(layout, scores)[positions], n)]

    @property
    def check_layers(self) -> tuple[int, ...]:
        """Layers at which rows may be dropped, ascending; below the first, all selected rows run."""
        return ()

    def score(self, fresh: LayerKV, stored: LayerKV) -> Tensor:
        """At a check layer: a score for each row [S], from its computed and its stored KV at the same position."""
        raise NotImplementedError

    def n_kept(self, l: int, layout: Layout) -> int:
        """At check layer l: number of rows that go on, those with the largest scores."""
        return self.n_selected(layout)


def make_policy(config: BlendConfig) -> Policy:
    """The policy that these settings name."""
    policy: Policy = POLICIES.load(config.policy)(config)
    return policy


def top(scores: Tensor, n: int) -> Tensor:
    """Indices of the n largest scores, ascending; of equal scores the earlier one."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:n].sort().values
