"""The corrections in the compiled kernel: what it takes, and the call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blendserve.native.library import library

STEP, MAX_DIM = 32, 256


class Fresh(NamedTuple):
    """The recomputed tokens of some chunks, ascending: how they came out, and where their stored KV is."""

    keys: Tensor  # [K, S, D] after RoPE, of all rows
    values: Tensor  # [K, S, D]
    rows: Tensor  # [N] int64: which of these are meant
    at: Tensor  # [N] int64: where their stored KV is
    sizes: Sequence[int]  # how many of them each chunk has
    others: Tensor  # int64, ascending: the chunks' other tokens, which are to be moved
    other_sizes: Sequence[int]


class How(NamedTuple):
    """A correction's constants, explained in blend/correct.py."""

    weight: float
    still: float
    scale: float
    penalty: float | None  # None: means alone


class MoveCall(ctypes.Structure):
    """`MoveCall` of move.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "fresh_keys", "fresh_values", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("from", "at", "first", "others", "other_first")),
        *((name, ctypes.c_int64) for name in ("k_head", "k_row", "v_head", "v_row")),
        *((name, ctypes.c_int64) for name in ("fk_head", "fk_row", "fv_head", "fv_row", "turn_row")),
        *((name, ctypes.c_int64) for name in ("kv", "dim", "width", "rows", "chunks")),
        *((name, ctypes.c_float) for name in ("weight", "still", "scale", "penalty")),
        ("threads", ctypes.c_int64),
    )


def takes(keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether these are what the kernel can move, and there is one."""
    parts = (keys, values, cos, sin)
    return (
        all(x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.stride(-1) == 1 for x in parts)
        and cos.stride(0) == sin.stride(0)
        and keys.shape[-1] % STEP == cos.shape[-1] % STEP == 0
        and 0 < cos.shape[-1] <= keys.shape[-1] <= MAX_DIM
        and library() is not None
    )


def move(keys: Tensor, values: Tensor, fresh: Fresh, cos: Tensor, sin: Tensor, how: How) -> None:
    """blend.correct.move_plainly for what `takes` takes, where heads are rotated by halves: cos and sin [N, R]."""
    loaded = library()
    assert loaded is not None, "ask `takes` first"
    run(loaded, keys, values, fresh, cos, sin, how)


def run(
    loaded: ctypes.CDLL,
    keys: Tensor,
    values: Tensor,
    fresh: Fresh,
    cos: Tensor,
    sin: Tensor,
    how: How,
) -> None:
    """The call itself. The GIL is free meanwhile."""
    first, other_first = (torch.tensor([0, *sizes]).cumsum(0) for sizes in (fresh.sizes, fresh.other_sizes))
    indices = (fresh.rows, fresh.at, first, fresh.others, other_first)
    parts = (keys, values, fresh.keys, fresh.values)
    pointers = (x.data_ptr() for x in (*parts, cos, sin, *indices))
    strides = (*(stride for x in parts for stride in x.stride()[:2]), cos.stride(0))
    sizes = (keys.shape[0], keys.shape[2], cos.shape[1], len(fresh.at), len(fresh.sizes))
    constants = (how.weight, how.still, how.scale, -1.0 if how.penalty is None else how.penalty)
    call = MoveCall(*pointers, *strides, *sizes, *constants, torch.get_num_threads())
    loaded.blendserve_move(ctypes.byref(call))
