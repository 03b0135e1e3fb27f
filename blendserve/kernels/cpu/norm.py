"""RMS norm, with the sum before it, in the compiled kernel: what it takes, and the call."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from blendserve.kernels import team
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import dtype_of, loaded
from blendserve.kernels.norm import Norm, NormForm

LEAST = 8  # numbers of a row: torch adds up fewer in another order


class NormCall(ctypes.Structure):
    """`NormCall` of norm.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "add", "weight", "sum", "out")),
        *((name, ctypes.c_int64) for name in ("x_row", "add_row", "rows", "dim", "rounds_first")),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
        ("threads", ctypes.c_int64),
    )


def fits(level: Level, x: Tensor, add: Tensor | None, norm: Norm) -> bool:
    """Whether this instruction set's kernel is made for these."""
    dtype = dtype_of(level)
    return (
        norm.form is not None
        and norm.weight is not None
        and x.dtype == norm.weight.dtype == dtype
        and x.device.type == "cpu"
        and x.dim() == 2
        and x.shape[1] >= LEAST
        and x.stride(1) == 1
        and (add is None or (add.dtype == dtype and add.stride(1) == 1))
        and not torch.is_grad_enabled()
    )


def add_norm(level: Level, x: Tensor, add: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """ops.add_norm for what `fits`."""
    assert norm.form is not None
    assert norm.weight is not None
    return run(loaded(level), x, add, norm.weight, norm.eps, norm.form)


def run(
    library: ctypes.CDLL, x: Tensor, add: Tensor | None, weight: Tensor, eps: float, form: NormForm
) -> tuple[Tensor, Tensor]:
    """The call itself. The GIL is free meanwhile."""
    rows, dim = x.shape
    out = torch.empty(rows, dim, dtype=x.dtype)
    total, to, more, row = x, None, None, 0
    if add is not None:
        total = torch.empty(rows, dim, dtype=x.dtype)
        to, more, row = total.data_ptr(), add.data_ptr(), add.stride(0)
    pointers = x.data_ptr(), more, weight.data_ptr(), to, out.data_ptr()
    sizes = x.stride(0), row, rows, dim, form.rounds_first
    call = NormCall(*pointers, *sizes, eps, form.offset, team.size())
    library.blendserve_norm(ctypes.byref(call))
    return total, out
