"""The compiled kernel against the formula, against plain torch, and against itself in other company."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blendserve.kernels import verify
from blendserve.kernels.cpu.attend import WATCHED_ROWS, attend_with_scores, fits, run
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import dtype_of, loaded
from blendserve.kernels.ops import ATTEND, attend
from blendserve.kernels.reference import attend_reference, formula
from blendserve.kernels.rows import RowPlan, plan_rows
from blendserve.kernels.types import AttentionSpec
from tests.support.blending import assert_near, lay, probe, some_prompt
from tests.support.models import tiny_adapter

OPERATION = "attend"
EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 300, 600)  # vectors, strips and blocks end here


BOUNDS = {
    torch.bfloat16: 0.04,
    torch.float32: 1e-5,
}  # values reach about 4; of bf16, weights and output are rounded


@dataclass(frozen=True)
class Case:
    """Rows over a slice of a cache whose other memory holds NaN. Made in bf16, whose numbers fp32 has, too."""

    q: Tensor
    keys: Tensor
    values: Tensor
    at: Tensor
    spec: AttentionSpec

    def to(self, level: Level) -> Case:
        """In the dtype of its kernels."""
        q, keys, values = (x.to(dtype_of(level)) for x in (self.q, self.keys, self.values))
        return Case(q, keys, values, self.at, self.spec)

    def native(self, level: Level, slip: int = 0) -> Tensor:
        assert fits(level, self.q, self.keys, self.values, self.spec, self.plan())
        at = self.plan(slip).positions
        return run(loaded(level), self.q, self.keys, self.values, self.spec, at)

    def plain(self) -> Tensor:
        return attend_reference(self.q, self.keys, self.values, self.spec, self.plan())

    def plan(self, slip: int = 0) -> RowPlan:
        return plan_rows(self.at + slip, self.q.shape[0] // self.keys.shape[0], self.spec.window)

    def watching(self, hidden: Tensor) -> RowPlan:
        group = self.q.shape[0] // self.keys.shape[0]
        return plan_rows(self.at, group, self.spec.window, absent=hidden)

    def formula(self) -> Tensor:
        n = int(self.at[-1]) + 1
        return formula(self.q, self.keys[:, :n], self.values[:, :n], self.at, self.spec)

    def only(self, rows: Tensor) -> Case:
        return Case(self.q[:, rows], self.keys, self.values, self.at[rows], self.spec)


def some_case(
    total: int,
    at: list[int],
    *,
    n_kv: int = 2,
    group: int = 3,
    dim: int = 64,
    window: int | None = None,
    softcap: float | None = None,
    size: float = 1.0,
    seed: int = 0,
) -> Case:
    """Keys and values at 0 .. total - 1 of a cache with room for 9 more; queries as a projection leaves them."""
    generator = torch.Generator().manual_seed(seed)
    cache = torch.full((2, n_kv, total + 9, dim), float("nan"))
    cache[:, :, :total] = torch.randn(2, n_kv, total, dim, generator=generator)
    q = size * torch.randn(len(at), n_kv * group, dim, generator=generator)
    keys, values = cache.to(torch.bfloat16)
    spec = AttentionSpec(1 / math.sqrt(dim), window, softcap)
    return Case(q.to(torch.bfloat16).transpose(0, 1), keys, values, torch.tensor(at), spec)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    total, seed = draw(st.sampled_from(EDGES)), draw(st.integers(0, 999))
    share = draw(st.sampled_from([0.02, 0.3, 1.0]))
    chosen = torch.rand(total, generator=torch.Generator().manual_seed(seed)) < share
    chosen[draw(st.integers(0, total - 1))] = True
    return some_case(
        total,
        chosen.nonzero()[:, 0].tolist(),
        n_kv=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 8])),
        dim=draw(st.sampled_from([16, 32, 48, 64, 80, 96, 112, 128])),
        window=draw(st.none() | st.integers(1, total + 5)),
        softcap=draw(st.none() | st.floats(0.5, 30)),
        seed=seed,
    )


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check(level: Level, case: Case, slip: int = 0) -> None:
    case = case.to(level)
    assert_near(case.native(level, slip).double(), case.formula(), BOUNDS[dtype_of(level)])


@given(case=cases())
def test_equals_the_formula(level: Level, case: Case) -> None:
    check(level, case)


@given(case=cases())
def test_equals_plain_torch_within_rounding(level: Level, case: Case) -> None:
    case = case.to(level)
    assert_near(case.native(level), case.plain(), 2.5 * BOUNDS[dtype_of(level)])


@given(case=cases())
def test_threads_do_not_show(level: Level, case: Case) -> None:
    case = case.to(level)
    with threads(1):
        alone = case.native(level)
    with threads(2):
        assert torch.equal(case.native(level), alone)


@given(case=cases(), seed=st.integers(0, 999))
def test_a_row_does_not_see_which_others_are_computed_with_it(level: Level, case: Case, seed: int) -> None:
    case = case.to(level)
    rows = torch.rand(len(case.at), generator=torch.Generator().manual_seed(seed)) < 0.3
    rows[-1] = True
    with threads(2):
        assert torch.equal(case.native(level)[rows], case.only(rows).native(level))


def test_the_check_sees_rows_that_are_one_position_off(level: Level) -> None:
    case = some_case(30, [3, 4, 9, 20, 21])
    check(level, case)
    with pytest.raises(AssertionError, match="max difference"):
        check(level, case, slip=1)
    with pytest.raises(AssertionError, match="max difference"):
        check(level, some_case(300, [3, 4, 9, 200, 210], window=5), slip=-1)


def test_is_closer_to_the_formula_than_plain_torch(level: Level) -> None:
    """In fp32, where both are exact to rounding, as close."""
    case = some_case(600, list(range(0, 600, 3))).to(level)
    wanted = case.formula()
    ours, plain = (float((x.double() - wanted).square().mean()) for x in (case.native(level), case.plain()))
    assert ours < (plain if dtype_of(level) == torch.bfloat16 else 2 * plain)


def test_one_row_over_many_blocks_and_rows_of_every_length(level: Level) -> None:
    check(level, some_case(3000, [2999]))
    check(level, some_case(1300, list(range(1300)), n_kv=1, group=1))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_scores_far_apart_neither_overflow_nor_lose_the_winner(level: Level, softcap: float | None) -> None:
    check(level, some_case(600, [0, 5, 300, 599], size=300.0, softcap=softcap))


def test_what_a_row_may_not_see_has_no_influence(level: Level) -> None:
    case = some_case(300, [5, 110, 200], window=50).to(level)
    before = case.native(level)
    for part in (case.keys, case.values):
        part[:, 6:61] = 100.0
        part[:, 111:151] = 100.0
    assert torch.equal(case.native(level), before)
    case.keys[:, 110] = 100.0
    assert not torch.equal(case.native(level)[1], before[1])


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to(torch.float16),
        lambda x: x[..., :40],
        lambda x: torch.cat([x] * 5, dim=-1),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    ],
    ids=["fp16", "a head of 40", "a head of 320", "dims apart in memory"],
)
def test_leaves_to_torch_what_it_cannot_do(level: Level, change) -> None:  # type: ignore[no-untyped-def]
    case = some_case(64, [3, 40, 63]).to(level)
    q, keys, values = (change(x) for x in (case.q, case.keys, case.values))
    assert not fits(level, q, keys, values, case.spec, case.plan())
    args = q, keys[:, :64], values[:, :64], case.spec, case.plan()
    assert "kernel" not in ATTEND.select_backend(*args).name
    assert_near(attend(*args).double(), attend_reference(*args).double(), 0.1)


def test_a_row_behind_the_last_key_is_an_error_and_not_a_read_behind_it() -> None:
    case = some_case(64, [3, 40, 63])
    with pytest.raises(ValueError, match="position 63"):
        attend(case.q, case.keys[:, :60], case.values[:, :60], case.spec, case.plan())


def looked_at(case: Case, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """By definition: output, and per key the norm over rows of the mean over heads of the weights, in float64."""
    spec, n = case.spec, len(hidden)
    group = case.q.shape[0] // case.keys.shape[0]
    keys = case.keys[:, :n].double().repeat_interleave(group, dim=0)
    values = case.values[:, :n].double().masked_fill(hidden[:, None], 0).repeat_interleave(group, dim=0)
    scores = spec.scale * (case.q.double() @ keys.transpose(1, 2))
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    row, key = case.at[:, None], torch.arange(n)
    unseen = (key > row) | (key <= row - (spec.window or n)) | hidden
    weights = torch.softmax(scores.masked_fill(unseen, float("-inf")), dim=-1)
    taken = (weights * values.norm(dim=-1)[:, None]).mean(dim=0).norm(dim=0)
    return (weights @ values).transpose(0, 1).flatten(1), taken


def check_watch(level: Level, case: Case, hidden: Tensor, slip: int = 0) -> None:
    case = case.to(level)
    n = len(hidden)
    keys, values = case.keys[:, :n], case.values[:, :n].masked_fill(hidden[:, None], 0)
    out, looked = attend_with_scores(level, case.q, keys, values, case.spec, case.watching(hidden.roll(slip)))
    wanted, wanted_looked = looked_at(case, hidden)
    bound = BOUNDS[dtype_of(level)]
    assert_near(out.double(), wanted, bound)
    # Each weight is rounded, and so are the scores' factors.
    torch.testing.assert_close(looked.double(), wanted_looked, rtol=bound / 4, atol=1e-6)


@given(case=cases(), seed=st.integers(0, 999))
def test_watching_tells_how_much_each_key_is_looked_at(level: Level, case: Case, seed: int) -> None:
    hidden = torch.rand(int(case.at[-1]) + 1, generator=torch.Generator().manual_seed(seed)) < 0.3
    hidden[case.at] = False
    check_watch(level, case, hidden)


def test_watching_many_rows_and_over_many_blocks(level: Level) -> None:
    rows = list(range(900, 900 + 2 * WATCHED_ROWS + 3))
    case = some_case(rows[-1] + 1, rows)
    hidden = torch.zeros(rows[-1] + 1, dtype=torch.bool)
    hidden[100:400] = True
    check_watch(level, case, hidden)
    with pytest.raises(AssertionError):
        check_watch(level, case, hidden, slip=1)


def test_the_probe_finds_what_it_finds_on_plain_torch(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, prompt = tiny_adapter("gemma2", dtype_of(level)), some_prompt([40, 9, 30], suffix=7)
    layout = lay(adapter, prompt, [True, False, True])
    ours = probe(adapter, prompt, layout)
    monkeypatch.setenv(verify.SWITCH, "0")
    plain = probe(adapter, prompt, layout)
    assert_near(ours, plain, 0.02 * float(plain.max()))
    assert not ours[layout.fresh & (torch.arange(len(prompt)) < len(prompt) - 7)].any()


@given(case=cases())
def test_watching_changes_no_output(level: Level, case: Case) -> None:
    case = case.to(level)
    n = int(case.at[-1]) + 1
    plan = case.watching(torch.zeros(n, dtype=torch.bool))
    outs = []
    for count in (1, 2):
        with threads(count):
            outs.append(
                attend_with_scores(level, case.q, case.keys[:, :n], case.values[:, :n], case.spec, plan)
            )
    assert torch.equal(outs[0][0], case.native(level))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
