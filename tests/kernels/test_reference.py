"""Blocked attention by position against the formula, written out over a dense mask in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blendserve.kernels.ops import attend
from blendserve.kernels.rows import SCORE_BUDGET, plan_rows
from blendserve.kernels.types import AttentionSpec
from tests.support.blending import assert_near


def formula(q: Tensor, keys: Tensor, values: Tensor, positions: list[int], spec: AttentionSpec) -> Tensor:
    """softmax(scale * q k^T + mask) v over a dense mask -> [S, H * D]."""
    group = q.shape[0] // keys.shape[0]
    keys, values = (x.double().repeat_interleave(group, dim=0) for x in (keys, values))
    row, key = torch.tensor(positions)[:, None], torch.arange(keys.shape[1])
    seen = (key <= row) & (key > row - (spec.window or keys.shape[1]))
    scores = spec.scale * (q.double() @ keys.transpose(1, 2))
    out = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1) @ values
    return out.transpose(0, 1).flatten(1)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    total = draw(st.sampled_from([1, 2, 9, 40, 200, 300]))
    share, seed = draw(st.sampled_from([0.02, 0.3, 1.0])), draw(st.integers(0, 999))
    chosen = torch.rand(total, generator=torch.Generator().manual_seed(seed)) < share
    chosen[draw(st.integers(0, total - 1))] = True
    return {
        "total": total,
        "positions": chosen.nonzero()[:, 0].tolist(),
        "n_kv": draw(st.integers(1, 3)),
        "group": draw(st.integers(1, 3)),
        "dim": draw(st.sampled_from([2, 8, 16])),
        "window": draw(st.none() | st.integers(1, total + 5)),
        "seed": seed,
    }


def check(
    case: dict[str, Any], dtype: torch.dtype = torch.float32, bound: float = 1e-5, slip: int = 0
) -> None:
    """`slip` misplaces the rows by so many positions: then the check must fail."""
    generator = torch.Generator().manual_seed(case["seed"])
    n_heads = case["n_kv"] * case["group"]
    positions, dim = case["positions"], case["dim"]
    q = torch.randn(n_heads, len(positions), dim, generator=generator).to(dtype)
    keys, values = (
        torch.randn(case["n_kv"], case["total"] + 3, dim, generator=generator).to(dtype) for _ in range(2)
    )
    spec = AttentionSpec(scale=1 / math.sqrt(dim), window=case["window"])
    plan = plan_rows(torch.tensor(positions) + slip, case["group"], case["window"])
    got = attend(q, keys, values, spec, plan)
    assert got.dtype == dtype
    assert_near(got, formula(q, keys, values, positions, spec), bound)


@given(cases())
def test_equals_the_formula(case: dict[str, Any]) -> None:
    check(case)


@given(cases())
def test_bf16_is_within_its_rounding(case: dict[str, Any]) -> None:
    # Values reach about 4; weights, scores and output are each rounded to 8 bits of mantissa.
    check(case, torch.bfloat16, bound=0.1)


def test_the_check_sees_rows_that_are_one_position_off() -> None:
    case = dict(total=30, positions=[3, 4, 9, 20, 21], n_kv=2, group=2, dim=8, window=None, seed=0)  # noqa: C408
    check(case)
    with pytest.raises(AssertionError, match="max difference"):
        check(case, slip=1)


@pytest.mark.parametrize("window", [None, 7])
def test_what_a_row_may_not_see_has_no_influence(window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    q, keys, values = (torch.randn(2, n, 8, generator=generator) for n in (3, 30, 30))
    positions = torch.tensor([5, 11, 20])
    plan, spec = plan_rows(positions, 1, window), AttentionSpec(0.3, window)
    before = attend(q, keys, values, spec, plan)
    later = torch.arange(30) > 11
    keys[:, later], values[:, later] = 100.0, 100.0
    after = attend(q, keys, values, spec, plan)
    assert torch.equal(before[:2], after[:2])
    assert not torch.equal(before[2], after[2])


def test_large_scores_stay_within_the_budget() -> None:
    positions = torch.arange(4096)
    plan = plan_rows(positions, group=32)
    assert [b.start for b in plan.blocks[1:]] == [b.stop for b in plan.blocks[:-1]]
    assert (plan.blocks[0].start, plan.blocks[-1].stop) == (0, 4096)
    assert all(32 * (b.stop - b.start) * (b.hi - b.lo) < 2 * SCORE_BUDGET for b in plan.blocks)
