"""The linear kernel against exact sums, against itself in other company, and in the modules of a borrowed model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from blendserve.kernels.cpu import linear as kernel
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import dtype_of
from blendserve.kernels.cpu.linear import FEW, fits
from blendserve.kernels.ops import linear
from blendserve.models.linear_layers import Linears, call_linear
from tests.kernels.cpu.test_attend import threads
from tests.support.models import tiny_adapter

OPERATION = "linear"
Case = tuple[Tensor, Tensor, Tensor | None]
BOUNDS = {torch.bfloat16: (2**-8, 1e-4), torch.float32: (2**-20, 5e-4)}  # rounding of the result, of the sum


def some_case(rows: int, outs: int, depth: int, bias: bool = True, apart: int = 0, seed: int = 0) -> Case:
    """`apart`: numbers between the rows of x and of the weights in memory, NaN, as behind the last row."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for n in (rows, outs):
        whole = torch.full((n, depth + apart), float("nan"))
        whole[:, :depth] = torch.randn(n, depth, generator=generator)
        parts.append(whole.to(torch.bfloat16)[:, :depth])
    return *parts, torch.randn(outs, generator=generator).to(torch.bfloat16) if bias else None  # type: ignore[return-value]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return some_case(
        rows=draw(st.integers(1, FEW + 4) | st.sampled_from([16, 17, 40, 63, 64, 65, 130])),
        outs=2 * draw(st.integers(1, 70)),
        depth=2 * draw(st.integers(1, 70)),
        bias=draw(st.booleans()),
        apart=draw(st.sampled_from([0, 1, 6])),
        seed=draw(st.integers(0, 999)),
    )


@torch.inference_mode()
def ours(level: Level, case: Case) -> Tensor:
    assert fits(level, *case)
    return kernel.linear(level, *case)


def on(level: Level, case: Case) -> Case:
    """Of numbers that bf16 has, in the dtype of its kernels."""
    return tuple(None if x is None else x.to(dtype_of(level)) for x in case)  # type: ignore[return-value]


def check(level: Level, case: Case, lose: int = 0) -> None:
    """`lose`: inputs that the exact sum leaves out: then the check must fail."""
    case = on(level, case)
    x, weight, bias = case
    used = x.shape[1] - lose
    wanted = x[:, :used].double() @ weight[:, :used].double().T + (0 if bias is None else bias.double())
    got = ours(level, case)
    rounding, summing = BOUNDS[dtype_of(level)]
    assert ((got.double() - wanted).abs() <= rounding * wanted.abs() + summing).all()


@given(case=cases())
def test_is_the_exact_sum_rounded_once(level: Level, case: Case) -> None:
    check(level, case)


def test_the_check_sees_a_lost_input(level: Level) -> None:
    for rows in (1, 40):
        with pytest.raises(AssertionError):
            check(level, some_case(rows, 64, 64), lose=1)


@given(case=cases(), seed=st.integers(0, 999))
def test_a_row_does_not_see_which_others_come_with_it_nor_threads(
    level: Level, case: Case, seed: int
) -> None:
    x, weight, bias = case = on(level, case)
    rows = torch.rand(len(x), generator=torch.Generator().manual_seed(seed)) < 0.4
    rows[0] = True
    with threads(1):
        alone = ours(level, (x[rows], weight, bias))
    with threads(2):
        assert torch.equal(ours(level, case)[rows], alone)


@pytest.mark.parametrize("rows", [1, 40, 700])
def test_the_sizes_of_the_bundled_reader(level: Level, rows: int) -> None:
    for outs, depth in ((576, 576), (192, 576), (1536, 576), (576, 1536)):
        check(level, some_case(rows, outs, depth, bias=False))


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w, b: (x.half(), w.half(), b.half()),
        lambda x, w, b: (x[None], w, b),
        lambda x, w, b: (x, w.T.contiguous().T, b),
    ],
    ids=["fp16", "a batch", "weights stored by columns"],
)
@torch.inference_mode()
def test_leaves_to_torch_what_it_cannot_do(level: Level, change: Any) -> None:
    case = change(*on(level, some_case(3, 32, 32)))
    assert not fits(level, *case)
    assert torch.equal(linear(*case), F.linear(*case))


@torch.inference_mode()
def test_sizes_that_are_no_whole_words(level: Level) -> None:
    for x, weight, bias in (some_case(3, 32, 31), some_case(3, 31, 32)):
        case = on(level, (x, weight, bias))
        if dtype_of(level) == torch.float32:
            check(level, case)
        else:
            assert not fits(level, *case)


def test_is_not_used_where_gradients_are_wanted() -> None:
    x, weight, bias = some_case(3, 32, 32)
    weight.requires_grad_()
    assert linear(x, weight, bias).requires_grad


@torch.inference_mode()
def test_a_hook_on_a_borrowed_module_is_still_called() -> None:
    module = nn.Linear(32, 32, dtype=torch.bfloat16)
    x, calls = some_case(3, 32, 32)[0], []
    module.register_forward_hook(lambda *_: calls.append(1))
    call_linear(module, x)
    assert calls


@torch.inference_mode()
def test_modules_of_a_borrowed_model_use_it_only_while_the_mode_is_entered() -> None:
    mlp = tiny_adapter("llama", torch.bfloat16).model.model.layers[0].mlp  # type: ignore[union-attr, index]
    x = some_case(5, 2, 64)[0].contiguous()
    inputs: list[Tensor] = []

    class Listening(Linears):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.linear:
                inputs.append(args[0])
            return super().__torch_function__(func, types, args, kwargs)

    before = mlp(x)
    with Listening():
        inside = mlp(x)
    with pytest.raises(RuntimeError), Listening():
        torch.zeros(2) + torch.zeros(3)
    assert len(inputs) == 3
    assert torch.equal(mlp(x), before)
    assert len(inputs) == 3
    # Two roundings of another order each, seen through a layer.
    assert float((inside - before).abs().max()) <= 2**-6 * float(before.abs().max())
