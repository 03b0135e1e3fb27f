"""Policies: formulas that tell which reused tokens are recomputed. They read scores, and run no model.

    scores of the scoring pass (prefill.py), if it needs one  -> `rank`  -> reusable positions that enter layer 0
    computed and stored KV of these rows, at its check layers -> `score` -> rows that go on

A policy is a dataclass. `ratio` and `refine` come from the settings of these names, its other fields from its word, as in
`deviation[1,2]`. Suffix and missing chunks are computed with every policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from blendserve.blend.layout import LayerKV, Layout, State
from blendserve.blend.selection import Selection, Share
from blendserve.config import BlendConfig
from blendserve.core import Prompt
from blendserve.errors import ConfigError
from blendserve.models.kv_model import ModelLayers
from blendserve.models.tokenizer import Tokenizer
from blendserve.registry import POLICIES

AUTO_MIN_RATIO = 0.05  # of ratio auto without a minimum
START_RATIO = 0.15  # where nothing sets one, and no evidence chooses one

CheckLayer = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Policy:
    """Selects the positions that are recomputed. A subclass has `rank`, a scoring pass, or check layers."""

    ratio: float  # share of the found chunk tokens

    needs_scoring_pass: ClassVar[bool] = False  # the suffix through all layers, before any other row

    def validate(self, model: ModelLayers) -> None:
        """Raises ConfigError for parameters that do not fit the model."""

    def prepare(self, model: ModelLayers, tokenizer: Tokenizer, prompt: Prompt) -> Policy:
        """The policy for this prompt: for policies that read its text."""
        return self

    def shares(self, layout: Layout) -> Iterator[Share]:
        """Groups of segments with the share of their tokens that is recomputed: all found chunks and `ratio`."""
        yield Share(tuple(layout.found), self.ratio)

    def selection(self, layout: Layout) -> Selection:
        return Selection(layout, tuple(self.shares(layout)))

    @property
    def recomputes(self) -> bool:
        """Whether tokens are recomputed at all: not in full reuse."""
        return self.ratio > 0

    @property
    def for_refining(self) -> Policy | None:
        """The policy that selects what is recomputed after the first token; None if nothing is."""
        return None

    def is_scored(self, layout: Layout) -> bool:
        """Whether the scoring pass runs; it does not without a choice, of the prefill or of refining."""
        n = self.selection(layout).n
        later = self.for_refining
        most = max(n, later.selection(layout).n) if later else n
        return self.needs_scoring_pass and n < layout.n_reusable and most > 0

    def rank(self, layout: Layout, scores: Tensor | None) -> Tensor:
        """A number for each position [T]; the largest are selected. scores [T]: of the scoring pass."""
        assert scores is not None
        return scores

    def select(self, layout: Layout, scores: Tensor | None = None) -> Tensor:
        """Reusable positions that enter layer 0, ascending; with check layers all, unless none is recomputed."""
        positions = layout.reusable.nonzero()[:, 0]
        selection = self.selection(layout)
        if selection.n == 0:
            return positions[:0]
        if selection.n == len(positions) or self.check_layers:
            return positions
        return positions[selection.best(positions, self.rank(layout, scores)[positions])]

    @property
    def check_layers(self) -> tuple[int, ...]:
        """Layers at which rows may be dropped, ascending; below the first, all selected rows run."""
        return ()

    def score(self, fresh: LayerKV, stored: LayerKV) -> Tensor:
        """A score for each row [S] at a check layer, from its computed and its stored KV at the same position."""
        raise NotImplementedError

    def kept(self, l: int, layout: Layout) -> Selection:
        """The rows that go on at check layer l, by their scores."""
        return self.selection(layout)


@dataclass(frozen=True)
class QueryPolicy(Policy):
    """What the question attends to, as InfoFlow KV (arXiv 2603.05353, section 4): the scores of the scoring pass."""

    refine: float  # share of the found chunk tokens, recomputed after the first token

    needs_scoring_pass = True

    @property
    def for_refining(self) -> Policy | None:
        return replace(self, ratio=self.refine) if self.refine else None


@dataclass(frozen=True)
class DeviationPolicy(Policy):
    """CacheBlend's HKVD (arXiv 2405.16444, section 4.3): the largest squared L2 of fresh V - stored V at a check layer.

    All rows run through the layers below the check layer. Several check layers are the paper's gradual filtering: the
    share kept falls linearly from twice the ratio to the ratio. The released code compares V alone, as here.
    """

    layers: tuple[CheckLayer, ...] = (1,)

    def validate(self, model: ModelLayers) -> None:
        n_layers = model.n_kv_layers
        if not 0 < max(self.layers, default=0) < n_layers:
            raise ConfigError(
                f"setting 'blend.policy' cannot have layers {list(self.layers)}: name at least one layer, "
                f"from 1 to the model's last, {n_layers - 1}",
                setting="blend.policy",
            )

    @property
    def check_layers(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.layers)))

    def score(self, fresh: LayerKV, stored: LayerKV) -> Tensor:
        return (fresh[1].float() - stored[1].float()).square().sum(dim=(0, 2))

    def kept(self, l: int, layout: Layout) -> Selection:
        checks = self.check_layers
        n_after = len(checks) - 1 - checks.index(l)
        return self.selection(layout).scaled(1 + n_after / max(1, len(checks) - 1))


@dataclass(frozen=True)
class NonePolicy(Policy):
    """Recomputes nothing: full reuse, as in PromptCache (arXiv 2311.04934)."""

    ratio: float = field(default=0.0, init=False)


@dataclass(frozen=True)
class AllPolicy(Policy):
    """Recomputes every reusable token: equals full prefill."""

    ratio: float = field(default=1.0, init=False)


@dataclass(frozen=True)
class RandomPolicy(Policy):
    """A random set: the same one in prompts with as many reusable tokens."""

    def rank(self, layout: Layout, scores: Tensor | None) -> Tensor:
        positions = layout.reusable.nonzero()[:, 0]
        order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(0))
        ranks = torch.zeros(layout.n_tokens, dtype=torch.long)
        ranks[positions[order]] = -torch.arange(len(positions))
        return ranks


@dataclass(frozen=True)
class ChunkHeadPolicy(Policy):
    """The first tokens of each chunk, where attention sinks form (EPIC's LegoLink, arXiv 2410.15332, section 4)."""

    def rank(self, layout: Layout, scores: Tensor | None) -> Tensor:
        ranks = torch.zeros(layout.n_tokens, dtype=torch.long)
        for span in layout.spans(State.REUSED):
            ranks[span.start : span.stop] = -torch.arange(len(span))
        return ranks


def make_policy(blend: BlendConfig) -> Policy:
    """The policy of these settings. With ratio auto, its ratio is the least one."""
    ratio = START_RATIO if blend.ratio is None else blend.ratio
    if isinstance(ratio, str):
        ratio = float(ratio.partition(":")[2] or AUTO_MIN_RATIO)
    settings = {"ratio": ratio, "refine": blend.refine}
    asked = {field.name for field in fields(POLICIES.load(blend.policy)) if field.init}
    values = {name: value for name, value in settings.items() if name in asked}
    policy: Policy = POLICIES.make(blend.policy, **values)
    return policy


def takes(word: str, setting: str) -> bool:
    """Whether a setting, ratio or refine, changes what the policy of a word does."""
    return any(field.name == setting and field.init for field in fields(POLICIES.load(word)))


def validate_blend(blend: BlendConfig, model: ModelLayers) -> None:
    """Raises ConfigError for settings that do not fit each other, the policy or the model."""
    if model.recurrent and blend.method in ("auto", "blend"):
        _require_whole_chunks(blend)
    if blend.refine and not takes(blend.policy, "refine"):
        raise ConfigError(
            f"setting 'blend.refine' cannot be {blend.refine:g} with policy {blend.policy!r}, which has no scores of "
            "tokens: set it to 0, or set blend.policy to query",
            setting="blend.refine",
        )
    make_policy(blend).validate(model)


def _require_whole_chunks(blend: BlendConfig) -> None:
    """Raises ConfigError for settings that choose among a chunk's tokens: a state map is of all of them."""
    choosing = {
        "ratio": takes(blend.policy, "ratio") and blend.ratio not in (0.0, 1.0),
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


def defaults_for(blend: BlendConfig, model: ModelLayers) -> BlendConfig:
    """The settings, with defaults that fit the model: chunks with state maps are reused whole, and not corrected."""
    if not model.recurrent:
        return blend
    fitting = {"ratio": 0.0, "correction": "none"}
    known = BlendConfig.model_fields
    return blend.with_values(**{k: v for k, v in fitting.items() if getattr(blend, k) == known[k].default})


def n_scoring_rows(layout: Layout) -> int:
    """Number of tokens at the prompt's end that the scoring pass runs: the suffix.

    A plain prompt's suffix may begin with the end of its last chunk. That end is left out, as it would take most from its
    own chunk.
    """
    runs = layout.prompt.runs
    return max(1, layout.n_suffix - runs[-1].n_after) if runs else layout.n_suffix
