"""The loops of rans.py by compiled kernels, where those give the plain form's bits; else in the plain form.

One thread; the GIL is free during a native call. Functions of kernels/cpu/kernels.h check nothing.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blendserve.kernels import switches
from blendserve.kernels.cpu.build import Unavailable
from blendserve.kernels.cpu.isa import LEVELS
from blendserve.kernels.cpu.library import loaded, pointer
from blendserve.store.codecs.predict import rans
from blendserve.store.codecs.predict.rans import BLOCK, STREAMS, LayerMap, RansModel, contexts_of


def native_library() -> SimpleNamespace | None:
    """The kernels of the widest instruction set that pass their check on this machine; None = use the plain form."""
    return _native_library() if switches.is_native_on() else None


@cache
def _native_library() -> SimpleNamespace | None:
    for level in reversed(LEVELS.values()):
        with suppress(Unavailable):
            if "rans_decode" in level.sources:
                check(library := loaded(level))
                return library
    return None


def encode(
    library: SimpleNamespace | None,
    values: np.ndarray,
    contexts: np.ndarray,
    means: np.ndarray,
    model: RansModel,
) -> bytes:
    """As rans.encode_reference."""
    if library is None:
        return rans.encode_reference(values, contexts, means, model)
    words, escapes = np.empty(values.size, np.uint16), np.empty(values.size, np.int8)
    states, counts = np.empty(STREAMS, np.uint32), np.empty(2, np.int64)
    values = np.ascontiguousarray(values, np.int8)
    given = values, np.ascontiguousarray(contexts, np.uint8), np.ascontiguousarray(means, np.int32)
    arrays = *given, model.model_of, model.encode_table, words, escapes, states, counts
    library.rans_encode(*(x.ctypes.data for x in arrays), *values.shape)
    n_words, n_escapes = counts.tolist()
    return rans.join_segment(states.tolist(), escapes[:n_escapes], words[len(words) - n_words :])


def decode(
    library: SimpleNamespace | None,
    segment: memoryview,
    below: np.ndarray | None,
    n_tokens: int,
    means: np.ndarray,
    model: RansModel,
) -> np.ndarray:
    """Bytes of a layer -> symbols [C, N] of int8. below: symbols [C, M] of the layer below, None for layer 1.

    means [N]: expected sizes of the axes' symbols. Raises ValueError for bytes that encode no such symbols.
    """
    if library is None:
        return rans.decode_reference(segment, contexts_of(below, n_tokens), means, model)
    states, escapes, words = rans.split_segment(segment)
    means = np.ascontiguousarray(means, np.int32)
    values = np.empty((n_tokens, len(means)), np.int8)
    arrays = (
        *(np.frombuffer(words, np.uint8), escapes, below, means, model.model_of, model.decode_table),
        *(model.cdf_head, np.array(states, np.uint32), values),
    )
    is_right = library.rans_decode(
        *(0 if x is None else x.ctypes.data for x in arrays),
        *(len(words) // 2, len(escapes), *values.shape, 0 if below is None else below.shape[1]),
    )
    if not is_right:
        raise ValueError("its bytes and its symbols do not end together")
    return values


def dequantize(
    library: SimpleNamespace | None,
    below: Tensor,
    symbols: Tensor | None,
    layer: LayerMap,
    dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """As rans.dequantize_reference."""
    if library is None or not is_supported(layer, dim):
        return rans.dequantize_reference(below, symbols, layer, dim, dtype)
    below, symbols = below.contiguous(), None if symbols is None else symbols.contiguous()
    tokens, width = below.shape
    is_short = dtype == torch.bfloat16
    out = torch.empty(width // dim, tokens, dim, dtype=dtype if is_short else torch.float32)
    codes = torch.empty_like(below)
    scales = layer.map_scale, layer.mean, layer.residual_scale, layer.code_scale, layer.code_zero
    outputs = (None, out, codes) if is_short else (out, None, codes)
    tensors = below, symbols, *layer.packed, *scales, *outputs
    library.dequantize(*map(pointer, tensors), tokens, width, len(layer.residual), dim)
    return out.to(dtype), codes


def is_supported(layer: LayerMap, dim: int) -> bool:
    """Whether heads fill whole blocks, or blocks whole heads."""
    is_whole = layer.width % BLOCK == 0 and len(layer.residual) % 4 == 0
    return is_whole and (dim % BLOCK == 0 or BLOCK % dim == 0)


def check(library: SimpleNamespace) -> None:
    """Raises Unavailable unless the kernels give the plain form's bytes and bits."""
    model, generator = rans.random_model(), np.random.default_rng(0)
    layer, codes = rans.random_map(64, 20), rans.random_codes(40, 64)
    values = (generator.laplace(size=(40, 20)) * np.linspace(0.01, 9.0, 20)).clip(-128, 127).astype(np.int8)
    means = np.full(20, rans.ONE // 3)
    for below in (rans.random_codes(40, 37).numpy(), None):
        given = values, contexts_of(below, 40), means, model
        wanted = rans.encode_reference(*given)
        _require(encode(library, *given) == wanted, "rANS encoding")
        found = decode(library, memoryview(wanted), below, 40, means, model)
        _require(np.array_equal(found, values), "rANS decoding")
    for dim, symbols in ((16, torch.from_numpy(values)), (8, rans.random_codes(40, 20)), (16, None)):
        for dtype in (torch.float32, torch.bfloat16):  # the random codes give the largest possible integers
            args: Any = codes, symbols, layer, dim, dtype
            pairs = zip(dequantize(library, *args), rans.dequantize_reference(*args), strict=True)
            _require(all(torch.equal(got, want) for got, want in pairs), "dequantizing KV")


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise Unavailable(f"wrong on this machine: {what}")
