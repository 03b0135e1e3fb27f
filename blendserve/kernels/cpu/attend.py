"""Attention by position in the compiled kernel: what it takes, and the call."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from blendserve.kernels import team
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import dtype_of, loaded
from blendserve.kernels.rows import RowPlan
from blendserve.kernels.types import AttentionSpec

LANES, MAX_DIM = 16, 256
PAD = 64  # keys are read this far behind the last one's mark
WATCHED_ROWS = 64  # at a time: the weights of all their heads are kept until the last key was seen


class Call(ctypes.Structure):
    """`Call` of attention.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "out", "at")),
        *((name, ctypes.c_int64) for name in ("q_head", "q_row", "k_head", "k_row", "v_head", "v_row")),
        *((name, ctypes.c_int64) for name in ("rows", "kv", "group", "dim", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("threads", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hidden", "watched")),
    )


def fits(level: Level, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> bool:
    """Whether this instruction set's kernel is made for these."""
    parts, dtype = (q, keys, values), dtype_of(level)
    return (
        all(x.dtype == dtype and x.device.type == "cpu" and x.stride(-1) == 1 for x in parts)
        and q.shape[-1] % LANES == 0
        and q.shape[-1] <= MAX_DIM
        and spec.scale > 0
        and not any(x.requires_grad for x in parts)
    )


def attend(
    level: Level, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan
) -> Tensor:
    """ops.attend for what `fits`: q [H, S, D] over keys and values [K, T, D] -> [S, H * D]."""
    return run(loaded(level), q, keys, values, spec, plan.positions)


def attend_with_scores(
    level: Level, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan
) -> tuple[Tensor, Tensor]:
    """ops.attend_with_scores for what `fits`."""
    end, hidden = keys.shape[1], plan.absent
    assert hidden is not None
    marks = torch.zeros(end + PAD, dtype=torch.uint8)
    marks[:end] = hidden
    squares, out = torch.zeros(end), torch.empty(q.shape[1], q.shape[0] * q.shape[2], dtype=q.dtype)
    for start in range(0, q.shape[1], WATCHED_ROWS):
        rows, part = slice(start, start + WATCHED_ROWS), torch.zeros(end)
        out[rows] = run(loaded(level), q[:, rows], keys, values, spec, plan.positions[rows], marks, part)
        squares += part
    return out, squares.sqrt_()


def run(
    library: ctypes.CDLL,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spec: AttentionSpec,
    positions: Tensor,
    hidden: Tensor | None = None,
    watched: Tensor | None = None,
) -> Tensor:
    """The call itself; the GIL is free meanwhile. positions [S] int64, ascending, all below T.

    hidden: [T + PAD] bytes; watched: [T] fp32, takes squared norms.
    """
    n_heads, n_rows, dim = q.shape
    n_kv = keys.shape[0]
    out = torch.empty(n_rows, n_heads * dim, dtype=q.dtype)
    at = positions.contiguous()
    pointers = (x.data_ptr() for x in (q, keys, values, out, at))
    strides = (stride for x in (q, keys, values) for stride in x.stride()[:2])
    sizes = (n_rows, n_kv, n_heads // n_kv, dim, spec.window or 0)
    more = (None if x is None else x.data_ptr() for x in (hidden, watched))
    call = Call(*pointers, *strides, *sizes, spec.scale, spec.softcap or 0.0, team.size(), *more)
    library.blendserve_attend(ctypes.byref(call))
    return out
