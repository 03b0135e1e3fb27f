"""Policies: formulas that tell which reused tokens are recomputed. They read scores, and run no model.

    scores of the scoring pass (prefill.py), if it needs one  -> `rank`  -> reusable positions that enter layer 0
    computed and stored KV of these rows, at its check layers -> `score` -> rows that go on

Suffix and missing chunks are computed with every policy.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from blendserve.blend.layout import LayerKV, Layout, State
from blendserve.config import BlendConfig
from blendserve.errors import ConfigError
from blendserve.models.kv_model import ModelLayers
from blendserve.registry import POLICIES


class Policy:
    """Selects the positions that are recomputed. A subclass has `rank`, a scoring pass, or check layers."""

    has_ratio: ClassVar[bool] = True  # whether the ratio changes anything
    has_check_layers: ClassVar[bool] = False  # whether `check_layers` does
    needs_scoring_pass: ClassVar[bool] = False  # the suffix through all layers, before any other row

    def __init__(self, config: BlendConfig) -> None:
        self.config = config

    def validate(self, model: ModelLayers) -> None:
        """Raises ConfigError for settings that do not fit the policy, or the model."""
        if model.recurrent and self.config.method in ("auto", "blend"):
            self._require_whole_chunks()
        if self.config.refine and not self.needs_scoring_pass:
            raise ConfigError(
                f"setting 'blend.refine' cannot be {self.config.refine:g} with policy {self.config.policy!r}, which has "
                "no scores of tokens: set it to 0, or set blend.policy to query",
                setting="blend.refine",
            )

    def _require_whole_chunks(self) -> None:
        """Raises ConfigError for settings that choose among a chunk's tokens: a state map is of all of them."""
        blend = self.config
        choosing = {
            "quality": blend.quality is not None,
            "max_kl": blend.max_kl is not None,
            "ratio": self.has_ratio and blend.ratio not in (0.0, 1.0),
            "correction": blend.correction != "none",
            "refine": blend.refine > 0,
        }
        if name := next((name for name, is_set in choosing.items() if is_set), None):
            raise ConfigError(
                f"setting 'blend.{name}' cannot be {getattr(blend, name)!r} with recurrent layers, whose chunks are "
                "reused whole but for their first tokens: set blend.ratio to 0, or to 1 for exact answers, and "
                "blend.correction to none",
                setting=f"blend.{name}",
            )

    def n_selected(self, layout: Layout) -> int:
        """Number of tokens that are recomputed, for the cost model too."""
        return layout.budget(self.config.min_ratio)

    @property
    def recomputes(self) -> bool:
        """Whether tokens are recomputed at all; full reuse is what it says, whatever it reuses."""
        return self.config.min_ratio > 0

    def is_scored(self, layout: Layout) -> bool:
        """Whether the scoring pass runs; it does not without a choice, of the prefill or of refining."""
        n = self.n_selected(layout)
        is_choice = n < layout.n_reusable and max(n, layout.budget(self.config.refine)) > 0
        return self.needs_scoring_pass and is_choice

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


class QueryPolicy(Policy):
    """What the question attends to, as InfoFlow KV (arXiv 2603.05353, section 4): the scores of the scoring pass."""

    needs_scoring_pass = True


class DeviationPolicy(Policy):
    """CacheBlend's HKVD (arXiv 2405.16444, section 4.3): the largest squared L2 of fresh V - stored V at a check layer.

    All rows run through the layers below the check layer. Several check layers are the paper's gradual filtering: the
    share kept falls linearly from twice the ratio to the ratio. The released code compares V alone, as here.
    """

    has_check_layers = True

    def validate(self, model: ModelLayers) -> None:
        super().validate(model)
        layers, n_layers = self.config.check_layers, model.n_kv_layers
        if not 0 < max(layers, default=0) < n_layers:
            raise ConfigError(
                f"setting 'blend.check_layers' cannot be {list(layers)}: name at least one layer, "
                f"from 1 to the model's last, {n_layers - 1}",
                setting="blend.check_layers",
            )

    @property
    def check_layers(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.config.check_layers)))

    def score(self, fresh: LayerKV, stored: LayerKV) -> Tensor:
        return (fresh[1].float() - stored[1].float()).square().sum(dim=(0, 2))

    def n_kept(self, l: int, layout: Layout) -> int:
        checks = self.check_layers
        left = len(checks) - 1 - checks.index(l)
        return layout.budget(min(1.0, self.config.min_ratio * (1 + left / max(1, len(checks) - 1))))


class NonePolicy(Policy):
    """Recomputes nothing: full reuse, as in PromptCache (arXiv 2311.04934)."""

    has_ratio = recomputes = False

    def n_selected(self, layout: Layout) -> int:
        return 0


class AllPolicy(Policy):
    """Recomputes every reusable token: equals full prefill."""

    has_ratio = False

    def n_selected(self, layout: Layout) -> int:
        return layout.n_reusable


class RandomPolicy(Policy):
    """A random set: the same one in prompts with as many reusable tokens."""

    def rank(self, layout: Layout, scores: Tensor | None) -> Tensor:
        positions = layout.reusable.nonzero()[:, 0]
        order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(0))
        ranks = torch.zeros(layout.n_tokens, dtype=torch.long)
        ranks[positions[order]] = -torch.arange(len(positions))
        return ranks


class ChunkHeadPolicy(Policy):
    """The first tokens of each chunk, where attention sinks form (EPIC's LegoLink, arXiv 2410.15332, section 4)."""

    def rank(self, layout: Layout, scores: Tensor | None) -> Tensor:
        ranks = torch.zeros(layout.n_tokens, dtype=torch.long)
        for span in layout.spans(State.REUSED):
            ranks[span.start : span.stop] = -torch.arange(len(span))
        return ranks


def defaults_for(blend: BlendConfig, model: ModelLayers) -> BlendConfig:
    """The settings, with defaults that fit the model: chunks with state maps are reused whole, and not corrected."""
    if not model.recurrent or blend.has_target:
        return blend
    fitting = {"ratio": 0.0, "correction": "none"}
    fields = BlendConfig.model_fields
    return blend.with_values(**{k: v for k, v in fitting.items() if getattr(blend, k) == fields[k].default})


def make_policy(config: BlendConfig) -> Policy:
    """The policy that these settings name."""
    policy: Policy = POLICIES.load(config.policy)(config)
    return policy


def n_scoring_rows(layout: Layout) -> int:
    """Number of tokens at the prompt's end that the scoring pass runs: the suffix.

    A plain prompt's suffix may begin with the end of its last chunk. That end is left out, as it would take most from its
    own chunk.
    """
    runs = layout.prompt.runs
    return max(1, layout.n_suffix - runs[-1].n_after) if runs else layout.n_suffix


def top(scores: Tensor, n: int) -> Tensor:
    """Indices of the n largest scores, ascending; of equal scores the earlier one."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:n].sort().values
