"""Attention by position in the compiled kernel: what it takes, and the call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blendserve.native.library import library

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


def takes(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> bool:
    """Whether these are what the kernel can do, and there is one."""
    parts = (q, keys, values)
    return (
        all(x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.stride(-1) == 1 for x in parts)
        and q.shape[-1] % LANES == 0
        and q.shape[-1] <= MAX_DIM
        and scale > 0
        and not any(x.requires_grad for x in parts)
        and library() is not None
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """What rows look at: positions [S] int64, ascending, all below T, and the layer's scale, window and softcap."""

    positions: Tensor
    scale: float
    window: int | None = None
    softcap: float | None = None


def attend(q: Tensor, keys: Tensor, values: Tensor, seen: Seen) -> Tensor:
    """blend.attention.attend for what `takes` takes: q [H, S, D] over keys and values [K, T, D] -> [S, H * D]."""
    return run(_loaded(), q, keys, values, seen)


def watch(q: Tensor, keys: Tensor, values: Tensor, seen: Seen, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The same where nobody sees the keys marked in `hidden` [T]; also how much each key is looked at.

    That is, per key, the norm over rows of the mean over heads of weight times norm of the value [T] fp32.
    """
    end = keys.shape[1]
    marks = torch.zeros(end + PAD, dtype=torch.uint8)
    marks[:end] = hidden
    squares, out = torch.zeros(end), torch.empty(q.shape[1], q.shape[0] * q.shape[2], dtype=q.dtype)
    for start in range(0, q.shape[1], WATCHED_ROWS):
        rows = slice(start, start + WATCHED_ROWS)
        part, some = torch.zeros(end), replace(seen, positions=seen.positions[rows])
        out[rows] = run(_loaded(), q[:, rows], keys, values, some, marks, part)
        squares += part
    return out, squares.sqrt_()


def run(
    loaded: ctypes.CDLL,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Seen,
    hidden: Tensor | None = None,
    watched: Tensor | None = None,
) -> Tensor:
    """The call itself; the GIL is free meanwhile. hidden: [T + PAD] bytes; watched: [T] fp32, takes squared norms."""
    n_heads, n_rows, dim = q.shape
    n_kv = keys.shape[0]
    out = torch.empty(n_rows, n_heads * dim, dtype=q.dtype)
    at = seen.positions.contiguous()
    pointers = (x.data_ptr() for x in (q, keys, values, out, at))
    strides = (stride for x in (q, keys, values) for stride in x.stride()[:2])
    sizes = (n_rows, n_kv, n_heads // n_kv, dim, seen.window or 0)
    more = (None if x is None else x.data_ptr() for x in (hidden, watched))
    call = Call(*pointers, *strides, *sizes, seen.scale, seen.softcap or 0.0, torch.get_num_threads(), *more)
    loaded.blendserve_attend(ctypes.byref(call))
    return out


def _loaded() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None, "ask `takes` first"
    return loaded
