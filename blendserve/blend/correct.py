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
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from blendserve.blend.cache import KVCache
from blendserve.blend.rope import inverse, unrotate
from blendserve.core import Span
from blendserve.models.adapter import Adapter, Ropes
from blendserve.native import ridge as native

SCALE = 0.5  # a recomputed token moves more than the others: that is why it was chosen
WEIGHT = 16.0  # tokens' worth of trust in the mean over all chunks
STILL = 40.0  # ridge: tokens' worth of trust in nothing having moved at all
PENALTY = 8.0  # ridge: per feature of unit size; few tokens must not explain themselves by many features


class Correction(ABC):
    """Adjusts stored KV in a request's cache, before the fresh rows are written over it."""

    name: ClassVar[str]

    @abstractmethod
    def apply(self, l: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """rows [S] ascending positions; keys (after RoPE) and values [K, S, D], fresh at these rows."""


class NoCorrection(Correction):
    """Stored KV is used as it is."""

    name = "none"

    def apply(self, l: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        return


class Shift(Correction):
    """See the module's docstring."""

    name = "shift"

    def __init__(self, adapter: Adapter, cache: KVCache, ropes: Ropes, spans: Sequence[Span]) -> None:
        self._adapter, self._cache, self._ropes, self._spans = adapter, cache, ropes, spans

    def apply(self, l: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        parts = _rows_by_span(rows, self._spans)
        if not any(map(len, parts)):
            return
        chosen = torch.cat([torch.arange(p.start, p.stop) for p in parts]).to(rows.device)
        at = rows[chosen]
        dk = keys[:, chosen] - self._cache.keys[l][:, at]
        dv = values[:, chosen] - self._cache.values[l][:, at]
        dk = unrotate(self._adapter, dk, self._ropes[l].at(at))
        sizes = [len(part) for part in parts]
        for span, k, v in zip(self._spans, _shifts(dk, sizes), _shifts(dv, sizes), strict=True):
            here = slice(span.start, span.stop)
            spread = k[:, None].expand(-1, len(span), -1)
            self._cache.keys[l][:, here] += self._adapter.rotate(spread, self._ropes[l].at(here))
            self._cache.values[l][:, here] += v[:, None]


class Ridge(Correction):
    """See the module's docstring."""

    name = "ridge"

    def __init__(self, adapter: Adapter, cache: KVCache, ropes: Ropes, spans: Sequence[Span]) -> None:
        self._adapter, self._cache, self._spans = adapter, cache, spans
        start = spans[0].start
        self._here = here = slice(start, spans[-1].stop)  # what lies between is overwritten by fresh rows
        self._inside = [Span(span.start - start, span.stop - start) for span in spans]
        there = {id(rope): rope.at(here) for rope in ropes}  # layers share them
        back = {name: inverse(rope) for name, rope in there.items()}
        self._turns = [(there[id(rope)], back[id(rope)]) for rope in ropes]

    def apply(self, l: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        parts = _rows_by_span(rows, self._spans)
        if l == 0 or not any(map(len, parts)):  # layer 0's keys and values depend on their token alone
            return
        chosen = torch.cat([torch.arange(p.start, p.stop) for p in parts]).to(rows.device)
        at, (there, back) = rows[chosen] - self._here.start, self._turns[l]
        turned, stored = self._cache.keys[l][:, self._here], self._cache.values[l][:, self._here]
        plain, fresh = self._adapter.rotate(turned, back), self._adapter.rotate(keys[:, chosen], back.at(at))
        known = torch.cat([plain[:, at], stored[:, at]], dim=-1)
        moved = torch.cat([fresh, values[:, chosen]], dim=-1).float() - known
        sizes = [len(part) for part in parts]
        means = _means(moved, sizes)
        left = moved - torch.cat([means[:, i, None].expand(-1, n, -1) for i, n in enumerate(sizes)], dim=1)
        move = native.move if native.takes(plain, stored) else move_plainly
        shift = move(plain, stored, at, left, means, self._inside, PENALTY * left.shape[-1])
        turned += self._adapter.rotate(shift, there)


def move_plainly(
    keys: Tensor,
    values: Tensor,
    at: Tensor,
    left: Tensor,
    means: Tensor,
    spans: Sequence[Span],
    penalty: float,
) -> Tensor:
    """Move every token's value as those at `at` [S] moved -> what the keys [K, N, D] before RoPE are to move by.

    values [K, N, D]: changed. left [K, S, 2D]: what those moved beyond their chunk's mean, in the dtype to fit
    in. means [K, chunks, 2D].
    """
    known = torch.cat([keys[:, at], values[:, at]], dim=-1).to(left.dtype)
    weights, constant = _fit(known, left, penalty)
    shift = torch.cat([keys, values], dim=-1) @ weights.to(keys.dtype)
    for i, span in enumerate(spans):
        shift[:, span.start : span.stop] += (means[:, i, None] + constant).to(shift.dtype)
    by_key, by_value = shift.chunk(2, dim=-1)
    values += by_value
    return by_key


def _means(moved: Tensor, sizes: Sequence[int]) -> Tensor:
    """Deviations [K, S, F] of the recomputed tokens, grouped by chunk -> the mean [K, chunks, F] of each, shrunk.

    All chunks' towards zero, as if STILL more tokens had not moved; a chunk's own towards that.
    """
    overall = moved.sum(dim=1) / (moved.shape[1] + STILL)
    parts = torch.split(moved, list(sizes), dim=1)
    return torch.stack(
        [overall + (p - overall[:, None]).sum(dim=1) / (p.shape[1] + WEIGHT) for p in parts], dim=1
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


def _rows_by_span(rows: Tensor, spans: Sequence[Span]) -> list[Span]:
    """The index range of each span's rows within ascending `rows`."""
    edges = torch.tensor([edge for span in spans for edge in (span.start, span.stop)], device=rows.device)
    found = torch.searchsorted(rows, edges).tolist()
    return [Span(found[i], found[i + 1]) for i in range(0, len(found), 2)]


def _shifts(difference: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Differences [K, S, D] of the recomputed tokens, grouped by chunk -> the shift [K, D] of each chunk."""
    overall = difference.float().mean(dim=1)
    shifts = []
    for part in torch.split(difference.float(), list(sizes), dim=1):
        shift = (part.sum(dim=1) + WEIGHT * overall) / (part.shape[1] + WEIGHT)
        shifts.append((SCALE * shift).to(difference.dtype))
    return shifts
