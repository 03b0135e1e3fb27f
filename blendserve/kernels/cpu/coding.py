"""Coded KV in the compiled kernels: bytes <-> symbols, and symbols -> numbers. One thread; the GIL is free meanwhile."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from blendserve.kernels.coding import BLOCK, STREAMS, LayerMap, SymbolModel, join_segment, split_segment
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import loaded


class Model(ctypes.Structure):
    """`Model` of coding.cpp, field by field."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("classes", "steps", "spans"))


class UnpackCall(ctypes.Structure):
    """`UnpackCall` of coding.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("words", "escapes", "contexts", "means")),
        ("model", Model),
        ("values", ctypes.c_void_p),
        ("states", ctypes.c_uint32 * STREAMS),
        *((name, ctypes.c_int64) for name in ("n_words", "n_escapes", "tokens", "axes", "wrong")),
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


def unpack(
    level: Level, segment: memoryview, contexts: np.ndarray, means: np.ndarray, model: SymbolModel
) -> np.ndarray:
    """ops.unpack."""
    return run_unpack(loaded(level), segment, contexts, means, model)


def pack(
    level: Level, values: np.ndarray, contexts: np.ndarray, means: np.ndarray, model: SymbolModel
) -> bytes:
    """ops.pack."""
    return run_pack(loaded(level), values, contexts, means, model)


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


def reconstruct(
    level: Level,
    below: Tensor,
    symbols: Tensor | None,
    layer: LayerMap,
    dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """ops.reconstruct for what `fits_reconstruct`."""
    return run_reconstruct(loaded(level), below, symbols, layer, dim, dtype)


def run_unpack(
    library: ctypes.CDLL, segment: memoryview, contexts: np.ndarray, means: np.ndarray, model: SymbolModel
) -> np.ndarray:
    """The call itself. Raises ValueError for bytes that are no such symbols."""
    states, escapes, words = split_segment(segment)
    flat = np.frombuffer(words, np.uint8)
    values = np.empty((len(contexts), len(means)), np.int8)
    expected: np.ndarray = np.ascontiguousarray(means, np.int32)
    seen: np.ndarray = np.ascontiguousarray(contexts, np.uint8)
    call = UnpackCall(
        flat.ctypes.data,
        escapes.ctypes.data,
        seen.ctypes.data,
        expected.ctypes.data,
        _model(model),
        values.ctypes.data,
        (ctypes.c_uint32 * STREAMS)(*states),
        len(flat) // 2,
        len(escapes),
        *values.shape,
        0,
    )
    library.blendserve_unpack(ctypes.byref(call))
    if call.wrong:
        raise ValueError("its bytes and its symbols do not end together")
    return values


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
    tokens, width = below.shape
    heads = width // dim
    short = dtype == torch.bfloat16
    out = torch.empty(heads, tokens, dim, dtype=dtype if short else torch.float32)
    codes = torch.empty(tokens, width, dtype=torch.int8)
    inputs = below.contiguous(), None if symbols is None else symbols.contiguous()
    inputs_of = width, len(layer.residual)
    matrices = (Matrix(m.data_ptr(), n) for m, n in zip(layer.packed, inputs_of, strict=True))
    scales = layer.map_scale, layer.mean, layer.residual_scale, layer.code_scale, layer.code_zero
    call = ReconstructCall(
        *(None if x is None else x.data_ptr() for x in inputs),
        *matrices,
        *(x.data_ptr() for x in scales),
        None if short else out.data_ptr(),
        out.data_ptr() if short else None,
        codes.data_ptr(),
        tokens,
        width,
        heads,
        dim,
    )
    library.blendserve_reconstruct(ctypes.byref(call))
    return out.to(dtype), codes


def _model(model: SymbolModel) -> Model:
    return Model(*(x.ctypes.data for x in (model.by_context, model.steps, model.spans)))
