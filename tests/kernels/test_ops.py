"""Which backend serves: the table's order, the switch, and the check before a kernel serves."""

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
from blendserve.kernels.reference import attend as plain_attention
from blendserve.kernels.rows import AttentionPlan, plan_rows
from blendserve.kernels.selfcheck import Kind, attention_trouble, packed_chunks_trouble
from blendserve.kernels.types import AttentionSpec
from tests.support.flash_attn import FlashAttn
from tests.support.kernels import ways

ATTENTION = {way.name: way for way in ways() if way.operation == "attend"}
PLAIN = ATTENTION["plain_torch"]
CPU = Kind(torch.device("cpu"), torch.float32, 2, 16, False, False)
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
        table: Any = KernelOp(plain_attention, *able)
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


def one_further(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
    return plain_attention(q, keys, values, spec, plan_rows(plan.positions + 1, plan.group, plan.window))


def without_window(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan
) -> Tensor:
    return plain_attention(q, keys, values, AttentionSpec(spec.scale), plan_rows(plan.positions, plan.group))


def in_bf16(q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
    return plain_attention(q.bfloat16(), keys.bfloat16(), values.bfloat16(), *rest).float()


def failing(*_: Any) -> Tensor:
    raise RuntimeError("out of resource: shared memory\nRequired: 232448")


def test_a_kernel_that_is_wrong_does_not_serve() -> None:
    windowed = replace(CPU, windowed=True)
    kinds = [CPU, windowed, *(replace(CPU, dtype=x, dim=64) for x in (torch.bfloat16, torch.float16))]
    assert [attention_trouble((plain_attention,), kind, POSITIONS) for kind in kinds] == [""] * 4
    for forms in ((plain_attention, one_further), (in_bf16,), (failing,)):
        assert attention_trouble(forms, CPU, POSITIONS)
    assert attention_trouble((without_window,), windowed, POSITIONS)


@pytest.mark.parametrize(("windowed", "softcapped"), [(False, False), (True, False), (False, True)])
def test_packed_chunks_that_are_wrong_do_not_serve(
    windowed: bool, softcapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TopLeft(FlashAttn):
        """Right only where there is no prefix, as flash-attn before 2.1."""

        @classmethod
        def flash_attn_varlen_func(cls, *args: Any, **options: Any) -> Tensor:
            out = FlashAttn.flash_attn_varlen_func(*args, **options)
            return out.roll(1, 0) if (options["cu_seqlens_k"] - options["cu_seqlens_q"]).any() else out

    kind = replace(CPU, windowed=windowed, softcapped=softcapped)
    for package in (FlashAttn, TopLeft):
        monkeypatch.setattr(flash, "flash_attn", lambda package=package: package)
        packed_chunks_trouble.cache_clear()
        assert bool(packed_chunks_trouble(kind)) == (package is TopLeft)
    packed_chunks_trouble.cache_clear()


BLOCKED = """
import sys
sys.modules.update(dict.fromkeys(("triton", "flash_attn")))  # not to be found, and not to be imported
import torch
import blendserve
from blendserve.kernels.cuda.available import flash_attn, has_triton
from blendserve.kernels.ops import attend
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.types import AttentionSpec
x = torch.randn(2, 4, 16)
out = attend(x, x, x, AttentionSpec(0.3), plan_rows(torch.arange(4), 1))
print(tuple(out.shape), has_triton(), flash_attn())
"""


def test_everything_imports_and_runs_without_triton_and_flash_attn() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(4, 32) False None"
