"""Linear layers in the compiled kernel, over the weights as the model stores them: what it takes, and the call."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from blendserve.kernels import team
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import dtype_of, loaded

WORD = 4  # bytes; a row of inputs and one of outputs are whole words
FEW = 8  # rows, up to which the kernel turns weights instead of rows


class LinearCall(ctypes.Structure):
    """`LinearCall` of linear.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weights", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("x_row", "w_row", "out_row")),
        *((name, ctypes.c_int64) for name in ("rows", "outs", "depth", "threads")),
    )


def fits(level: Level, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether this instruction set's kernel is made for these."""
    dtype = dtype_of(level)
    return (
        x.dim() == 2
        and all(y.dtype == dtype and y.device.type == "cpu" for y in (x, weight))
        and x.stride(1) == weight.stride(1) == 1
        and (dtype.itemsize == WORD or weight.shape[0] % 2 == weight.shape[1] % 2 == 0)
        and (bias is None or (bias.dtype == dtype and bias.is_contiguous()))
        and not torch.is_grad_enabled()
    )


def linear(level: Level, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """ops.linear for what `fits`."""
    return run(loaded(level), x, weight, bias)


def run(library: ctypes.CDLL, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The call itself. The GIL is free meanwhile."""
    rows, outs = x.shape[0], weight.shape[0]
    out = torch.empty(rows, outs, dtype=x.dtype)
    pointers = x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()
    sizes = x.stride(0), weight.stride(0), outs, rows, outs, x.shape[1], team.size()
    library.blendserve_linear(ctypes.byref(LinearCall(*pointers, *sizes)))
    return out
