"""Which backend serves: the table's order, and the check before a kernel serves."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blendserve.kernels import ops, selfcheck
from blendserve.kernels.cuda import flash
from blendserve.kernels.dispatch import KernelOp
from blendserve.kernels.reference import attend
from blendserve.kernels.rotary import FORMS as ROTARY_FORMS
from blendserve.kernels.rotary import Rotary
from blendserve.kernels.rows import AttentionPlan, plan_rows
from blendserve.kernels.selfcheck import Kind, attention_trouble, packed_chunks_trouble, placing_trouble
from blendserve.kernels.types import AttentionSpec
from tests.support.kernel_formulas import FlashAttn
from tests.support.kernels import Options, Way, off_gpu, ways

PLAIN = next(way for way in ways() if (way.operation, way.name) == ("attend", "plain_torch"))
CPU = Kind(torch.device("cpu"), torch.float32, 2, 16, 16, False, False)
POSITIONS = (tuple(range(1, selfcheck.KEYS - 2, 3)),)


def test_the_first_that_serves_does_it() -> None:
    """The table's order, with every backend able to do everything but those before it."""
    args = PLAIN.args(torch.float32, {"at": [5, 6, 7, 8]})
    names = [backend.name for backend in ops.attend.backends]
    assert names[-4:] == ["flash-attn", "torch's SDPA", "Triton kernel", "plain torch"]
    for first in range(len(names)):
        able: list[Any] = [
            replace(backend, supports=lambda *_, on=n >= first: on, unavailable_reason=lambda *_: "")
            for n, backend in enumerate(ops.attend.backends[:-1])
        ]
        table: Any = KernelOp(attend, *able)
        assert table.select(*args).name == names[first]


def test_a_row_without_its_key_is_refused() -> None:
    q, keys, values, spec, plan = PLAIN.args(torch.float32, {"at": [3, 63]})
    with pytest.raises(ValueError):  # noqa: PT011
        ops.attend(q, keys[:, :63], values[:, :63], spec, plan)


def test_contiguous_rows_are_known_and_consecutive() -> None:
    assert plan_rows(torch.arange(3, 9), 1).is_contiguous
    assert not plan_rows(torch.tensor([3, 5]), 1).is_contiguous
    assert not plan_rows(torch.empty(0, dtype=torch.long), 1).is_contiguous
    assert not AttentionPlan(torch.arange(3), 1, None).is_contiguous


# Kernels that are wrong do not serve


def failing(*_: Any) -> Tensor:
    raise RuntimeError("out of resource: shared memory\nRequired: 232448")


def test_attention() -> None:
    def one_further(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
        return attend(q, k, v, spec, plan_rows(plan.positions + 1, plan.group, plan.window))

    def without_window(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
        return attend(q, k, v, AttentionSpec(spec.scale), plan_rows(plan.positions, plan.group))

    def in_bf16(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), *rest).float()

    windowed = replace(CPU, windowed=True)
    kinds = [
        CPU,
        windowed,
        *(replace(CPU, dtype=x, dim=64, value_dim=64) for x in (torch.bfloat16, torch.float16)),
    ]
    assert [attention_trouble((attend,), kind, POSITIONS) for kind in kinds] == [""] * 4
    for forms in ((attend, one_further), (in_bf16,), (failing,)):
        assert attention_trouble(forms, CPU, POSITIONS)
    assert attention_trouble((without_window,), windowed, POSITIONS)


@pytest.mark.parametrize("option", ["", "windowed", "softcapped"])
def test_packed_chunks(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class TopLeft(FlashAttn):
        """Right only where there is no prefix, as flash-attn before 2.1."""

        @classmethod
        def flash_attn_varlen_func(cls, *args: Any, **options: Any) -> Tensor:
            out = FlashAttn.flash_attn_varlen_func(*args, **options)
            return out.roll(1, 0) if (options["cu_seqlens_k"] - options["cu_seqlens_q"]).any() else out

    kind = replace(CPU, windowed=option == "windowed", softcapped=option == "softcapped")
    for package in (FlashAttn, TopLeft):
        monkeypatch.setattr(flash, "flash_attn", lambda package=package: package)
        assert bool(packed_chunks_trouble.__wrapped__(kind)) == (package is TopLeft)


@pytest.mark.parametrize("form", ROTARY_FORMS)
def test_placement_by_triton(form: Rotary, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    args = form, torch.device("cpu"), torch.float32, 16, 8
    assert placing_trouble.__wrapped__(*args) == ""
    wrong = next(other for other in ROTARY_FORMS if other.neighbours != form.neighbours)
    monkeypatch.setattr(Rotary, "rotate", lambda _, x, rope, plain=Rotary.rotate: plain(wrong, x, rope))
    assert placing_trouble.__wrapped__(*args)


@pytest.mark.parametrize(
    "way", [way for way in ways() if way.name in {"flash_attn", "flash_attn_packed", "triton"}]
)
def test_a_gpus_kernel_serves_when_its_check_has_passed(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fewer rows than on a GPU: Triton is interpreted."""
    if way.is_triton:
        pytest.importorskip("triton")
    for name, rows in (("ONE_ROW", ((3,),)), ("SCATTERED", ((1, 5),)), ("DENSE", ((2, 3, 4),))):
        monkeypatch.setattr(ops, name, rows)
    options: Options = {"lengths": [2]} if way.operation in {"place", "attend_chunks"} else {"at": [3, 4]}
    args = way.args(torch.float32, options)
    with off_gpu(way):
        assert way.backend.unavailable_reason(*args) == ""


BLOCKED = """
import sys
sys.modules.update(dict.fromkeys(("triton", "flash_attn")))  # not to be found, and not to be imported
import torch, blendserve
from blendserve.kernels import ops
from blendserve.kernels.cuda.available import flash_attn, has_triton
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.types import AttentionSpec
x = torch.randn(2, 4, 16)
print(tuple(ops.attend(x, x, x, AttentionSpec(0.3), plan_rows(torch.arange(4), 1)).shape), has_triton(), flash_attn())
"""


def test_everything_imports_and_runs_without_triton_and_flash_attn() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(4, 32) False None"
