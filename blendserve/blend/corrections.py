"""Corrections that learn from the recomputed tokens of the prompt how its other reused tokens deviate (ours).

    shift   per layer and chunk: the mean of (fresh - stored) over the recomputed tokens, shrunk towards the mean over all
            chunks, is added at half its size to the chunk's other tokens (akin to AgentKVShift, arXiv 2607.21604)
    ridge   on top of each chunk's mean, a linear map from a token's stored key and value to its deviation, by ridge
            regression per kv head; with few recomputed tokens the penalty leaves little but the means, which shrink to 0
    prior   the deviation that the corpus has shown (blend/priors.py), as far as the recomputed tokens confirm it: by the
            slope of their deviation on it, 0 to 1; and a ridge on the rest. Without priors in the store it is `ridge`

Keys are compared and moved before RoPE, and by less than they are expected to move. A stored chunk draws more attention
than it should; a key that is moved to where it is expected draws less than one that is there, as a softmax takes
exponentials, and the mean of those is above the exponential of the mean. Too much attention costs little, too little
loses what the token says: full-sized moves made some answers worse than none.

The prior was fitted on thousands of tokens of all kinds, the rest on some hundred that were chosen as they draw most
attention, so the rest counts half as much. Upper layers look for single tokens, so their keys move less. The fewer tokens
are recomputed, the more a wrong move weighs, so all moves are smaller then. All constants were chosen on first halves of
questions (docs/research/decisions.md). They are parameters of a correction's word, as in `ridge[penalty=4]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from blendserve.blend.layout import LayerKV, preceding_share
from blendserve.core import Span
from blendserve.kernels.ops import correct
from blendserve.kernels.rotary import Rotary
from blendserve.kernels.rows import Rows
from blendserve.kernels.types import CorrectionParams, Prior, RecomputedTokens, Rope, Ropes

Weight = Annotated[float, Field(ge=0.0, le=1000.0)]
Positive = Annotated[float, Field(ge=0.001, le=1000.0)]


@dataclass(eq=False)
class Correction:
    """Adjusts the reused KV of one request, before the fresh rows are written over it."""

    rotary: Rotary
    ropes: Ropes  # of all positions of the prompt, for each layer
    spans: Sequence[Span]  # of the reused segments, at least one
    prior: Callable[[int], Prior] | None
    """of a layer >= 1, how the corpus's stored tokens are expected to deviate (blend/priors.py)"""

    uses_prior: ClassVar[bool] = False  # whether the prior changes anything

    def __post_init__(self) -> None:
        if not self.uses_prior:
            self.prior = None

    def apply(self, l: int, stored: LayerKV, rows: Rows, fresh: LayerKV) -> bool:
        """Adjust the stored KV of layer l in place -> whether anything was changed.

        stored [K, T, D]: of the whole prompt. rows: ascending. fresh [K, S, D]: what was computed at these rows.
        """
        return False


class NoCorrection(Correction):
    """Stored KV is used as it is."""


@dataclass(eq=False)
class FittedCorrection(Correction, ABC):
    """Corrects all tokens of a chunk by what its recomputed ones show. Subclasses differ in constants alone."""

    _latest: tuple[Rows, RecomputedTokens] | None = field(default=None, init=False)  # of the last layer

    @abstractmethod
    def params(self, features: int, depth: float, has_prior: bool, share: float) -> CorrectionParams:
        """Constants of the fit.

        features: numbers of a token's key and value. depth: of the layer in the model, 0 to 1. share: recomputed share of
        the chunks' tokens.
        """

    def apply(self, l: int, stored: LayerKV, rows: Rows, fresh: LayerKV) -> bool:
        if l == 0:  # its KV depends on its token alone
            return False
        tokens = self._partition(rows)._replace(keys=fresh[0], values=fresh[1])
        if not len(tokens.recomputed_index) and self.prior is None:
            return False
        prior = self.prior(l) if self.prior else None
        depth = l / (len(self.ropes) - 1)
        share = sum(tokens.recomputed_per_chunk) / max(1, sum(map(len, self.spans)))
        keys, values = (x[:, self._here] for x in stored)
        params = self.params(keys.shape[-1] + values.shape[-1], depth, prior is not None, share)
        correct(keys, values, tokens, self._ropes[l], self.rotary, params, prior)
        return True

    def _partition(self, rows: Rows) -> RecomputedTokens:
        """Which tokens of the chunks are among the rows; rows seldom differ from layer to layer."""
        if self._latest is None or self._latest[0] is not rows:
            self._latest = rows, partition(rows, self.spans, self.prior is not None)
        return self._latest[1]

    @property
    def _here(self) -> slice:
        return slice(self.spans[0].start, self.spans[-1].stop)

    @cached_property
    def _ropes(self) -> list[Rope]:
        by_id = {id(rope): rope.at(self._here) for rope in self.ropes}  # layers share them
        return [by_id[id(rope)] for rope in self.ropes]


@dataclass(eq=False)
class Shift(FittedCorrection):
    """Means alone."""

    # Of the moves: a recomputed token deviates more than others, which is why it was chosen.
    scale: Weight = 0.5
    chunk_shrinkage: Positive = 16.0  # tokens' worth of trust in the mean over all chunks

    def params(self, features: int, depth: float, has_prior: bool, share: float) -> CorrectionParams:
        return CorrectionParams(self.chunk_shrinkage, 0.0, self.scale, self.scale, penalty=None)


@dataclass(eq=False)
class Ridge(FittedCorrection):
    """Means and a linear map."""

    penalty: Positive = 8.0  # per feature of unit size
    chunk_shrinkage: Positive = 16.0  # tokens' worth of trust in the mean over all chunks
    zero_shrinkage: Weight = 40.0  # tokens' worth of trust in no deviation at all
    key_scale: Weight = 0.55  # of the moves
    value_scale: Weight = 0.7

    def params(self, features: int, depth: float, has_prior: bool, share: float) -> CorrectionParams:
        scales = self.key_scale, self.value_scale
        return CorrectionParams(self.chunk_shrinkage, self.zero_shrinkage, *scales, self.penalty * features)


@dataclass(eq=False)
class PriorRidge(Ridge):
    """The corpus's map, and a ridge on the rest. Without priors it is `ridge`."""

    prior_shrinkage: Weight = 20.0  # tokens' worth of trust in a prior as it is
    first_key_scale: Weight = 0.85  # of the prior's moves of keys in the first layer
    last_key_scale: Weight = 0.5  # and in the last one
    prior_value_scale: Weight = 0.85
    rest_key_scale: Weight = 0.3  # of the other moves
    rest_value_scale: Weight = 0.5
    min_confidence: Weight = 0.8  # factor of all moves if nothing is recomputed
    full_share: Positive = 0.15  # recomputed share from which the factor is 1

    uses_prior = True

    def params(self, features: int, depth: float, has_prior: bool, share: float) -> CorrectionParams:
        ridge = super().params(features, depth, has_prior, share)
        if not has_prior:
            return ridge
        confidence = self.min_confidence + (1 - self.min_confidence) * min(1.0, share / self.full_share)
        key_scale = self.first_key_scale + (self.last_key_scale - self.first_key_scale) * depth
        return ridge._replace(
            key_scale=confidence * self.rest_key_scale,
            value_scale=confidence * self.rest_value_scale,
            prior_shrinkage=self.prior_shrinkage,
            prior_key_scale=confidence * key_scale,
            prior_value_scale=confidence * self.prior_value_scale,
        )


def partition(rows: Rows, spans: Sequence[Span], by_place: bool = False) -> RecomputedTokens:
    """The tokens of these spans, by whether they are among the rows; without KV. Places count from the first span.

    by_place: whether their deviation is in proportion to the text before them (blend/priors.py).
    """
    at = rows.host
    device = rows.device.device
    edges = torch.searchsorted(at, torch.tensor([(s.start, s.stop) for s in spans])).tolist()
    which = torch.cat([torch.arange(*edge) for edge in edges])
    tokens = torch.cat([torch.arange(s.start, s.stop) for s in spans])
    start = spans[0].start
    others = tokens[~torch.isin(tokens, at)]
    sizes = [last - first for first, last in edges]
    left = [len(span) - size for span, size in zip(spans, sizes, strict=True)]
    by = [preceding_share(span) if by_place else 1.0 for span in spans]
    which, at, others = (x.to(device) for x in (which, at[which] - start, others - start))
    return RecomputedTokens(torch.empty(0), torch.empty(0), which, at, sizes, others, left, by)
