"""Each correction against loops over chunks, heads and tokens; the ridge by least squares over added rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from blendserve.blend.corrections.base import WEIGHT, Correction
from blendserve.blend.corrections.prior import (
    BEYOND,
    FIRST_KEYS,
    LAST_KEYS,
    LEAST,
    TRUST,
    VALUES,
    WHOLE,
    PriorRidge,
)
from blendserve.blend.corrections.ridge import KEY_SCALE, PENALTY, VALUE_SCALE, ZERO_PRIOR, Ridge
from blendserve.blend.corrections.shift import SCALE, Shift
from blendserve.blend.loader import KVLoader
from blendserve.blend.priors import Priors
from blendserve.core import Span
from blendserve.kernels.rows import Rows
from blendserve.kernels.types import CorrectionParams, Ropes
from blendserve.models.adapter import Adapter
from blendserve.models.kv_cache import KVCache
from blendserve.registry import CORRECTIONS
from tests.support.blending import assert_near, blend, distance, lay, some_prompt
from tests.support.models import KINDS, tiny_adapter

SCALES = KEY_SCALE, VALUE_SCALE


def shifted(stored: Tensor, fresh: Tensor, rows: list[int], spans: list[Span]) -> Tensor:
    """stored [K, T, D], fresh [K, S, D] at `rows`, both before RoPE -> stored with each span moved by its shift."""
    difference = {at: fresh[:, i] - stored[:, at] for i, at in enumerate(rows)}
    inside = [at for at in rows if any(s.start <= at < s.stop for s in spans)]
    if not inside:
        return stored.clone()
    overall = torch.stack([difference[at] for at in inside]).mean(0)
    out = stored.clone()
    for span in spans:
        mine = [difference[at] for at in inside if span.start <= at < span.stop]
        shift = (sum(mine, torch.zeros_like(overall)) + WEIGHT * overall) / (len(mine) + WEIGHT)
        for at in set(range(span.start, span.stop)) - set(inside):
            out[:, at] += SCALE * shift
    return out


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

    def check(self, keys: Tensor, values: Tensor) -> None:
        """What the cache must hold now: keys before RoPE and values."""
        assert_near(self.cache.values[1], values, 1e-4)
        assert_near(self.cache.keys[1], self.adapter.rotate(keys, self.ropes[1]), 1e-4)


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


cases = given(
    st.lists(st.sampled_from([1, 3, 8]), min_size=1, max_size=4), st.integers(0, 2**20), st.integers(0, 99)
)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=30)
@cases
def test_shift_equals_the_loop(name: str, lengths: list[int], picks: int, seed: int) -> None:
    case = some_case(name, lengths, picks, seed)
    case.apply(Shift)
    pairs = zip(case.stored, case.fresh, strict=True)
    case.check(*(shifted(stored, fresh, case.rows, case.spans) for stored, fresh in pairs))


def expectations(case: Case, known: Priors) -> Tensor:
    """What priors expect of every token, [K, T, 2D]: each is the sum of its numbers' rows."""
    weights, constant = known.layer(1)
    out = constant[:, None].repeat(1, case.stored[0].shape[1], 1)
    for j, column in enumerate(torch.cat(case.stored, dim=-1).unbind(dim=-1)):
        out += column[..., None] * weights[:, j, None]
    return out


def shares(expected: Tensor, moved: Tensor) -> Tensor:
    """[n, 2D] of one head -> by how much of it to go, [2D]: the slope as if TRUST more tokens had moved as expected."""
    found = []
    for e, m in zip(expected.chunk(2, dim=-1), moved.chunk(2, dim=-1), strict=True):
        typical = float(e.pow(2).sum() / max(1, len(e)))
        top, bottom = float((e * m).sum()) + TRUST * typical, float(e.pow(2).sum()) + TRUST * typical
        found += [min(1.0, max(0.0, top / bottom)) if bottom else 1.0] * e.shape[-1]
    return torch.tensor(found)


def ridged(case: Case, known: Priors | None = None) -> tuple[Tensor, Tensor]:
    """What `ridge` makes of it, head by head: ridge regression is least squares with sqrt(penalty) rows added.

    known: what `prior` makes of it.
    """
    kept = [(i, at) for i, at in enumerate(case.rows) if any(s.start <= at < s.stop for s in case.spans)]
    some = min(1.0, len(kept) / sum(map(len, case.spans)) / WHOLE)
    dare, last = some + (1 - some) * LEAST, case.adapter.n_layers - 1
    learnt = SCALES if known is None else tuple(dare * scale for scale in BEYOND)
    of_expected = dare * ((last - 1) * FIRST_KEYS + LAST_KEYS) / last, dare * VALUES  # in layer 1
    expected = torch.zeros(*case.stored[0].shape[:2], 2 * case.stored[0].shape[2])
    other = torch.ones(case.spans[-1].stop)  # how much of what a token could look at is no text of its chunk
    if known is not None:
        for span in case.spans:
            other[span.start : span.stop] = span.start / span.stop
        expected = expectations(case, known)
        expected[:, : len(other)] *= other[:, None]
    out = [part.clone() for part in case.stored]
    if not kept:
        for span in case.spans:
            here = slice(span.start, span.stop)
            for part, half, scale in zip(out, expected.chunk(2, dim=-1), of_expected, strict=True):
                part[:, here] += scale * half[:, here]
        return out[0], out[1]
    which = [next(n for n, s in enumerate(case.spans) if s.start <= at < s.stop) for _, at in kept]
    for head in range(case.adapter.n_kv_heads):
        old = [part[head] for part in case.stored]
        moved = torch.stack(
            [torch.cat([f[head, i] - o[at] for f, o in zip(case.fresh, old, strict=True)]) for i, at in kept]
        )
        told = expected[head, [at for _, at in kept]]
        share = shares(told, moved)
        moved = moved - share * told
        overall = moved.sum(0) / (len(kept) + ZERO_PRIOR)
        means = []
        for n in range(len(case.spans)):
            mine = [m - overall for m, w in zip(moved, which, strict=True) if w == n]
            means.append(overall + sum(mine, torch.zeros_like(overall)) / (len(mine) + WEIGHT))
        where = [at for _, at in kept]
        centre = [o[where].mean(0) for o in old]
        sample = [(o[where] - c) * other[where, None] for o, c in zip(old, centre, strict=True)]
        size = [x.pow(2).mean().sqrt().clamp(min=1e-6) for x in sample]

        def features(at: list[int]) -> Tensor:
            scaled = [(o[at] - c) * other[at, None] / s for o, c, s in zip(old, centre, size, strict=True)]  # noqa: B023
            return torch.cat(scaled, dim=-1)

        x, y = (
            features([at for _, at in kept]),
            torch.stack([m - means[w] for m, w in zip(moved, which, strict=True)]),
        )
        width = x.shape[1]
        added = (PENALTY * width) ** 0.5 * torch.eye(width)
        solved = torch.linalg.lstsq(torch.cat([x, added]), torch.cat([y, torch.zeros(width, width)])).solution
        for n, span in enumerate(case.spans):
            for at in set(range(span.start, span.stop)) - {at for _, at in kept}:
                beyond = means[n] + features([at])[0] @ solved
                for said, scales in ((beyond, learnt), (share * expected[head, at], of_expected)):
                    for part, delta, scale in zip(out, said.chunk(2), scales, strict=True):
                        part[head, at] += scale * delta
    return out[0], out[1]


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=15)
@cases
def test_ridge_equals_least_squares(name: str, lengths: list[int], picks: int, seed: int) -> None:
    case = some_case(name, lengths, picks, seed)
    wanted = ridged(case)
    case.apply(Ridge)
    case.check(*wanted)


def some_priors(adapter: Adapter, seed: int) -> Priors:
    size, generator = 2 * adapter.head_dim, torch.Generator().manual_seed(seed)
    shape = adapter.n_layers - 1, adapter.n_kv_heads, size
    weights = 0.3 * torch.randn(*shape, size, generator=generator) / size**0.5
    return Priors(weights, 0.3 * torch.randn(shape, generator=generator))


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@settings(max_examples=15)
@cases
@example(lengths=[30, 20], picks=0b1000010, seed=0)  # few of many: moves are smaller
def test_prior_equals_what_is_expected_and_least_squares_on_the_rest(
    name: str, lengths: list[int], picks: int, seed: int
) -> None:
    case = some_case(name, lengths, picks, seed)
    known = some_priors(case.adapter, seed)
    wanted = ridged(case, known)
    assert case.apply(PriorRidge, known=known)
    case.check(*wanted)


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
