"""Random attention in float64 to compare with, and an interpreter that can multiply bf16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blendserve.kernels.reference import formula
from blendserve.kernels.rows import RowPlan, plan_rows
from blendserve.kernels.types import AttentionSpec


@dataclass(frozen=True)
class Case:
    """Rows over keys, whose memory goes on behind the last one with NaN."""

    q: Tensor
    keys: Tensor
    values: Tensor
    at: Tensor
    spec: AttentionSpec
    wanted: Tensor

    @property
    def plan(self) -> RowPlan:
        return plan_rows(self.at, len(self.q) // len(self.keys), self.spec.window)


def make_case(
    at: Tensor,
    n_kv: int = 2,
    group: int = 2,
    dim: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
    behind: float = float("nan"),
) -> Case:
    """Keys and values are strided slices, as those of a cache of several layers are."""
    generator = torch.Generator().manual_seed(len(at) + dim)
    end = int(at[-1]) + 1
    q = torch.randn(len(at), n_kv * group, dim, generator=generator).to(dtype).transpose(0, 1)
    cache = torch.randn(2, 3, n_kv, end + 7, dim, generator=generator).to(dtype)
    keys, values = cache[0, 1], cache[1, 1]
    spec = AttentionSpec(0.3, window, softcap)
    wanted = formula(q, keys[:, :end], values[:, :end], at, spec)
    keys[:, end:] = values[:, end:] = behind
    return Case(q, keys, values, at, spec, wanted)


def rows_of(total: int, share: float, seed: int) -> Tensor:
    """A random ascending subset of the positions, never empty."""
    chosen = torch.rand(total, generator=torch.Generator().manual_seed(seed)) < share
    chosen[seed % total] = True
    return chosen.nonzero()[:, 0]


@contextmanager
def bf16_products() -> Iterator[None]:
    """triton's interpreter keeps bf16 as bits in uint16 and would multiply those: here they are widened first."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    narrow = builder.create_dot

    def wide(handle: Any) -> Any:
        if handle.data.dtype != np.uint16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    builder.create_dot = lambda self, a, b, *rest: narrow(self, wide(a), wide(b), *rest)
    try:
        yield
    finally:
        builder.create_dot = narrow
