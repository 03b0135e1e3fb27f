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
from blendserve.blend.rope import unrotate
from blendserve.core import Span
from blendserve.models.adapter import Adapter, Ropes

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
        self._adapter, self._cache, self._ropes, self._spans = adapter, cache, ropes, spans

    def apply(self, l: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        parts = _rows_by_span(rows, self._spans)
        if l == 0 or not any(map(len, parts)):  # layer 0's keys and values depend on their token alone
            return
        chosen = torch.cat([torch.arange(p.start, p.stop) for p in parts]).to(rows.device)
        begin, end = (
            self._spans[0].start,
            self._spans[-1].stop,
        )  # what lies between is overwritten by fresh rows
        turned, stored = self._cache.keys[l][:, begin:end], self._cache.values[l][:, begin:end]
        rope = self._ropes[l].at(slice(begin, end))
        plain, at = unrotate(self._adapter, turned, rope), rows[chosen] - begin
        fresh = unrotate(self._adapter, keys[:, chosen], rope.at(at))
        moved = torch.cat([fresh - plain[:, at], values[:, chosen] - stored[:, at]], dim=-1).float()
        means = _means(moved, [len(part) for part in parts])
        sizes = torch.tensor([len(part) for part in parts], device=rows.device)
        left = moved - means.repeat_interleave(sizes, dim=1)
        by_key, by_value, constant = _fit(plain[:, at].float(), stored[:, at].float(), left)
        shift = plain @ by_key.to(plain.dtype)
        shift += stored @ by_value.to(stored.dtype)
        for i, span in enumerate(self._spans):
            shift[:, span.start - begin : span.stop - begin] += (means[:, i, None] + constant).to(shift.dtype)
        dk, dv = shift.chunk(2, dim=-1)
        turned += self._adapter.rotate(dk, rope)
        stored += dv


def _means(moved: Tensor, sizes: Sequence[int]) -> Tensor:
    """Deviations [K, S, F] of the recomputed tokens, grouped by chunk -> the mean [K, chunks, F] of each, shrunk.

    All chunks' towards zero, as if STILL more tokens had not moved; a chunk's own towards that.
    """
    overall = moved.sum(dim=1) / (moved.shape[1] + STILL)
    parts = torch.split(moved, list(sizes), dim=1)
    return torch.stack(
        [overall + (p - overall[:, None]).sum(dim=1) / (p.shape[1] + WEIGHT) for p in parts], dim=1
    )


def _fit(keys: Tensor, values: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ridge regression of `left` [K, S, 2D] on keys and values [K, S, D], centred and of unit size each.

    -> A [K, D, 2D], B [K, D, 2D], c [K, 1, 2D] such that keys A + values B + c predicts `left`.
    """
    (keys, key_mean, key_size), (values, value_mean, value_size) = _standard(keys), _standard(values)
    x = torch.cat([keys, values], dim=-1)
    penalty = PENALTY * x.shape[-1] * torch.eye(x.shape[-1], device=x.device)
    by_key, by_value = torch.linalg.solve(x.mT @ x + penalty, x.mT @ left).chunk(2, dim=1)
    by_key, by_value = by_key / key_size, by_value / value_size
    return by_key, by_value, -(key_mean @ by_key + value_mean @ by_value)


def _standard(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [K, S, D] centred and over its size, its mean [K, 1, D], its size [K, 1, 1]: all dims are scaled alike."""
    mean = x.mean(dim=1, keepdim=True)
    size = (x - mean).square().mean(dim=(1, 2), keepdim=True).sqrt().clamp(min=1e-6)
    return (x - mean) / size, mean, size


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
