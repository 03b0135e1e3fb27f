"""What the corrections are for; their values are in test_differential.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blendserve.blend.corrections.base import Correction
from blendserve.blend.corrections.prior import (
    BEYOND,
    PriorRidge,
)
from blendserve.blend.corrections.ridge import Ridge
from blendserve.blend.corrections.shift import Shift
from blendserve.blend.loader import KVLoader
from blendserve.blend.priors import Priors
from blendserve.core import Span
from blendserve.kernels.rows import Rows
from blendserve.kernels.types import CorrectionParams, Ropes
from blendserve.models.adapter import Adapter
from blendserve.models.kv_cache import KVCache
from blendserve.registry import CORRECTIONS
from tests.support.blending import assert_near, blend, distance, lay, some_priors, some_prompt
from tests.support.models import tiny_adapter


@dataclass(frozen=True)
class Case:
    """Layer 1 of a prompt: what is stored, and what its recomputed rows turned out to be; the suffix has four."""

    adapter: Adapter
    cache: KVCache
    ropes: Ropes
    spans: list[Span]
    rows: list[int]
    stored: tuple[Tensor, Tensor]  # keys before RoPE and values [K, T, D]
    fresh: tuple[Tensor, Tensor]  # [K, S, D]

    def apply(self, correction: type[Correction], l: int = 1, known: Priors | None = None) -> bool:
        at, (keys, values) = torch.tensor(self.rows), self.fresh
        turned = self.adapter.rotate(keys, self.ropes[l].at(at))
        made: Any = correction
        done: bool = made(self.adapter, self.cache, self.ropes, self.spans, known).apply(
            l, Rows(at, at), turned, values
        )
        return done


def some_case(name: str, lengths: list[int], picks: int, seed: int) -> Case:
    adapter, prompt = tiny_adapter(name), some_prompt([2, *lengths])
    layout, n = lay(adapter, prompt), len(prompt)
    ropes, cache = adapter.rope(torch.arange(n)), KVCache(adapter, n)
    cache.keys.zero_()
    cache.values.zero_()
    KVLoader(adapter, cache, layout.placements, ropes).place(1)
    keys, values = torch.zeros(2, *cache.values[1].shape)
    for piece in layout.placements:
        here = slice(piece.span.start, piece.span.stop)
        keys[:, here], values[:, here] = piece.view.layer(1)
    candidates = layout.reusable.nonzero()[:, 0].tolist()
    rows = [at for i, at in enumerate(candidates) if picks >> i & 1] + list(range(n - 4, n))
    generator = torch.Generator().manual_seed(seed)
    shape = (adapter.n_kv_heads, len(rows), adapter.head_dim)
    fresh = (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    return Case(adapter, cache, ropes, list(layout.reusable_spans), rows, (keys, values), fresh)


def expectations(case: Case, known: Priors) -> Tensor:
    """What priors expect of every token, [K, T, 2D]: each is the sum of its numbers' rows."""
    weights, constant = known.layer(1)
    out = constant[:, None].repeat(1, case.stored[0].shape[1], 1)
    for j, column in enumerate(torch.cat(case.stored, dim=-1).unbind(dim=-1)):
        out += column[..., None] * weights[:, j, None]
    return out


class WholeMoves(Ridge):
    """Moves of the size that they are expected to have."""

    scales = 1.0, 1.0

    @classmethod
    def params(
        cls, features: int, depth: float = 0.0, knows: bool = False, recomputed: float = 1.0
    ) -> CorrectionParams:
        key, value = cls.scales
        return Ridge.params(features)._replace(key_scale=key, value_scale=value)


class SmallMoves(WholeMoves):
    """Those beyond what a corpus has shown."""

    scales = BEYOND


def test_what_recomputed_tokens_contradict_does_not_count() -> None:
    """They moved the other way: nothing of the expectation is left, and `prior` does as `ridge` does, but by less."""
    cases = [some_case("llama", [200], int("01" * 100, 2), 0) for _ in range(2)]
    known = some_priors(cases[0].adapter, 0)
    expected = expectations(cases[0], known)[:, cases[0].rows].chunk(2, dim=-1)
    against = tuple(part[:, cases[0].rows] - 5 * e for part, e in zip(cases[0].stored, expected, strict=True))
    for case, correction in zip(cases, (PriorRidge, SmallMoves), strict=True):
        replace(case, fresh=(against[0], against[1])).apply(correction, known=known)
    assert_near(cases[0].cache.values[1], cases[1].cache.values[1])


def test_ridge_finds_a_linear_map_that_a_shift_cannot() -> None:
    case = some_case("llama", [200], int("01" * 100, 2), 0)
    generator = torch.Generator().manual_seed(1)
    keys, values = case.stored
    turn = 2 * torch.randn(values.shape[0], values.shape[2], values.shape[2], generator=generator)
    true = values + values @ turn
    fresh = (keys[:, case.rows], true[:, case.rows])
    left = {}
    for correction in (Shift, WholeMoves):
        tried = some_case("llama", [200], int("01" * 100, 2), 0)
        replace(tried, fresh=fresh).apply(correction)
        others = [at for at in range(tried.spans[0].start, tried.spans[0].stop) if at not in tried.rows]
        left[correction] = float((tried.cache.values[1] - true)[:, others].square().mean())
    assert left[WholeMoves] < 0.5 * left[Shift]


def test_ridge_leaves_layer_0_alone() -> None:
    case = some_case("llama", [8], 0b1010, 0)
    before = case.cache.keys[0].clone()
    case.apply(Ridge, l=0)
    assert torch.equal(case.cache.keys[0], before)


@pytest.mark.parametrize("correction", CORRECTIONS.names)
def test_without_recomputed_tokens_there_is_nothing_to_go_by(correction: str) -> None:
    adapter, prompt = tiny_adapter("llama"), some_prompt([20, 10])
    plain, moved = (blend(adapter, prompt, ratio=0.0, correction=c) for c in ("none", correction))
    assert distance(plain.cache.keys, moved.cache.keys) == 0.0
