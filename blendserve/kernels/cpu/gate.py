"""silu(gate) * up in the compiled kernel: what it takes, and the call."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from blendserve.kernels import team
from blendserve.kernels.activation import Activation
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import dtype_of, loaded


class GateCall(ctypes.Structure):
    """`GateCall` of gate.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate", "up", "out")),
        *((name, ctypes.c_int64) for name in ("gate_row", "up_row", "out_row", "rows", "width", "threads")),
    )


def fits(level: Level, gate: Tensor, up: Tensor, activation: Activation) -> bool:
    """Whether this instruction set's kernel is made for these."""
    dtype = dtype_of(level)
    return (
        activation.is_silu
        and gate.dtype == up.dtype == dtype
        and gate.device.type == "cpu"
        and gate.dim() == 2
        and gate.stride(1) == up.stride(1) == 1
        and not torch.is_grad_enabled()
    )


def gated_activation(level: Level, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """ops.gated_activation for what `fits`."""
    return run(loaded(level), gate, up)


def run(library: ctypes.CDLL, gate: Tensor, up: Tensor) -> Tensor:
    """The call itself, which writes over `gate`. The GIL is free meanwhile."""
    rows, width = gate.shape
    at, row = gate.data_ptr(), gate.stride(0)
    call = GateCall(at, up.data_ptr(), at, row, up.stride(0), row, rows, width, team.size())
    library.blendserve_gate(ctypes.byref(call))
    return gate
