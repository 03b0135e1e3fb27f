"""Rotation by halves in the compiled kernel, of rows on their own and of stored chunks on their way to their places."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from blendserve.kernels import team
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import dtype_of, loaded
from blendserve.kernels.rotary import HALVES, Rotary
from blendserve.kernels.types import RecordView, Rope

STEP, MAX_DIM = 32, 256
Part = tuple[int, Tensor, Tensor | None]  # where the first token stands, keys and values [K, C, D]


class Piece(ctypes.Structure):
    """`Piece` of place.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("k_head", "k_row", "v_head", "v_row", "start", "tokens")),
    )


class PlaceCall(ctypes.Structure):
    """`PlaceCall` of place.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pieces", "keys", "values", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("k_head", "k_row", "v_head", "v_row", "turn_row")),
        *((name, ctypes.c_int64) for name in ("count", "heads", "dim", "width", "threads")),
    )


def fits_rotation(level: Level, x: Tensor, rope: Rope, rotary: Rotary) -> bool:
    """Whether the kernel is made to turn x [heads, S, D] so."""
    cos, sin, dtype = rope.cos, rope.sin, dtype_of(level)
    return (
        rotary.form == HALVES
        and all(y.dtype == dtype and y.device.type == "cpu" for y in (x, cos, sin))
        and x.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
        and cos.stride(0) == sin.stride(0)
        and cos.shape[-1] % STEP == 0
        and 0 < cos.shape[-1] <= x.shape[-1] <= MAX_DIM
        and not torch.is_grad_enabled()
    )


def rotate(level: Level, x: Tensor, rope: Rope, rotary: Rotary) -> Tensor:
    """ops.rotate for what `fits_rotation`."""
    out = torch.empty(x.shape, dtype=x.dtype)
    run(loaded(level), [(0, x, None)], out, None, rope)
    return out


def fits(
    level: Level,
    chunks: Sequence[RecordView],
    keys: Tensor,
    values: Tensor,
    rope: Rope,
    rotary: Rotary,
) -> bool:
    """Whether the kernel is made to place these."""
    return all(
        fits_rotation(level, x, rope, rotary) for x in (*(stored for _, stored, _ in chunks[:1]), keys)
    )


def place(
    level: Level,
    chunks: Sequence[RecordView],
    keys: Tensor,
    values: Tensor,
    rope: Rope,
    rotary: Rotary,
) -> None:
    """ops.place for what `fits`."""
    run(loaded(level), chunks, keys, values, rope)


def run(library: ctypes.CDLL, parts: Sequence[Part], keys: Tensor, values: Tensor | None, rope: Rope) -> None:
    """The call itself. The GIL is free meanwhile."""
    cos, sin = rope.cos, rope.sin
    pieces = (Piece * len(parts))(*(_piece(*part) for part in parts))
    to_values = keys if values is None else values
    pointers = (x.data_ptr() for x in (keys, to_values, cos, sin))
    strides = (*keys.stride()[:2], *to_values.stride()[:2], cos.stride(0))
    sizes = (len(parts), keys.shape[0], keys.shape[2], cos.shape[1], team.size())
    call = PlaceCall(ctypes.addressof(pieces), *pointers, *strides, *sizes)
    library.blendserve_place(ctypes.byref(call))


def _piece(start: int, keys: Tensor, values: Tensor | None) -> Piece:
    at = None if values is None else values.data_ptr()
    strides = (*keys.stride()[:2], *(keys if values is None else values).stride()[:2])
    return Piece(keys.data_ptr(), at, *strides, start, keys.shape[1])
