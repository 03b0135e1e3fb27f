"""What a correction is, and what those that learn from the recomputed tokens share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from blendserve.blend.layout import preceding_share
from blendserve.core import Span
from blendserve.kernels.ops import correct
from blendserve.kernels.rows import Rows
from blendserve.kernels.types import CorrectionParams, Prior, RecomputedTokens, Ropes
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.registry import CORRECTIONS

WEIGHT = 16.0  # tokens' worth of trust in the mean over all chunks


class LayerPriors(Protocol):
    """What a corpus has shown beforehand, see blend/priors.py."""

    def layer(self, l: int) -> Prior:
        """Of layer l >= 1."""


class Correction(ABC):
    """Adjusts stored KV in one request's cache, before the fresh rows are written over it."""

    uses_prior: ClassVar[bool] = False  # whether what a corpus has shown changes anything

    def __init__(
        self,
        adapter: DecoderModel,
        cache: KVCache,
        ropes: Ropes,
        spans: Sequence[Span],
        known: LayerPriors | None = None,
    ) -> None:
        """ropes: of all positions of the prompt; spans: of the reusable chunks, at least one; known: for who uses it."""
        return

    @abstractmethod
    def apply(self, l: int, rows: Rows, keys: Tensor, values: Tensor) -> bool:
        """Whether anything was changed. rows: ascending; keys (after RoPE) and values [K, S, D], fresh at these rows."""


class TokenPartition(NamedTuple):
    """The tokens of the chunks, counted from where the first one starts, as RecomputedTokens wants them."""

    rows: Tensor
    at: Tensor
    sizes: list[int]
    not_recomputed: Tensor
    other_sizes: list[int]
    preceding_share: list[float]

    def to(self, device: torch.device) -> TokenPartition:
        return self._replace(
            rows=self.rows.to(device), at=self.at.to(device), not_recomputed=self.not_recomputed.to(device)
        )


class FittedCorrection(Correction):
    """From the recomputed tokens of each chunk to all of its tokens."""

    def __init__(
        self,
        adapter: DecoderModel,
        cache: KVCache,
        ropes: Ropes,
        spans: Sequence[Span],
        known: LayerPriors | None = None,
    ) -> None:
        self._known = known if self.uses_prior else None
        self._rotary, self._cache, self._spans = adapter.rotary, cache, spans
        self._here = here = slice(spans[0].start, spans[-1].stop)
        there = {id(rope): rope.at(here) for rope in ropes}  # layers share them
        self._ropes = [there[id(rope)] for rope in ropes]
        self._features, self._top = 2 * adapter.head_dim, max(1, adapter.n_layers - 1)
        self._last: tuple[Rows, TokenPartition, float] | None = None

    @classmethod
    @abstractmethod
    def params(
        cls, features: int, depth: float = 0.0, knows: bool = False, recomputed: float = 1.0
    ) -> CorrectionParams:
        """Its constants for tokens of so many numbers, keys and values together.

        depth: where in the reader the layer is, 0 to 1. knows: there is a prior. recomputed: share of the chunks' tokens.
        """

    def apply(self, l: int, rows: Rows, keys: Tensor, values: Tensor) -> bool:
        if l == 0:  # its keys and values depend on their token alone
            return False
        split, recomputed = self._partition(rows)
        if not len(split.at) and self._known is None:
            return False
        stored = self._cache.keys[l][:, self._here], self._cache.values[l][:, self._here]
        fresh = RecomputedTokens(keys, values, *split)
        prior = self._known.layer(l) if self._known else None
        params = self.params(self._features, l / self._top, prior is not None, recomputed)
        correct(*stored, fresh, self._ropes[l], self._rotary, params, prior)
        return True

    def _partition(self, rows: Rows) -> tuple[TokenPartition, float]:
        """Which tokens of the chunks are among the rows, and their share; rows seldom differ from layer to layer."""
        if self._last is None or self._last[0] is not rows:
            found = partition(rows.host, self._spans, self._known is not None).to(rows.device.device)
            self._last = rows, found, sum(found.sizes) / max(1, sum(map(len, self._spans)))
        return self._last[1:]


def partition(rows: Tensor, spans: Sequence[Span], by_place: bool = False) -> TokenPartition:
    """The tokens of these spans, by whether they are among the ascending positions `rows` [S].

    by_place: whether they move by how much other text there is (blend/priors.py).
    """
    edges = torch.searchsorted(rows, torch.tensor([(s.start, s.stop) for s in spans])).tolist()
    which = torch.cat([torch.arange(*edge) for edge in edges])
    tokens, start = torch.cat([torch.arange(s.start, s.stop) for s in spans]), spans[0].start
    others = tokens[~torch.isin(tokens, rows)]
    sizes = [last - first for first, last in edges]
    left = [len(span) - size for span, size in zip(spans, sizes, strict=True)]
    by = [preceding_share(span) if by_place else 1.0 for span in spans]
    return TokenPartition(which, rows[which] - start, sizes, others - start, left, by)


def make_correction(
    name: str,
    adapter: DecoderModel,
    cache: KVCache,
    ropes: Ropes,
    spans: Sequence[Span],
    known: LayerPriors | None = None,
) -> Correction | None:
    """The correction of this name for one request; None where nothing is reused."""
    return CORRECTIONS.load(name)(adapter, cache, ropes, spans, known) if spans else None
