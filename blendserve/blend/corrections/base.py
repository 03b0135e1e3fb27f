"""What is done for the reused tokens that are *not* recomputed.

`shift` (ours; akin to AgentKVShift, arXiv 2607.21604): the recomputed tokens of a chunk show how this prompt moves its
keys and values away from the stored ones. Per layer and chunk, the mean of (fresh - stored) over the recomputed tokens,
shrunk towards the mean over all chunks, is added at half its size to the chunk's other tokens. Keys are compared and
moved before RoPE.

`ridge` (ours): the same observation, taken further. Per layer and kv head, a linear map from a token's stored key and
value to its deviation is fitted on the recomputed tokens of this very prompt, on top of each chunk's mean deviation, and
predicts the deviation of every other token. Nothing is calibrated beforehand. With few recomputed tokens the penalty
leaves little but the means, and they shrink towards zero themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from blendserve.blend.cache import KVCache
from blendserve.blend.rope import inverse
from blendserve.blend.rows import Rows
from blendserve.core import Span
from blendserve.models.adapter import Adapter, Rope, Ropes
from blendserve.native import move as native
from blendserve.native.move import Fresh, How

SCALE = 0.5  # shift: a recomputed token moves more than the others: that is why it was chosen
WEIGHT = 16.0  # tokens' worth of trust in the mean over all chunks
STILL = 40.0  # ridge: tokens' worth of trust in nothing having moved at all
PENALTY = 8.0  # ridge: per feature of unit size; few tokens must not explain themselves by many features


class Correction(ABC):
    """Adjusts stored KV in a request's cache, before the fresh rows are written over it."""

    name: ClassVar[str]

    @abstractmethod
    def apply(self, l: int, rows: Rows, keys: Tensor, values: Tensor) -> None:
        """rows: ascending; keys (after RoPE) and values [K, S, D], fresh at these rows."""


class NoCorrection(Correction):
    """Stored KV is used as it is."""

    name = "none"

    def apply(self, l: int, rows: Rows, keys: Tensor, values: Tensor) -> None:
        return


class Split(NamedTuple):
    """The tokens of the chunks, counted from where the first one starts, as `Fresh` wants them."""

    rows: Tensor
    at: Tensor
    sizes: list[int]
    others: Tensor
    other_sizes: list[int]

    def to(self, device: torch.device) -> Split:
        return self._replace(rows=self.rows.to(device), at=self.at.to(device), others=self.others.to(device))


class _Moving(Correction):
    """What shift and ridge share: from the recomputed tokens of each chunk to all of its tokens."""

    def __init__(self, adapter: Adapter, cache: KVCache, ropes: Ropes, spans: Sequence[Span]) -> None:
        self._adapter, self._cache, self._spans = adapter, cache, spans
        self._here = here = slice(spans[0].start, spans[-1].stop)
        there = {id(rope): rope.at(here) for rope in ropes}  # layers share them
        self._ropes = [there[id(rope)] for rope in ropes]
        self._how = self._constants(2 * adapter.head_dim)
        self._seen: tuple[Rows, Split] | None = None

    @classmethod
    @abstractmethod
    def _constants(cls, features: int) -> How: ...

    def apply(self, l: int, rows: Rows, keys: Tensor, values: Tensor) -> None:
        split = self._split(rows)
        if l == 0 or not len(split.at):  # layer 0's keys and values depend on their token alone
            return
        stored = self._cache.keys[l][:, self._here], self._cache.values[l][:, self._here]
        move(self._adapter, stored[0], stored[1], Fresh(keys, values, *split), self._ropes[l], self._how)

    def _split(self, rows: Rows) -> Split:
        """Which tokens of the chunks are among the rows; rows seldom differ from layer to layer."""
        if self._seen is None or self._seen[0] is not rows:
            self._seen = rows, split(rows.here, self._spans).to(rows.there.device)
        return self._seen[1]


class Shift(_Moving):
    """See the module's docstring."""

    name = "shift"

    @classmethod
    def _constants(cls, features: int) -> How:
        return How(WEIGHT, still=0.0, scale=SCALE, penalty=None)


class Ridge(_Moving):
    """See the module's docstring."""

    name = "ridge"

    @classmethod
    def _constants(cls, features: int) -> How:
        return How(WEIGHT, STILL, scale=1.0, penalty=PENALTY * features)


def split(rows: Tensor, spans: Sequence[Span]) -> Split:
    """The tokens of these spans, by whether they are among the ascending positions `rows` [S]."""
    edges = torch.searchsorted(rows, torch.tensor([(s.start, s.stop) for s in spans])).tolist()
    which = torch.cat([torch.arange(*edge) for edge in edges])
    tokens, start = torch.cat([torch.arange(s.start, s.stop) for s in spans]), spans[0].start
    others = tokens[~torch.isin(tokens, rows)]
    sizes = [last - first for first, last in edges]
    left = [len(span) - size for span, size in zip(spans, sizes, strict=True)]
    return Split(which, rows[which] - start, sizes, others - start, left)


def move(
    adapter: Adapter,
    keys: Tensor,
    values: Tensor,
    fresh: Fresh,
    rope: Rope,
    how: How,
) -> None:
    """Move the other tokens' keys (after RoPE) and values [K, N, D] as the recomputed tokens of their chunks moved."""
    if adapter.turns_halves and native.takes(keys, values, rope.cos, rope.sin):
        native.move(keys, values, fresh, rope.cos, rope.sin, how)
    else:
        move_plainly(keys, values, fresh, rope, how, adapter.rotate)


def move_plainly(
    keys: Tensor, values: Tensor, fresh: Fresh, rope: Rope, how: How, rotate: Callable[[Tensor, Rope], Tensor]
) -> None:
    """The same on plain torch, on any device and in any dtype, for any rotation."""
    at, others = fresh.at, fresh.others
    there, elsewhere = rope.at(at), rope.at(others)
    stored = torch.cat([rotate(keys[:, at], inverse(there)), values[:, at]], dim=-1)
    now = torch.cat([rotate(fresh.keys[:, fresh.rows], inverse(there)), fresh.values[:, fresh.rows]], dim=-1)
    known = stored.to(torch.promote_types(keys.dtype, torch.float32))
    moved = now - known
    means = _means(moved, fresh.sizes, how)
    shift = how.scale * _spread(means, fresh.other_sizes)
    if how.penalty is not None:
        weights, constant = _fit(known, moved - _spread(means, fresh.sizes), how.penalty)
        theirs = torch.cat([rotate(keys[:, others], inverse(elsewhere)), values[:, others]], dim=-1)
        shift += theirs.to(known.dtype) @ weights + constant
    by_key, by_value = shift.to(keys.dtype).chunk(2, dim=-1)
    keys[:, others] += rotate(by_key, elsewhere)
    values[:, others] += by_value


def _spread(means: Tensor, sizes: Sequence[int]) -> Tensor:
    """[K, chunks, F] -> [K, tokens, F]"""
    return torch.repeat_interleave(means, torch.tensor(sizes, device=means.device), dim=1)


def _means(moved: Tensor, sizes: Sequence[int], how: How) -> Tensor:
    """Deviations [K, S, F] of the recomputed tokens, grouped by chunk -> the mean [K, chunks, F] of each, shrunk.

    All chunks' towards zero, as if `still` more tokens had not moved; a chunk's own towards that.
    """
    overall = moved.sum(dim=1) / (moved.shape[1] + how.still)
    parts = torch.split(moved, list(sizes), dim=1)
    return torch.stack(
        [overall + (p - overall[:, None]).sum(dim=1) / (p.shape[1] + how.weight) for p in parts], dim=1
    )


def _fit(known: Tensor, left: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Ridge regression of `left` [K, S, 2D] on stored keys and values [K, S, 2D], centred, and of unit size each.

    -> W [K, 2D, 2D] and c [K, 1, 2D] such that known W + c predicts `left`.
    """
    mean = known.mean(dim=1, keepdim=True)
    x = known - mean
    key, value = (half.square().mean(dim=(1, 2), keepdim=True) for half in x.chunk(2, dim=-1))
    size = (
        torch.cat([key, value], dim=-1).sqrt().clamp(min=1e-6)
    )  # [K, 1, 2]: all dims of each are scaled alike
    size = size.repeat_interleave(x.shape[-1] // 2, dim=-1)
    weights = _ridge(x / size, left, penalty) / size.mT
    return weights, -(mean @ weights)


def _ridge(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """W [K, F, G] with the least |x W - y|^2 + penalty |W|^2, for x [K, S, F], y [K, S, G]."""
    few = x.shape[1] < x.shape[2]  # then the system of the rows is the smaller one; both have this solution
    gram = x @ x.mT if few else x.mT @ x
    gram.diagonal(dim1=1, dim2=2).add_(penalty)
    factor, _ = torch.linalg.cholesky_ex(gram)  # NaN in, NaN out: what is wrong is told by the gate, not here
    return x.mT @ torch.cholesky_solve(y, factor) if few else torch.cholesky_solve(x.mT @ y, factor)


CORRECTIONS: dict[str, type[Shift] | type[Ridge]] = {c.name: c for c in (Shift, Ridge)}


def make_correction(
    name: str, adapter: Adapter, cache: KVCache, ropes: Ropes, spans: Sequence[Span]
) -> Correction:
    """The correction of this name for one request."""
    return NoCorrection() if name == "none" or not spans else CORRECTIONS[name](adapter, cache, ropes, spans)
