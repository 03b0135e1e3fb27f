"""Coded KV in the compiled kernels: bytes <-> symbols, and symbols -> numbers. One thread; the GIL is free meanwhile."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from blendserve.kernels.coding import BLOCK, STREAMS, LayerMap, SymbolModel, join_segment, split_segment
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import loaded

P = ParamSpec("P")
R = TypeVar("R")


class Model(ctypes.Structure):
    """`Model` of coding.cpp, field by field."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("classes", "steps", "spans", "starts"))


class UnpackCall(ctypes.Structure):
    """`UnpackCall` of coding.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("words", "escapes", "below_symbols", "means")),
        ("model", Model),
        ("values", ctypes.c_void_p),
        ("states", ctypes.c_uint32 * STREAMS),
        *((name, ctypes.c_int64) for name in ("n_words", "n_escapes", "tokens", "axes", "below_axes")),
    )


class PackCall(ctypes.Structure):
    """`PackCall` of coding.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "contexts", "means")),
        ("model", Model),
        *((name, ctypes.c_void_p) for name in ("words", "escapes")),
        ("states", ctypes.c_uint32 * STREAMS),
        *((name, ctypes.c_int64) for name in ("tokens", "axes", "n_words", "n_escapes")),
    )


class Matrix(ctypes.Structure):
    """`Matrix` of coding.cpp, field by field."""

    _fields_ = (("weights", ctypes.c_void_p), ("inputs", ctypes.c_int64))


class ReconstructCall(ctypes.Structure):
    """`ReconstructCall` of coding.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("below", "symbols")),
        *((name, Matrix) for name in ("map", "residual")),
        *(
            (name, ctypes.c_void_p)
            for name in ("map_scale", "mean", "residual_scale", "code_scale", "code_zero")
        ),
        *((name, ctypes.c_void_p) for name in ("out", "short_out", "codes")),
        *((name, ctypes.c_int64) for name in ("tokens", "width", "heads", "dim")),
    )


class DecodeCall(ctypes.Structure):
    """`DecodeCall` of coding.cpp, field by field."""

    _fields_ = (("symbols", UnpackCall), ("numbers", ReconstructCall), ("wrong", ctypes.c_int64))


def fits_reconstruct(
    level: Level,
    below: Tensor,
    symbols: Tensor | None,
    layer: LayerMap,
    dim: int,
    dtype: torch.dtype,
) -> bool:
    """Whether heads fill whole blocks, or blocks whole heads."""
    return (
        layer.width % BLOCK == 0 and len(layer.residual) % 4 == 0 and (dim % BLOCK == 0 or BLOCK % dim == 0)
    )


def fits_decode(
    level: Level,
    segment: memoryview,
    below: tuple[np.ndarray | None, Tensor],
    means: np.ndarray,
    model: SymbolModel,
    layer: LayerMap,
    dim: int,
    dtype: torch.dtype,
) -> bool:
    """As `fits_reconstruct`."""
    return fits_reconstruct(level, below[1], None, layer, dim, dtype)


def run_pack(
    library: ctypes.CDLL, values: np.ndarray, contexts: np.ndarray, means: np.ndarray, model: SymbolModel
) -> bytes:
    """The call itself."""
    words, escapes = np.empty(values.size, np.uint16), np.empty(values.size, np.int8)
    given: list[np.ndarray] = [
        np.ascontiguousarray(values, np.int8),
        np.ascontiguousarray(contexts, np.uint8),
    ]
    given.append(np.ascontiguousarray(means, np.int32))
    call = PackCall(
        *(x.ctypes.data for x in given), _model(model), words.ctypes.data, escapes.ctypes.data, tokens=0
    )
    call.tokens, call.axes = values.shape
    library.blendserve_pack(ctypes.byref(call))
    return join_segment(list(call.states), escapes[: call.n_escapes], words[len(words) - call.n_words :])


def run_reconstruct(
    library: ctypes.CDLL,
    below: Tensor,
    symbols: Tensor | None,
    layer: LayerMap,
    dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The call itself."""
    given = None if symbols is None else symbols.contiguous()
    below = below.contiguous()
    out, codes = _outputs(below, dim, dtype)
    at = None if given is None else given.data_ptr()
    library.blendserve_reconstruct(ctypes.byref(_reconstruct_call(below, at, layer, out, codes)))
    return out.to(dtype), codes


def run_decode(
    library: ctypes.CDLL,
    segment: memoryview,
    below: tuple[np.ndarray | None, Tensor],
    means: np.ndarray,
    model: SymbolModel,
    layer: LayerMap,
    dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, np.ndarray, Tensor]:
    """The call itself. Raises ValueError for bytes that are no such symbols."""
    states, escapes, words = split_segment(segment)
    flat = np.frombuffer(words, np.uint8)
    seen, codes_below = below[0], below[1].contiguous()
    expected: np.ndarray = np.ascontiguousarray(means, np.int32)
    values = np.empty((len(codes_below), len(expected)), np.int8)
    out, codes = _outputs(codes_below, dim, dtype)
    symbols = UnpackCall(
        flat.ctypes.data,
        escapes.ctypes.data,
        None if seen is None else seen.ctypes.data,
        expected.ctypes.data,
        _model(model),
        values.ctypes.data,
        (ctypes.c_uint32 * STREAMS)(*states),
        len(flat) // 2,
        len(escapes),
        *values.shape,
        0 if seen is None else seen.shape[1],
    )
    call = DecodeCall(symbols, _reconstruct_call(codes_below, values.ctypes.data, layer, out, codes))
    library.blendserve_decode(ctypes.byref(call))
    if call.wrong:
        raise ValueError("its bytes and its symbols do not end together")
    return out.to(dtype), values, codes


def _by_level(run: Callable[Concatenate[ctypes.CDLL, P], R]) -> Callable[Concatenate[Level, P], R]:
    """As the operation has it, by an instruction set's kernels."""

    def by_level(level: Level, /, *args: P.args, **options: P.kwargs) -> R:
        return run(loaded(level), *args, **options)

    return by_level


pack = _by_level(run_pack)
reconstruct = _by_level(run_reconstruct)  # for what `fits_reconstruct`
decode = _by_level(run_decode)  # for what `fits_decode`


def _outputs(below: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory for numbers [W / D, C, D], in bf16 or fp32, and for codes [C, W]."""
    tokens, width = below.shape
    kind = dtype if dtype == torch.bfloat16 else torch.float32
    return torch.empty(width // dim, tokens, dim, dtype=kind), torch.empty_like(below)


def _reconstruct_call(
    below: Tensor, symbols: int | None, layer: LayerMap, out: Tensor, codes: Tensor
) -> ReconstructCall:
    """symbols: where they lie."""
    heads, tokens, dim = out.shape
    inputs_of = layer.width, len(layer.residual)
    matrices = (Matrix(m.data_ptr(), n) for m, n in zip(layer.packed, inputs_of, strict=True))
    scales = layer.map_scale, layer.mean, layer.residual_scale, layer.code_scale, layer.code_zero
    short = out.dtype == torch.bfloat16
    return ReconstructCall(
        below.data_ptr(),
        symbols,
        *matrices,
        *(x.data_ptr() for x in scales),
        None if short else out.data_ptr(),
        out.data_ptr() if short else None,
        codes.data_ptr(),
        tokens,
        layer.width,
        heads,
        dim,
    )


def _model(model: SymbolModel) -> Model:
    return Model(*(x.ctypes.data for x in (model.by_context, model.steps, model.spans, model.starts)))
