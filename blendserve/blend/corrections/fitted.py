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
questions (docs/research/decisions.md).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blendserve.blend.corrections.base import Correction, LayerPriors
from blendserve.blend.layout import preceding_share
from blendserve.core import Span
from blendserve.kernels.ops import correct
from blendserve.kernels.rows import Rows
from blendserve.kernels.types import CorrectionParams, RecomputedTokens, Ropes
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel

MEAN_TRUST = 16.0  # tokens' worth of trust in the mean over all chunks
SHIFT_SCALE = 0.5  # of the moves: a recomputed token deviates more than others, which is why it was chosen

ZERO_TRUST = 40.0  # tokens' worth of trust in no deviation at all
KEY_SCALE, VALUE_SCALE = 0.55, 0.7  # of the moves
PENALTY = 8.0  # per feature of unit size

PRIOR_TRUST = 20.0  # tokens' worth of trust in a prior as it is
FIRST_KEY_SCALE, LAST_KEY_SCALE, PRIOR_VALUE_SCALE = 0.85, 0.5, 0.85  # of the prior's moves, by depth
RESIDUAL_SCALE = 0.3, 0.5  # of the other moves of keys and values
MIN_CONFIDENCE = 0.8  # factor of all moves if nothing is recomputed
FULL_CONFIDENCE_SHARE = 0.15  # recomputed share from which the factor is 1


class TokenPartition(NamedTuple):
    """The tokens of the chunks, counted from where the first one starts, as RecomputedTokens wants them."""

    rows: Tensor
    at: Tensor
    sizes: list[int]
    not_recomputed: Tensor
    other_sizes: list[int]
    preceding_share: list[float]

    def to(self, device: torch.device) -> TokenPartition:
        rows, at, others = (x.to(device) for x in (self.rows, self.at, self.not_recomputed))
        return self._replace(rows=rows, at=at, not_recomputed=others)


class FittedCorrection(Correction):
    """From the recomputed tokens of each chunk to all of its tokens. Subclasses differ in constants alone."""

    def __init__(
        self,
        adapter: DecoderModel,
        cache: KVCache,
        ropes: Ropes,
        spans: Sequence[Span],
        priors: LayerPriors | None = None,
    ) -> None:
        self._priors = priors if self.uses_prior else None
        self._rotary, self._cache, self._spans = adapter.rotary, cache, spans
        self._here = here = slice(spans[0].start, spans[-1].stop)
        by_id = {id(rope): rope.at(here) for rope in ropes}  # layers share them
        self._ropes = [by_id[id(rope)] for rope in ropes]
        self._features, self._last = 2 * adapter.head_dim, max(1, adapter.n_layers - 1)
        self._latest: tuple[Rows, TokenPartition, float] | None = None

    @abstractmethod
    def params(self, features: int, depth: float, has_prior: bool, share: float) -> CorrectionParams:
        """Its constants.

        features: numbers of a token's key and value. depth: of the layer in the model, 0 to 1. share: recomputed share of
        the chunks' tokens.
        """

    def apply(self, l: int, rows: Rows, keys: Tensor, values: Tensor) -> bool:
        if l == 0:  # its KV depends on its token alone
            return False
        tokens, share = self._partition(rows)
        if not len(tokens.at) and self._priors is None:
            return False
        stored = self._cache.keys[l][:, self._here], self._cache.values[l][:, self._here]
        fresh = RecomputedTokens(keys, values, *tokens)
        prior = self._priors.layer(l) if self._priors else None
        params = self.params(self._features, l / self._last, prior is not None, share)
        correct(*stored, fresh, self._ropes[l], self._rotary, params, prior)
        return True

    def _partition(self, rows: Rows) -> tuple[TokenPartition, float]:
        """Which tokens of the chunks are among the rows, and their share; rows seldom differ from layer to layer."""
        if self._latest is None or self._latest[0] is not rows:
            found = partition(rows.host, self._spans, self._priors is not None).to(rows.device.device)
            self._latest = rows, found, sum(found.sizes) / max(1, sum(map(len, self._spans)))
        return self._latest[1:]


class Shift(FittedCorrection):
    """Means alone."""

    def params(self, features: int, depth: float, has_prior: bool, share: float) -> CorrectionParams:
        return CorrectionParams(MEAN_TRUST, 0.0, SHIFT_SCALE, SHIFT_SCALE, penalty=None)


class Ridge(FittedCorrection):
    """Means and a linear map."""

    def params(self, features: int, depth: float, has_prior: bool, share: float) -> CorrectionParams:
        return CorrectionParams(MEAN_TRUST, ZERO_TRUST, KEY_SCALE, VALUE_SCALE, PENALTY * features)


class PriorRidge(Ridge):
    """The corpus's map, and a ridge on the rest."""

    uses_prior = True

    def params(self, features: int, depth: float, has_prior: bool, share: float) -> CorrectionParams:
        ridge = super().params(features, depth, has_prior, share)
        if not has_prior:
            return ridge
        confidence = MIN_CONFIDENCE + (1 - MIN_CONFIDENCE) * min(1.0, share / FULL_CONFIDENCE_SHARE)
        keys, values = (confidence * scale for scale in RESIDUAL_SCALE)
        prior_keys = confidence * (FIRST_KEY_SCALE + (LAST_KEY_SCALE - FIRST_KEY_SCALE) * depth)
        prior_values = confidence * PRIOR_VALUE_SCALE
        trust = MEAN_TRUST, ZERO_TRUST
        return CorrectionParams(*trust, keys, values, ridge.penalty, PRIOR_TRUST, prior_keys, prior_values)


def partition(rows: Tensor, spans: Sequence[Span], by_place: bool = False) -> TokenPartition:
    """The tokens of these spans, by whether they are among the ascending positions `rows` [S].

    by_place: whether their deviation is in proportion to the text before them (blend/priors.py).
    """
    edges = torch.searchsorted(rows, torch.tensor([(s.start, s.stop) for s in spans])).tolist()
    which = torch.cat([torch.arange(*edge) for edge in edges])
    tokens, start = torch.cat([torch.arange(s.start, s.stop) for s in spans]), spans[0].start
    others = tokens[~torch.isin(tokens, rows)]
    sizes = [last - first for first, last in edges]
    left = [len(span) - size for span, size in zip(spans, sizes, strict=True)]
    by = [preceding_share(span) if by_place else 1.0 for span in spans]
    return TokenPartition(which, rows[which] - start, sizes, others - start, left, by)
