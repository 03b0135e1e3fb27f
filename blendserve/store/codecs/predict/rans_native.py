"""Encode, decode and dequantize a layer: by compiled kernels where they give the plain form's bits, else by rans.py.

One thread; the GIL is free during a native call. Functions of kernels/cpu/kernels.h check nothing.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from blendserve.kernels import switches
from blendserve.kernels.cpu.build import Unavailable
from blendserve.kernels.cpu.isa import LEVELS, Level
from blendserve.kernels.cpu.library import loaded, pointer
from blendserve.store.codecs.predict.rans import (
    BLOCK,
    ONE,
    STREAMS,
    LayerMap,
    RansModel,
    contexts_of,
    decode_layer_reference,
    dequantize_reference,
    encode_reference,
    join_segment,
    random_codes,
    random_map,
    random_model,
    split_segment,
)

Below = tuple[
    np.ndarray | None, Tensor
]  # symbols [C, M], None for layer 1, and codes [C, W] of the layer below


def rans_encode(values: np.ndarray, contexts: np.ndarray, means: np.ndarray, model: RansModel) -> bytes:
    """Symbols [C, N] of int8 -> the bytes that `rans_decode_layer` reads.

    contexts [C]: the tokens'. means [N]: expected sizes of the axes' symbols.
    """
    library = native_library()
    if library is None:
        return encode_reference(values, contexts, means, model)
    return encode(library, values, contexts, means, model)


def rans_decode_layer(
    segment: memoryview,
    below: Below,
    means: np.ndarray,
    model: RansModel,
    layer: LayerMap,
    dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, np.ndarray, Tensor]:
    """Bytes of a layer -> heads [W / D, C, D] as of `dequantize_layer`, symbols [C, N] and codes [C, W], both int8.

    Raises ValueError for bytes that encode no such symbols.
    """
    library = native_library()
    if library is None or not is_supported(layer, dim):
        return decode_layer_reference(segment, below, means, model, layer, dim, dtype)
    symbols = decode(library, segment, below, means, model)
    heads, codes = dequantize(library, below[1], torch.from_numpy(symbols), layer, dim, dtype)
    return heads, symbols, codes


def dequantize_layer(
    below: Tensor, symbols: Tensor | None, layer: LayerMap, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Codes of the layer below [C, W], and symbols [C, N], all of int8 -> heads [W / D, C, D] and codes [C, W].

    symbols: None = all 0. The heads are those of keys, then those of values.
    """
    library = native_library()
    if library is None or not is_supported(layer, dim):
        return dequantize_reference(below, symbols, layer, dim, dtype)
    return dequantize(library, below, symbols, layer, dim, dtype)


def is_supported(layer: LayerMap, dim: int) -> bool:
    """Whether heads fill whole blocks, or blocks whole heads."""
    return (
        layer.width % BLOCK == 0 and len(layer.residual) % 4 == 0 and (dim % BLOCK == 0 or BLOCK % dim == 0)
    )


def native_library() -> SimpleNamespace | None:
    """The kernels of the widest instruction set that are right on this machine; None = the plain form serves."""
    return _native_library() if switches.is_native_on() else None


@cache
def _native_library() -> SimpleNamespace | None:
    levels = [level for level in reversed(LEVELS.values()) if "rans_decode" in level.sources]
    return next((loaded(level) for level in levels if not unavailable_reason(level)), None)


def unavailable_reason(level: Level) -> str:
    """Why an instruction set's kernels may not serve, "" if they may."""
    try:
        check(loaded(level))
    except Unavailable as error:
        return str(error)
    return ""


def check(library: SimpleNamespace) -> None:
    """Raises Unavailable unless the kernels give the plain form's bytes and bits."""
    model, generator = random_model(), np.random.default_rng(0)
    layer, codes = random_map(64, 20), random_codes(40, 64)
    values = (generator.laplace(size=(40, 20)) * np.linspace(0.01, 9.0, 20)).clip(-128, 127).astype(np.int8)
    means = np.full(20, ONE // 3)
    for below in (random_codes(40, 37).numpy(), None):
        contexts = contexts_of(below, 40)
        wanted = encode_reference(values, contexts, means, model)
        if encode(library, values, contexts, means, model) != wanted:
            raise Unavailable("wrong on this machine: rANS encoding")
        found = decode(library, memoryview(wanted), (below, codes), means, model)
        if not np.array_equal(found, values):
            raise Unavailable("wrong on this machine: rANS decoding")
    for dim, symbols in ((16, torch.from_numpy(values)), (8, random_codes(40, 20)), (16, None)):
        for dtype in (torch.float32, torch.bfloat16):  # integers as large as they may be
            given = codes, symbols, layer, dim, dtype
            if not all(map(torch.equal, dequantize(library, *given), dequantize_reference(*given))):
                raise Unavailable("wrong on this machine: dequantizing KV")


# The calls


def encode(
    library: SimpleNamespace, values: np.ndarray, contexts: np.ndarray, means: np.ndarray, model: RansModel
) -> bytes:
    words, escapes = np.empty(values.size, np.uint16), np.empty(values.size, np.int8)
    states, counts = np.empty(STREAMS, np.uint32), np.empty(2, np.int64)
    given: list[np.ndarray] = [
        np.ascontiguousarray(values, np.int8),
        np.ascontiguousarray(contexts, np.uint8),
        np.ascontiguousarray(means, np.int32),
        model.model_of,
        model.encode_table,
    ]
    library.rans_encode(*(x.ctypes.data for x in (*given, words, escapes, states, counts)), *values.shape)
    n_words, n_escapes = counts.tolist()
    return join_segment(states.tolist(), escapes[:n_escapes], words[len(words) - n_words :])


def decode(
    library: SimpleNamespace, segment: memoryview, below: Below, means: np.ndarray, model: RansModel
) -> np.ndarray:
    """Symbols [C, N] of int8. Raises ValueError for bytes that encode no such symbols."""
    states, escapes, words = split_segment(segment)
    flat, seen = np.frombuffer(words, np.uint8), below[0]
    first, expected = np.array(states, np.uint32), np.ascontiguousarray(means, np.int32)
    values = np.empty((len(below[1]), len(expected)), np.int8)
    is_right = library.rans_decode(
        flat.ctypes.data, escapes.ctypes.data, 0 if seen is None else seen.ctypes.data, expected.ctypes.data,
        model.model_of.ctypes.data, model.decode_table.ctypes.data, model.cdf_head.ctypes.data, first.ctypes.data,
        values.ctypes.data, len(flat) // 2, len(escapes), *values.shape, 0 if seen is None else seen.shape[1],
    )  # fmt: skip
    if not is_right:
        raise ValueError("its bytes and its symbols do not end together")
    return values


def dequantize(
    library: SimpleNamespace,
    below: Tensor,
    symbols: Tensor | None,
    layer: LayerMap,
    dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    below, symbols = below.contiguous(), None if symbols is None else symbols.contiguous()
    tokens, width = below.shape
    short = dtype == torch.bfloat16
    out = torch.empty(width // dim, tokens, dim, dtype=dtype if short else torch.float32)
    codes = torch.empty_like(below)
    scales = layer.map_scale, layer.mean, layer.residual_scale, layer.code_scale, layer.code_zero
    library.dequantize(
        *map(pointer, (below, symbols, *layer.packed, *scales)),
        *map(pointer, (None, out) if short else (out, None)), codes.data_ptr(),
        tokens, width, len(layer.residual), dim,
    )  # fmt: skip
    return out.to(dtype), codes
