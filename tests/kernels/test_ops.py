"""Who attends when: the fallbacks against the formula, the table that chooses, and the check before a kernel serves."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blendserve.kernels.cpu import sdpa
from blendserve.kernels.cuda import dense, flex, masked
from blendserve.kernels.operation import Operation
from blendserve.kernels.ops import ATTEND, LINEAR
from blendserve.kernels.reference import attend_reference, formula
from blendserve.kernels.rows import RowPlan, plan_rows
from blendserve.kernels.types import AttentionSpec
from blendserve.kernels.verify import KEYS, SWITCH, Kind, attention_trouble
from tests.kernels.cuda.helpers import Case, make_case, rows_of
from tests.support.blending import assert_near
from tests.support.models import tiny_adapter

CPU = Kind(torch.device("cpu"), torch.float32, 2, 16, False, False)
POSITIONS = (tuple(range(1, KEYS - 2, 3)),)


def attended(way: Any, case: Case) -> Tensor:
    out: Tensor = way.attend(case.q, case.keys, case.values, case.spec, case.plan)
    return out


@settings(max_examples=40)
@given(
    st.sampled_from([1, 2, 100, 300]),
    st.sampled_from([0.05, 0.5, 1.0]),
    st.none() | st.integers(1, 200),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_masked_equals_the_formula(
    total: int, share: float, window: int | None, group: int, seed: int
) -> None:
    case = make_case(rows_of(total, share, seed), group=group, window=window)
    assert_near(attended(masked, case), case.wanted, 1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("total", "share", "window", "softcap"),
    [(1, 1.0, None, None), (400, 0.5, None, None), (300, 0.9, 150, 0.7)],
)
def test_flex_equals_the_formula(total: int, share: float, window: int | None, softcap: float | None) -> None:
    """Few, as without a compiler each takes a second; the block mask has a test of its own."""
    case = make_case(rows_of(total, share, 5), window=window, softcap=softcap)
    assert_near(attended(flex, case), case.wanted, 1e-5)


@given(
    st.sampled_from([1, 127, 128, 129, 700]),
    st.sampled_from([0.05, 0.5, 1.0]),
    st.none() | st.integers(1, 400),
    st.integers(0, 99),
)
def test_flex_skips_no_block_that_is_seen(total: int, share: float, window: int | None, seed: int) -> None:
    at = rows_of(total, share, seed)
    n_keys = int(at[-1]) + 1
    key, row = torch.arange(n_keys)[None], at[:, None]
    seen = (key <= row) & (key > row - (window or n_keys))
    made = flex.block_mask(at, n_keys, window)
    part, whole = torch.zeros(seen.shape, dtype=torch.bool), torch.zeros(seen.shape, dtype=torch.bool)
    for counts, blocks, into in (
        (made.kv_num_blocks, made.kv_indices, part),
        (made.full_kv_num_blocks, made.full_kv_indices, whole),
    ):
        assert counts is not None
        assert blocks is not None
        for b in range(counts.shape[-1]):
            for block in blocks[0, 0, b, : counts[0, 0, b]].tolist():
                into[flex.BLOCK * b : flex.BLOCK * (b + 1), flex.BLOCK * block : flex.BLOCK * (block + 1)] = (
                    True
                )
    assert not (part & whole).any()
    assert bool((part | whole | ~seen).all()), "a key that is seen lies in no block"
    assert bool((seen | ~whole).all()), "a block that is taken whole is not seen whole"


def test_the_check_sees_rows_that_are_one_position_off() -> None:
    case = make_case(torch.tensor([3, 4, 9, 20, 21]), behind=0.5)
    moved = Case(case.q, case.keys, case.values, case.at + 1, case.spec, case.wanted)
    with pytest.raises(AssertionError, match="max difference"):
        assert_near(attended(masked, moved), case.wanted, 1e-5)


def test_masked_cuts_large_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked, "MASK_BUDGET", 1000)
    case = make_case(rows_of(200, 0.5, 7), window=60)
    assert_near(attended(masked, case), case.wanted, 1e-5)


@pytest.mark.parametrize("at", [range(9), range(40, 90), range(33, 34), range(1)])
def test_dense_rows_by_sdpa(at: range) -> None:
    case = make_case(torch.tensor(at), group=3, behind=0.5)
    assert case.plan.dense
    assert_near(dense.sdpa(case.q, case.keys, case.values, case.spec, case.plan), case.wanted, 1e-5)


class FakeFlash:
    """flash-attn's function as its documentation has it, in plain torch: causal is aligned at the bottom right."""

    @staticmethod
    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float = 0.0,
    ) -> Tensor:
        assert causal
        assert window_size[1] == (-1 if window_size[0] < 0 else 0)
        n, m = q.shape[1], k.shape[1]
        window = None if window_size[0] < 0 else window_size[0] + 1
        spec = AttentionSpec(softmax_scale, window, softcap or None)
        plan = plan_rows(torch.arange(m - n, m), q.shape[2] // k.shape[2], window)
        heads, keys, values = (x[0].transpose(0, 1) for x in (q, k, v))
        return attend_reference(heads, keys, values, spec, plan).view(1, n, *q.shape[2:])


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (None, 0.7), (1, 0.7)])
def test_what_flash_attn_is_told(
    monkeypatch: pytest.MonkeyPatch, window: int | None, softcap: float | None
) -> None:
    monkeypatch.setattr(dense, "flash_attn", lambda: FakeFlash)
    case = make_case(torch.arange(20, 50), window=window, softcap=softcap, behind=0.5)
    assert_near(dense.flash(case.q, case.keys, case.values, case.spec, case.plan), case.wanted, 1e-5)


def test_dense_means_side_by_side_and_known() -> None:
    assert plan_rows(torch.arange(3, 9), 1).dense
    assert not plan_rows(torch.tensor([3, 5]), 1).dense
    assert not plan_rows(torch.empty(0, dtype=torch.long), 1).dense
    assert not RowPlan(torch.arange(3), 1, None).dense, "nobody knows them here"


ON_GPUS = {
    "flash-attn",
    "torch's FlashAttention",
    "Triton kernel",
    "FlexAttention",
    "SDPA with masks",
}


def test_without_a_gpu_nothing_of_it_takes_anything() -> None:
    case = make_case(torch.arange(5, 9))
    parts = case.q, case.keys, case.values, case.spec, case.plan
    serving = {backend.name for backend in ATTEND.backends if backend.serves(*parts)}
    assert "plain torch" in serving
    assert not serving & ON_GPUS
    assert not set(tiny_adapter("llama").attention_backends) & ON_GPUS


def test_switched_off_means_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert tiny_adapter("llama").attention_backends == ("plain torch", "plain torch")
    with torch.inference_mode():
        x = torch.randn(3, 8)
        assert LINEAR.select_backend(x, x, None).name == "torch"


@pytest.mark.parametrize(("at", "window"), [((0,), None), ((3, 9, 200), 70), (tuple(range(150)), None)])
def test_sdpa_on_a_cpu_equals_the_formula(at: tuple[int, ...], window: int | None) -> None:
    case = make_case(torch.tensor(at), group=3, window=window, behind=0.5)
    assert_near(attended(sdpa, case), case.wanted, 1e-5)


def test_the_first_that_serves_does_it() -> None:
    """The table's order, with every backend able to do everything but those before it."""
    case = make_case(torch.arange(5, 9))
    parts = case.q, case.keys, case.values, case.spec, case.plan
    names = [backend.name for backend in ATTEND.backends]
    assert names.index("flash-attn") < names.index("torch's FlashAttention") < names.index("Triton kernel")
    assert names[-4:] == ["FlexAttention", "SDPA with masks", "torch's SDPA", "plain torch"]
    for first in range(len(names)):
        able: list[Any] = [
            replace(backend, fits=lambda *_, on=n >= first: on, trouble=lambda *_: "")
            for n, backend in enumerate(ATTEND.backends)
        ]
        table: Any = Operation(*able)
        assert table.select_backend(*parts).name == names[first]


def _far(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> Tensor:
    return attend_reference(q, keys, values, spec, plan_rows(plan.positions + 1, plan.group, plan.window))


def _blind(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> Tensor:
    open_spec = AttentionSpec(spec.scale)
    return attend_reference(q, keys, values, open_spec, plan_rows(plan.positions, plan.group))


def _broken(*_: Any) -> Tensor:
    raise RuntimeError("out of resource: shared memory\nRequired: 232448")


def test_a_kernel_that_is_wrong_does_not_serve() -> None:
    windowed = Kind(torch.device("cpu"), torch.float32, 2, 16, True, False)
    assert attention_trouble((attend_reference,), CPU, POSITIONS) == ""
    assert attention_trouble((attend_reference,), windowed, POSITIONS) == ""
    assert "off by" in attention_trouble((attend_reference, _far), CPU, POSITIONS)
    assert "off by" in attention_trouble((_blind,), windowed, POSITIONS)
    assert attention_trouble((_broken,), CPU, POSITIONS) == "RuntimeError: out of resource: shared memory"


def test_bounds_hold_for_plain_torch_and_not_for_a_coarser_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        kind = Kind(torch.device("cpu"), dtype, 2, 64, False, False)
        assert attention_trouble((attend_reference,), kind, POSITIONS) == ""

    def coarse(q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
        return attend_reference(q.bfloat16(), keys.bfloat16(), values.bfloat16(), *rest).float()

    assert "off by" in attention_trouble((coarse,), CPU, POSITIONS)


BLOCKED = """
import sys
sys.modules.update(dict.fromkeys(("triton", "flash_attn")))  # not to be found, and not to be imported
import torch
import blendserve
from blendserve.kernels.cuda.available import flash_attn, has_triton
from blendserve.kernels.ops import attend
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.types import AttentionSpec
from blendserve.kernels.verify import Kind, triton_trouble
assert not has_triton() and flash_attn() is None
x = torch.randn(2, 4, 16)
out = attend(x, x, x, AttentionSpec(0.3), plan_rows(torch.arange(4), 1))
kind = Kind(torch.device("cuda"), torch.bfloat16, 1, 16, False, False)
print(tuple(out.shape), triton_trouble((), kind, ()), sys.modules["triton"])
"""


def test_everything_imports_and_runs_without_triton_and_flash_attn() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(4, 32) triton is not installed: pip install triton None"


def test_the_formula_is_the_mask_written_out() -> None:
    """Its own check: two rows by hand."""
    x = torch.eye(3)[None]
    got = formula(x[:, :2], x, x, torch.tensor([0, 2]), AttentionSpec(0.0))
    assert torch.allclose(got, torch.tensor([[1.0, 0, 0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64))
