"""The compiled corrections against the plain form in float64, and against themselves on other threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blendserve.blend.corrections.base import split
from blendserve.core import Span
from blendserve.kernels.cpu.correct import correct, fits
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import dtype_of
from blendserve.kernels.reference import correct_reference
from blendserve.kernels.rotary import Rotary
from blendserve.kernels.types import CorrectionParams, Prior, RecomputedTokens, Rope
from blendserve.kernels.verify import PLAIN_HALVES, some_rope
from tests.support.blending import assert_near

OPERATION = "correct"
BOUNDS = {torch.bfloat16: 0.04, torch.float32: 2e-4}
SHIFT = CorrectionParams(16.0, 0.0, 0.5, 0.6, None)
RIDGE = CorrectionParams(16.0, 40.0, 0.7, 0.9, 800.0, 20.0, 0.5, 0.6)


class Case:
    """Keys and values out of a larger cache, some tokens of theirs recomputed, and a hole of 2 behind each chunk."""

    def __init__(
        self, level: Level, heads: int, dim: int, width: int, lengths: list[int], n: int, seed: int
    ) -> None:
        self.level, dtype = level, dtype_of(level)
        generator = torch.Generator().manual_seed(seed)
        self.spans, end = list[Span](), 0
        for length in lengths:
            self.spans.append(Span(end, end + length))
            end += length + 2

        def some(tokens: int) -> Tensor:
            return torch.randn(heads, tokens, dim, generator=generator).to(dtype)

        self.keys, self.values = some(end), some(end + 9)[:, :end]
        inside = torch.cat([torch.arange(s.start, s.stop) for s in self.spans])
        rows = inside[torch.randperm(len(inside), generator=generator)[:n]].sort().values
        parts = split(rows, self.spans)
        parts = parts._replace(rows=2 * parts.rows + 1, foreign=[0.9, 0.3, 0.6][: len(lengths)])
        fresh_keys = (
            some(2 * len(rows) + 1).transpose(0, 1).contiguous().transpose(0, 1)
        )  # as layers give them
        self.fresh = RecomputedTokens(fresh_keys, some(2 * len(rows) + 1), *parts)
        self.rope = some_rope(end, width, 1.1, generator, dtype)
        size = 2 * dim
        weights = torch.randn(heads, size, size, generator=generator) / size**0.5
        self.prior = Prior(0.5 * weights, torch.randn(heads, size, generator=generator))

    def moved(self, params: CorrectionParams, prior: Prior | None = None) -> list[Tensor]:
        keys, values = self.keys.clone(), self.values.clone()
        given = keys, values, self.fresh, self.rope, PLAIN_HALVES, params, prior
        assert fits(self.level, *given)
        correct(self.level, *given)
        return [keys, values]

    def plainly(self, params: CorrectionParams, prior: Prior | None = None) -> list[Tensor]:
        keys, values = self.keys.double(), self.values.double()
        exact = self.fresh._replace(keys=self.fresh.keys.double(), values=self.fresh.values.double())
        rope = Rope(*(x.double() for x in (self.rope.cos, self.rope.sin)))
        correct_reference(keys, values, exact, rope, PLAIN_HALVES, params, prior)
        return [keys, values]


@given(
    st.sampled_from([1, 2, 3]),
    st.sampled_from([(32, 32), (64, 64), (96, 32), (128, 128), (160, 96)]),
    st.lists(st.sampled_from([1, 5, 6, 7, 96, 130]), min_size=1, max_size=3),
    st.sampled_from([1, 3, 40, 150]),
    st.sampled_from([SHIFT, RIDGE]),
    st.integers(0, 99),
)
def test_equals_the_plain_form(
    level: Level,
    heads: int,
    dims: tuple[int, int],
    lengths: list[int],
    n: int,
    params: CorrectionParams,
    seed: int,
) -> None:
    case = Case(level, heads, *dims, lengths, n, seed)
    for got, wanted in zip(case.moved(params), case.plainly(params), strict=True):
        assert_near(got.double(), wanted, BOUNDS[dtype_of(level)])


@given(
    st.sampled_from([(32, 32), (64, 64), (96, 32), (160, 96)]),
    st.lists(st.sampled_from([1, 7, 96, 130]), min_size=1, max_size=3),
    st.sampled_from([0, 1, 2, 40, 150]),
    st.integers(0, 99),
)
def test_a_prior_equals_the_plain_form(
    level: Level, dims: tuple[int, int], lengths: list[int], n: int, seed: int
) -> None:
    case = Case(level, 2, *dims, lengths, n, seed)
    for got, wanted in zip(case.moved(RIDGE, case.prior), case.plainly(RIDGE, case.prior), strict=True):
        assert_near(got.double(), wanted, BOUNDS[dtype_of(level)])


@pytest.mark.parametrize("params", [SHIFT, RIDGE])
def test_a_token_out_of_place_is_seen(level: Level, params: CorrectionParams) -> None:
    case = Case(level, 2, 64, 64, [40, 50], 30, 0)
    wanted = case.plainly(params)
    case.fresh = case.fresh._replace(rows=case.fresh.rows.flip(0))
    for got, right in zip(case.moved(params), wanted, strict=True):
        with pytest.raises(AssertionError):
            assert_near(got.double(), right, BOUNDS[torch.bfloat16])


@pytest.mark.parametrize("params", [SHIFT, RIDGE])
def test_recomputed_tokens_and_what_lies_between_chunks_stay(level: Level, params: CorrectionParams) -> None:
    case = Case(level, 2, 64, 64, [40, 50], 30, 0)
    case.keys[:, 40:42] = case.values[:, 40:42] = float("nan")
    kept = [*case.fresh.at.tolist(), 40, 41]
    for before, after in zip((case.keys, case.values), case.moved(params), strict=True):
        assert torch.equal(before[:, kept].nan_to_num(9.0), after[:, kept].nan_to_num(9.0))
        assert after[:, case.fresh.others].isfinite().all()
        assert (before != after)[:, case.fresh.others].any(dim=-1).all()


def test_threads_do_not_matter(level: Level) -> None:
    found = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            found.append(Case(level, 3, 64, 64, [300, 200], 100, 1).moved(RIDGE))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_refuses_what_it_cannot_do(level: Level) -> None:
    dtype = dtype_of(level)
    x = torch.zeros(2, 8, 64, dtype=dtype)
    turn, some = torch.zeros(8, 64, dtype=dtype), Case(level, 2, 64, 64, [8], 3, 0).fresh

    def can(keys: Tensor, values: Tensor, cos: Tensor) -> bool:
        return fits(level, keys, values, some, Rope(cos, cos), PLAIN_HALVES, RIDGE)

    assert can(x, x, turn)
    assert not can(x.half(), x.half(), turn)
    assert not can(x[..., :48].contiguous(), x, turn)
    assert not can(x, x, turn[:, :16])
    assert not can(x.transpose(1, 2), x.transpose(1, 2), turn)
    assert not fits(level, x, x, some, Rope(turn, turn), Rotary(PLAIN_HALVES.rotate, None), RIDGE)  # type: ignore[arg-type]
