"""The ridge correction in the compiled kernel: what it takes, and the call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from blendserve.core import Span
from blendserve.native.library import library

STEP, MAX_DIM = 32, 256


class RidgeCall(ctypes.Structure):
    """`RidgeCall` of ridge.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "shift", "at", "left", "means", "begins", "ends")),
        *((name, ctypes.c_int64) for name in ("k_head", "k_row", "v_head", "v_row")),
        *((name, ctypes.c_int64) for name in ("kv", "tokens", "dim", "rows", "chunks")),
        ("penalty", ctypes.c_float),
        ("threads", ctypes.c_int64),
    )  # fmt: skip


def takes(keys: Tensor, values: Tensor) -> bool:
    """Whether these are what the kernel can do, and there is one."""
    return (
        all(
            x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.stride(-1) == 1 for x in (keys, values)
        )
        and keys.shape[-1] % STEP == 0
        and keys.shape[-1] <= MAX_DIM
        and library() is not None
    )


def move(
    keys: Tensor,
    values: Tensor,
    at: Tensor,
    left: Tensor,
    means: Tensor,
    spans: Sequence[Span],
    penalty: float,
) -> Tensor:
    """blend.correct.move_plainly for what `takes` takes."""
    loaded = library()
    assert loaded is not None, "ask `takes` first"
    return run(loaded, keys, values, at, left, means, spans, penalty)


def run(
    loaded: ctypes.CDLL,
    keys: Tensor,
    values: Tensor,
    at: Tensor,
    left: Tensor,
    means: Tensor,
    spans: Sequence[Span],
    penalty: float,
) -> Tensor:
    """The call itself. The GIL is free meanwhile."""
    shift = torch.empty(keys.shape, dtype=keys.dtype)
    edges = torch.tensor([[span.start for span in spans], [span.stop for span in spans]])
    given = (keys, values, shift, at.contiguous(), left.contiguous(), means.contiguous(), edges[0], edges[1])
    strides = (*keys.stride()[:2], *values.stride()[:2])
    heads, tokens, dim = keys.shape
    sizes = (heads, tokens, dim, len(at), len(spans))
    call = RidgeCall(*(x.data_ptr() for x in given), *strides, *sizes, penalty, torch.get_num_threads())
    loaded.blendserve_ridge(ctypes.byref(call))
    return shift
