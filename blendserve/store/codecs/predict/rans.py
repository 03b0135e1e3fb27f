"""The three loops of coded KV: bytes <-> symbols, and symbols -> numbers.

Each has a plain form, and a compiled one where that gives the same bits on this machine: symbols are integers, numbers
are sums of integers, and each step after them rounds once, as IEEE 754 says for fp32. Compiled kernels take one thread,
free the GIL and check nothing (kernels/cpu/kernels.h).

    encode       symbols [C, N] -> bytes                 rANS (Duda, arXiv 1311.2540) with words of 16 bits
    decode       bytes -> symbols
    dequantize   codes of the layer below, and symbols -> numbers [W / D, C, D], and their own codes

The symbols of a chunk's layer are coded token by token, each by one of 64 static distributions. The distribution depends
on the recent size of the axis' symbols, and on the size of the token's symbols one layer below (its context).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from blendserve.kernels.cpu.library import pointer

STREAMS = 16  # states that take turns
LOWEST = 1 << 16  # of a state: below it, a word is read
PRECISION = 12  # bits of a slot's number, and fractional bits of running means
RATE = 5  # a token's symbol counts for 1 / 2 ** RATE of the running mean
BLOCK = 16  # numbers that compiled kernels compute side by side
COMPARED = 10  # symbols whose slots compiled kernels compare with; further ones they look up
ONE = 1 << PRECISION  # a symbol of 1, in a running mean
SIZES, CONTEXTS, CLASSES, SYMBOLS, ESCAPE = 64, 9, 64, 32, 31
UNKNOWN = CONTEXTS - 1  # the context of layer 1, below which no symbols are
# Between contexts: a token's symbols, in sixteenths of the mean token's.
RATIOS = np.array([6, 9, 12, 15, 18, 23, 32])

Library: TypeAlias = "SimpleNamespace | None"  # of compiled kernels (native.py); None: the plain form
_STATES = struct.Struct(f"<{STREAMS}I")


@dataclass(frozen=True, eq=False)
class RansModel:
    """What symbols are coded with. Raises ValueError for what is no such model."""

    classes: np.ndarray  # [SIZES, CONTEXTS] of uint8 below CLASSES
    width: np.ndarray  # [CLASSES, SYMBOLS] of uint16: slots of 4,096; the escape has some in every class

    def __post_init__(self) -> None:
        if self.classes.shape != (SIZES, CONTEXTS) or self.width.shape != (CLASSES, SYMBOLS):
            raise ValueError(f"classes {self.classes.shape} and widths {self.width.shape} have other shapes")
        fills = (self.width.astype(np.int64).sum(axis=1) == ONE).all() and self.width[:, ESCAPE].all()
        if (self.classes >= CLASSES).any() or not fills:
            raise ValueError("a class is unknown, or its symbols do not fill its slots")

    @cached_property
    def start(self) -> np.ndarray:
        """[CLASSES, SYMBOLS] of uint16: the first slot of each."""
        ends = self.width.astype(np.int64).cumsum(axis=1)
        return np.ascontiguousarray((ends - self.width).astype(np.uint16))

    @cached_property
    def encode_table(self) -> np.ndarray:
        """[CLASSES, SYMBOLS] of uint32: width 16 bits, start 16."""
        found: np.ndarray = self.width.astype(np.uint32) << 16 | self.start
        return found

    @cached_property
    def decode_table(self) -> np.ndarray:
        """[CLASSES, 4096] of uint32: the width of a slot's symbol 15 bits, the slot's place in it 12, the symbol 5."""
        slots = np.repeat(np.tile(np.arange(SYMBOLS), CLASSES), self.width.ravel()).reshape(CLASSES, ONE)
        widths, firsts = (
            np.take_along_axis(x, slots, axis=1).astype(np.int64) for x in (self.width, self.start)
        )
        table = widths << 17 | (np.arange(ONE) - firsts) << 5 | slots
        return np.ascontiguousarray(table.astype(np.uint32))

    @cached_property
    def cdf_head(self) -> np.ndarray:
        """[COMPARED, CLASSES] of uint16: the first slots of symbols 1 to COMPARED, for compiled kernels."""
        return np.ascontiguousarray(self.start[:, 1 : COMPARED + 1].T)

    @cached_property
    def model_of(self) -> np.ndarray:
        """`classes` transposed, [CONTEXTS, SIZES], for compiled kernels."""
        return np.ascontiguousarray(self.classes.T)


@dataclass(frozen=True, eq=False)
class LayerMap:
    """How a layer's numbers come from the codes of the layer below and from symbols, for one step of quantisation.

    number = sum(codes * map) * map_scale + mean + sum(symbols * residual) * residual_scale
    code = number * code_scale + code_zero, rounded and kept within int8
    """

    map: Tensor  # [W, W] of int8: input, output
    residual: Tensor  # [N, W] of int8
    map_scale: Tensor  # [W] of fp32, as all of the following
    mean: Tensor
    residual_scale: Tensor
    code_scale: Tensor
    code_zero: Tensor

    @cached_property
    def packed(self) -> tuple[Tensor, Tensor]:
        """Both matrices as `packed_matrix` lays them out."""
        return packed_matrix(self.map), packed_matrix(self.residual)

    @property
    def width(self) -> int:
        return len(self.mean)


def packed_matrix(matrix: Tensor) -> Tensor:
    """[n, W] of int8 -> [W / 16, n / 4, 16, 4] of uint8, 128 more: four inputs side by side for one multiplication.

    Unchanged where n / 4 or W / 16 is not whole.
    """
    n, width = matrix.shape
    if n % 4 or width % BLOCK:
        return matrix
    shifted = (matrix.to(torch.int16) + 128).to(torch.uint8)
    return shifted.view(n // 4, 4, width // BLOCK, BLOCK).permute(2, 0, 3, 1).contiguous()


def size_of(means: np.ndarray) -> np.ndarray:
    """Running means of at least 0, 12 fractional bits -> four sizes an octave, 0 to 63."""
    bits = np.maximum(means, 4).astype(np.float32).view(np.int32)
    found: np.ndarray = np.minimum((bits >> 21) - (129 << 2), SIZES - 1)
    return found


def update_means(means: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Running means [N] after one more token's symbols [N]."""
    found: np.ndarray = means + (((np.abs(values.astype(np.int32)) << PRECISION) - means) >> RATE)
    return found


def contexts_of(symbols: np.ndarray | None, n_tokens: int) -> np.ndarray:
    """The size of each token's symbols of the layer below, relative to the chunk's mean token -> [C] of uint8."""
    if symbols is None:
        return np.full(n_tokens, UNKNOWN, np.uint8)
    sums = np.abs(symbols).view(np.uint8).sum(axis=1, dtype=np.int64)  # of -128 as well
    ratios = 16 * sums * len(sums) // max(1, int(sums.sum()))
    found: np.ndarray = np.searchsorted(RATIOS, ratios, side="right").astype(np.uint8)
    return found


def decode_reference(
    segment: memoryview, contexts: np.ndarray, means: np.ndarray, model: RansModel
) -> np.ndarray:
    """Bytes of a layer -> symbols [C, N] of int8. Raises ValueError for bytes that are no such symbols."""
    states, escapes, words = split_segment(segment)
    values = np.zeros((len(contexts), len(means)), np.int8)
    table = model.decode_table
    read = iter(np.frombuffer(words, "<u2").tolist())
    escaped = iter(escapes.tolist())
    state = list(states)
    try:
        for t, context in enumerate(contexts.tolist()):
            for j, m in enumerate(model.classes[size_of(means), context].tolist()):
                x = state[j % STREAMS]
                entry = int(table[m, x & (ONE - 1)])
                symbol = entry & (SYMBOLS - 1)
                x = (entry >> 17) * (x >> PRECISION) + (entry >> 5 & (ONE - 1))
                state[j % STREAMS] = x << 16 | next(read) if x < LOWEST else x
                if symbol == ESCAPE:
                    values[t, j] = next(escaped)
                else:
                    values[t, j] = (symbol + 1) // 2 if symbol & 1 else -(symbol // 2)
            means = update_means(means, values[t])
    except StopIteration:
        raise ValueError("its symbols end too early") from None
    if any(x != LOWEST for x in state) or next(read, None) is not None or next(escaped, None) is not None:
        raise ValueError("its bytes go on after its last symbol")
    return values


def encode_reference(values: np.ndarray, contexts: np.ndarray, means: np.ndarray, model: RansModel) -> bytes:
    """Symbols [C, N] of int8 -> the bytes of a layer. contexts: [C]. means: expected sizes of the axes' symbols [N]."""
    coded: list[tuple[int, int]] = []  # stream, entry of the table
    escapes: list[int] = []
    for t, context in enumerate(contexts.tolist()):
        for j, m in enumerate(model.classes[size_of(means), context].tolist()):
            value = int(values[t, j])
            symbol = 2 * value - 1 if value > 0 else -2 * value
            if symbol >= ESCAPE or not model.width[m, symbol]:
                symbol = ESCAPE
                escapes.append(value)
            coded.append((j % STREAMS, int(model.encode_table[m, symbol])))
        means = update_means(means, values[t])
    state = [LOWEST] * STREAMS
    words: list[int] = []
    for stream, entry in reversed(coded):
        width = entry >> 16
        x = state[stream]
        if x >= width << (32 - PRECISION):
            words.append(x & 0xFFFF)
            x >>= 16
        state[stream] = (x // width << PRECISION) | (x % width + (entry & 0xFFFF))
    return join_segment(state, np.array(escapes, np.int8), np.array(words[::-1], "<u2"))


def dequantize_reference(
    below: Tensor, symbols: Tensor | None, layer: LayerMap, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Codes of the layer below [C, W], and symbols [C, N], None = all 0 -> heads [W / D, C, D] and codes [C, W]."""
    mapped = below.double() @ layer.map.double()  # exact
    numbers = mapped.float() * layer.map_scale + layer.mean
    residual = torch.zeros_like(mapped) if symbols is None else symbols.double() @ layer.residual.double()
    numbers = numbers + residual.float() * layer.residual_scale
    heads = numbers.view(len(numbers), numbers.shape[1] // dim, dim).transpose(0, 1)
    return heads.to(dtype).contiguous(), to_codes(numbers, layer.code_scale, layer.code_zero)


def to_codes(numbers: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Numbers [..., W] in fp32 -> int8, rounded to the nearest code, halves to even."""
    return (numbers * scale + zero).clamp(-128.0, 127.0).round().to(torch.int8)


def split_segment(segment: memoryview) -> tuple[tuple[int, ...], np.ndarray, memoryview]:
    """Bytes of one layer -> states, escaped symbols, words. Raises ValueError.

    states 16 of 4 | number of escapes, 7 bits a byte, the lowest first | escapes of 1 | words of 2   little-endian
    """
    n = 0
    at = _STATES.size
    shift = 0
    more = 128
    while more:
        if at >= len(segment) or shift > 28:
            raise ValueError(f"{len(segment)} bytes hold no states and number of escapes")
        n |= (segment[at] & 127) << shift
        more = segment[at] & 128
        shift += 7
        at += 1
    if n > len(segment) - at or (len(segment) - at - n) % 2:
        raise ValueError(f"{len(segment) - at} bytes are no {n} escapes and whole words")
    return _STATES.unpack_from(segment), np.frombuffer(segment, np.int8, n, at), segment[at + n :]


def join_segment(state: list[int], escapes: np.ndarray, words: np.ndarray) -> bytes:
    """The inverse of `split_segment`."""
    n = len(escapes)
    number = bytearray()
    while n >= 128:
        number.append(n & 127 | 128)
        n >>= 7
    number.append(n)
    return _STATES.pack(*state) + number + escapes.tobytes() + words.astype("<u2", copy=False).tobytes()


def slots_of(share: np.ndarray) -> np.ndarray:
    """Frequencies of symbols [CLASSES, SYMBOLS] -> their slots; a symbol too rare for one is coded by the escape."""
    share = share / share.sum(axis=1, keepdims=True)
    width: np.ndarray = np.floor(share * ONE).astype(np.int64)
    width[:, ESCAPE] = np.maximum(width[:, ESCAPE], 1)
    for row in width:
        row[row.argmax()] += ONE - row.sum()
    return width.astype(np.uint16)


# The compiled forms; None as library is the plain one


def encode(
    library: Library, values: np.ndarray, contexts: np.ndarray, means: np.ndarray, model: RansModel
) -> bytes:
    """Encode as `encode_reference` does."""
    if library is None:
        return encode_reference(values, contexts, means, model)
    words = np.empty(values.size, np.uint16)
    escapes = np.empty(values.size, np.int8)
    states = np.empty(STREAMS, np.uint32)
    counts = np.empty(2, np.int64)
    values = np.ascontiguousarray(values, np.int8)
    given = values, np.ascontiguousarray(contexts, np.uint8), np.ascontiguousarray(means, np.int32)
    arrays = *given, model.model_of, model.encode_table, words, escapes, states, counts
    library.rans_encode(*(x.ctypes.data for x in arrays), *values.shape)
    n_words, n_escapes = counts.tolist()
    return join_segment(states.tolist(), escapes[:n_escapes], words[len(words) - n_words :])


def decode(
    library: Library,
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
        return decode_reference(segment, contexts_of(below, n_tokens), means, model)
    states, escapes, words = split_segment(segment)
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
    library: Library, below: Tensor, symbols: Tensor | None, layer: LayerMap, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Dequantise as `dequantize_reference` does."""
    if library is None or not is_supported(layer, dim):
        return dequantize_reference(below, symbols, layer, dim, dtype)
    below = below.contiguous()
    symbols = None if symbols is None else symbols.contiguous()
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
