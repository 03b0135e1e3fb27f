"""What a policy is. Each is a formula to check against its paper, with its own validation, cost and scoring pass.

A policy is asked twice: `select` gives the reusable positions whose rows enter layer 0; `filter`, at the check layers,
may drop some of them. Rows that every policy recomputes (suffix, missing chunks) are not its business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from blendserve.blend.layout import Layout
from blendserve.blend.loader import KVLoader
from blendserve.config import BlendConfig
from blendserve.core import Steps
from blendserve.kernels.types import Ropes
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.registry import POLICIES

LayerKV = tuple[Tensor, Tensor]


@dataclass(slots=True)
class BlendPass:
    """One request's prompt, its layout, and the cache that stored KV is placed in: what a policy may read."""

    adapter: DecoderModel
    ids: Tensor  # [T], on the device
    layout: Layout
    cache: KVCache
    loader: KVLoader
    ropes: Ropes
    row_layers: int = 0  # rows run so far, summed over layers, for the report
    scores: Tensor | None = None  # [T] on the host, by which the policy chose, for the explanation


class Policy(ABC):
    """Chooses the positions that are recomputed."""

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

    @property
    def check_layers(self) -> tuple[int, ...]:
        """Layers at which rows may be dropped, ascending; below the first, all selected rows run."""
        return ()

    def score(self, blend_pass: BlendPass) -> Steps[None]:
        """The scoring pass, if there is one: sets `blend_pass.scores` for `select`."""
        yield from ()

    @abstractmethod
    def select(self, blend_pass: BlendPass) -> Tensor:
        """Reusable positions that enter layer 0, ascending."""

    def filter(
        self, l: int, blend_pass: BlendPass, at: Tensor, fresh: LayerKV, stored: LayerKV
    ) -> Tensor | None:
        """At a check layer: indices, into the candidate rows, of the rows that go on; None: all.

        at: positions [S] of these rows, on the host. fresh, stored: their computed and stored keys, rotated to one place,
        and values [K, S, D].
        """
        return None


def make_policy(config: BlendConfig) -> Policy:
    """The policy that these settings name."""
    policy: Policy = POLICIES.load(config.policy)(config)
    return policy


def no_positions() -> Tensor:
    return torch.empty(0, dtype=torch.long)


def candidates(layout: Layout) -> Tensor:
    """All reusable positions, ascending."""
    return layout.reusable.nonzero()[:, 0]


def top(scores: Tensor, n: int) -> Tensor:
    """Indices of the n largest scores, ascending; of equal scores the earlier one."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:n].sort().values
