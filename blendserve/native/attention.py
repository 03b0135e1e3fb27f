"""Attention by position in the compiled kernel: what it takes, and the call."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from blendserve.native.library import library

LANES, MAX_DIM = 16, 256


class Call(ctypes.Structure):
    """`Call` of attention.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "out", "at")),
        *((name, ctypes.c_int64) for name in ("q_head", "q_row", "k_head", "k_row", "v_head", "v_row")),
        *((name, ctypes.c_int64) for name in ("rows", "kv", "group", "dim", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("threads", ctypes.c_int64),
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


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """blend.attention.attend for what `takes` takes; positions [S] int64, ascending, all below T."""
    loaded = library()
    assert loaded is not None
    return run(loaded, q, keys, values, positions, scale, window, softcap)


def run(
    loaded: ctypes.CDLL,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The call itself: q [H, S, D], keys and values [K, T, D] -> [S, H * D]. The GIL is free meanwhile."""
    n_heads, n_rows, dim = q.shape
    n_kv = keys.shape[0]
    out = torch.empty(n_rows, n_heads * dim, dtype=q.dtype)
    at = positions.contiguous()
    pointers = (x.data_ptr() for x in (q, keys, values, out, at))
    strides = (stride for x in (q, keys, values) for stride in x.stride()[:2])
    sizes = (n_rows, n_kv, n_heads // n_kv, dim, window or 0)
    call = Call(*pointers, *strides, *sizes, scale, softcap or 0.0, torch.get_num_threads())
    loaded.blendserve_attend(ctypes.byref(call))
    return out
