"""What a policy is. Each is a formula to check against its paper, with its own validation, cost and scoring pass.

A policy is asked twice: `select` gives the reusable positions whose rows enter layer 0; `filter`, at each layer, may drop
some of them again. What every policy must recompute anyway (suffix, missing chunks) is not its business.
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


@dataclass(slots=True)
class BlendPass:
    """What a scoring pass may run over: one request's prompt, what was found of it, and the cache to place it in."""

    adapter: DecoderModel
    ids: Tensor  # [T], on the device
    layout: Layout
    cache: KVCache
    loader: KVLoader
    ropes: Ropes
    row_layers: int = 0  # run so far, for the report
    scores: Tensor | None = None  # [T] on the host, what the policy chose by, for the report


LayerKV = tuple[Tensor, Tensor]


class Policy(ABC):
    """Chooses positions."""

    has_ratio: ClassVar[bool] = True  # whether the ratio changes anything
    has_check_layers: ClassVar[bool] = False  # whether `check_layers` does
    needs_scoring_pass: ClassVar[bool] = (
        False  # the suffix alone through all layers: loading hides behind nothing else
    )

    def __init__(self, config: BlendConfig) -> None:
        self.config = config

    def validate(self, n_layers: int) -> None:
        """Raises ConfigError for settings that do not fit a reader of so many layers."""
        return

    def n_selected(self, layout: Layout) -> int:
        """How many tokens it recomputes."""
        return layout.budget(self.config.min_ratio)

    @property
    def check_layers(self) -> tuple[int, ...]:
        """Layers at which rows may be dropped, ascending; below the first, all reusable rows run."""
        return ()

    def score(self, layout: Layout, blend_pass: BlendPass) -> Steps[None]:
        """The scoring pass, if there is one: sets `blend_pass.scores` for `select`."""
        yield from ()

    @abstractmethod
    def select(self, layout: Layout, blend_pass: BlendPass) -> Tensor:
        """Reusable positions that enter layer 0, ascending."""

    def filter(
        self, l: int, blend_pass: BlendPass, at: Tensor, fresh: LayerKV, cached: LayerKV
    ) -> Tensor | None:
        """At a narrowing layer: indices, into the candidate rows, of those that go on; None = all of them.

        at: positions [S] of these rows, on the host. fresh, cached: keys, rotated to one place, and values [K, S, D] of
        these rows, just computed and from the store.
        """
        return None


def make_policy(config: BlendConfig) -> Policy:
    """The policy that these settings name."""
    policy: Policy = POLICIES.load(config.policy)(config)
    return policy


def nowhere() -> Tensor:
    """No positions."""
    return torch.empty(0, dtype=torch.long)


def candidates(layout: Layout) -> Tensor:
    """All reusable positions, ascending."""
    return layout.reusable.nonzero()[:, 0]


def top(scores: Tensor, n: int) -> Tensor:
    """Indices of the n largest scores, ascending; of equal scores the earlier one."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:n].sort().values
