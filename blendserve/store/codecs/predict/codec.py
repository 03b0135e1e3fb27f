"""The codec: chunks to segments and back, at one level, with one model's tables.

    segment 0      new rows 4 | exceptions 4 | each token's row, 2 or 4 | new rows of W | each exception's token 4
    segment l > 0  the layer's symbols, as rans.py packs them; empty for a chunk of no tokens
    both           followed by the exceptions' numbers, uncoded, [n, W] in the chunk's dtype             little-endian

A row of layer 0 is one of the tables', or a new one, for a token that `fit` did not see. Exceptions are tokens whose
numbers are far outside the range that the tables were fitted on, such as the first of a prompt, the attention sink.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from blendserve.errors import StoreError
from blendserve.kv import ChunkKV, KVShape
from blendserve.store.codecs.base import (
    Buffer,
    ChunkShape,
    Codec,
    Coding,
    FittedModel,
    Pair,
    Progress,
    Sample,
)
from blendserve.store.codecs.predict import native, rans
from blendserve.store.codecs.predict.fit import fit
from blendserve.store.codecs.predict.tables import STEPS, Tables, flat, quantised

EXPECTED = 6, 8, 9, 10, 10  # compression by level; it is higher for text like that of the tables
CLOSE = 2  # tolerance of a row, in codes: another machine or dtype rounds differently
FAR_FIRST, FAR = 1.1, 3.0  # ranges of the codes, in layer 0 and above, beyond which a token is an exception

_COUNTS = struct.Struct("<II")


class Predict(Codec):
    """The codec at one level, with the tables of one model."""

    levels = tuple(range(1, len(STEPS) + 1))
    default_level = 2
    needs_tables = True
    needs_equal_layers = True

    def __init__(self, coding: Coding, tables: Tables) -> None:
        self.coding = coding
        self.tables = tables
        self.layer = cache(partial(tables.layer, level=coding.level))  # LayerMap of l > 0
        self._inverse = cache(tables.inverse)

    @classmethod
    def with_tables(cls, level: int, tables: bytes = b"") -> Predict:
        return cls(Coding.by_tables("predict", level, tables), Tables.parse(tables))

    @classmethod
    def fit(
        cls,
        samples: Iterable[Sample],
        model: FittedModel | None = None,
        progress: Progress = lambda done, total: None,
    ) -> bytes:
        return fit(samples, model, progress).to_bytes()

    @classmethod
    def check(cls, coding: Coding, shape: ChunkShape, lengths: Sequence[int]) -> None:
        n_tokens = shape.n_tokens
        width = 2 * math.prod(shape.of_every_layer)
        raw = n_tokens * width * shape.dtype.itemsize
        most = n_tokens * (width + 8) + _COUNTS.size + raw
        if not 2 * n_tokens + _COUNTS.size <= lengths[0] <= most:
            raise ValueError(f"it says {lengths[0]} bytes of layer 0 for {n_tokens} tokens")
        for length in lengths[1:]:
            if (length > 0) != (n_tokens > 0) or length > 64 + 3 * n_tokens * width + raw:
                raise ValueError(f"it says {length} bytes a layer for {n_tokens} tokens of {width} numbers")

    def expected_bytes(self, raw_bytes: int) -> int:
        return raw_bytes // EXPECTED[self.coding.level - 1]

    def fits(self, shape: ChunkShape) -> bool:
        n_layers, heads, dim = self.tables.shape[1:].tolist()
        return bool(shape.layers == (KVShape(heads, dim, dim),) * n_layers)

    def encode(self, kv: ChunkKV) -> list[Buffer]:
        if not self.fits(ChunkShape.of(kv)):
            raise StoreError(
                f"the tables {self.coding.tables.hex()} are for another model: fit some by `blendserve codec fit`"
            )
        numbers = flat(kv)  # [L, C, W]
        far = self._exceptions(numbers)
        as_is = [x[far].to(kv.keys[0].dtype).view(torch.uint8).numpy().tobytes() for x in numbers]
        segment, below = self._encode_first(numbers[0], kv.ids, far)
        segments: list[Buffer] = [segment + as_is[0]]
        symbols = None
        for l in range(1, len(numbers)):
            below[far] = self.codes(l - 1, numbers[l - 1, far])
            segment, below, symbols = self._encode_layer(l, numbers[l], below, symbols, far)
            segments.append(segment + as_is[l])
        return segments

    def new_decoder(self, shape: ChunkShape) -> PredictDecoder:
        return PredictDecoder(self, shape)

    def means(self, l: int) -> np.ndarray:
        """[N]: the expected size of layer l's symbols before the first one."""
        n = len(self.layer(l).residual)
        found: np.ndarray = self.tables.means[self.coding.level - 1, l - 1, :n].numpy()
        return found

    def codes(self, l: int, numbers: Tensor) -> Tensor:
        """Numbers of layer l [n, W] -> codes of int8."""
        return rans.to_codes(numbers, self.tables.code_scale[l], self.tables.code_zero[l])

    def first_codes(self, segment: Buffer, n_tokens: int) -> tuple[Tensor, Tensor, int]:
        """Codes of layer 0 [C, W], the exceptions' tokens, and where the coded part ends. Raises ValueError."""
        tables = self.tables
        width = self.tables.width
        new, n_far = _COUNTS.unpack_from(segment) if len(segment) >= _COUNTS.size else (0, 0)
        kind = _index_type(len(tables.ids) + new)
        rows_at = _COUNTS.size + n_tokens * kind.itemsize
        far_at = rows_at + new * width
        if len(segment) < far_at + 4 * n_far:
            raise ValueError(
                f"{len(segment)} bytes are not {n_tokens} tokens, {new} rows and {n_far} exceptions"
            )
        at = torch.from_numpy(np.frombuffer(segment, kind, n_tokens, _COUNTS.size).astype(np.int64))
        rows = torch.from_numpy(np.frombuffer(segment, np.int8, new * width, rows_at).copy())
        far = torch.from_numpy(np.frombuffer(segment, "<u4", n_far, far_at).astype(np.int64))
        if n_far and int(far.max()) >= n_tokens:
            raise ValueError("an exception is no token of the chunk")
        if n_tokens and int(at.max()) >= len(tables.ids) + new:
            raise ValueError("a token has a row that is not there")
        known = at < len(tables.ids)
        codes = torch.empty(n_tokens, width, dtype=torch.int8)
        codes[known] = tables.rows[at[known]]
        codes[~known] = rows.view(new, width)[at[~known] - len(tables.ids)]
        return codes, far, far_at + 4 * n_far

    def _exceptions(self, numbers: Tensor) -> Tensor:
        """[L, C, W] -> tokens that are far outside in any layer, ascending.

        Layer 0 is stored as its codes. Above, codes only predict the next layer, so they may saturate.
        """
        scale = self.tables.code_scale[:, None]
        zero = self.tables.code_zero[:, None]
        reach = (numbers * scale + zero).abs().amax(dim=2) / 127  # [L, C]
        is_far = reach[0].gt(FAR_FIRST) | reach[1:].gt(FAR).any(dim=0)
        return is_far.nonzero().flatten()

    def _encode_first(self, numbers: Tensor, ids: Sequence[int], far: Tensor) -> tuple[bytes, Tensor]:
        """[C, W] -> the segment, and the codes [C, W] that the decoder gets from it."""
        tables = self.tables
        codes = self.codes(0, numbers)
        known = len(tables.ids)
        at = np.full(len(codes), -1)
        if known and len(ids) == len(codes):
            given = torch.tensor(ids)
            place = torch.searchsorted(tables.ids, given).clamp(max=known - 1)
            off = (tables.rows[place].int() - codes.int()).abs().amax(dim=1)
            here = (tables.ids[place] == given) & (off <= CLOSE)
            at[here.numpy()] = place[here].numpy()
        new: dict[bytes, int] = {}
        for t in np.flatnonzero(at < 0):
            at[t] = known + new.setdefault(codes[t].numpy().tobytes(), len(new))
        indices = at.astype(_index_type(known + len(new))).tobytes()
        exceptions = far.numpy().astype("<u4").tobytes()
        segment = _COUNTS.pack(len(new), len(far)) + indices + b"".join(new) + exceptions
        return segment, self.first_codes(segment, len(codes))[0]

    def _encode_layer(
        self, l: int, numbers: Tensor, below: Tensor, symbols: np.ndarray | None, far: Tensor
    ) -> tuple[bytes, Tensor, np.ndarray]:
        """[C, W] -> the segment, the codes that the decoder will have, and the symbols [C, N]."""
        layer = self.layer(l)
        dim = self.tables.head_dim
        library = native.native_library()
        predicted, _ = rans.dequantize(library, below, None, layer, dim, torch.float32)
        left = numbers - predicted.transpose(0, 1).reshape(numbers.shape)
        along = (left @ self._inverse(l)[:, : len(layer.residual)]).numpy()
        found = quantised(along, float(self.tables.steps[self.coding.level - 1]), self.means(l))
        found[far.numpy()] = 0
        _, codes = rans.dequantize(library, below, torch.from_numpy(found), layer, dim, torch.float32)
        if not len(found):
            return b"", codes, found
        contexts = rans.contexts_of(symbols, len(found))
        return rans.encode(library, found, contexts, self.means(l), self.tables.model), codes, found


class PredictDecoder:
    """Decodes layers in order; keeps the symbols and codes of the layer below."""

    def __init__(self, codec: Predict, shape: ChunkShape) -> None:
        self._codec = codec
        self._shape = shape
        self._due = 0
        self._symbols: np.ndarray | None = None
        self._codes = torch.empty(0)
        self._far = torch.empty(0, dtype=torch.int64)

    def layer(self, l: int, segment: Buffer) -> Pair:
        if l != self._due:
            raise ValueError(f"layer {l} is decoded before layer {self._due}")
        self._due += 1
        segment = memoryview(segment)
        shape = self._shape
        width = self._codec.tables.width
        if l == 0:
            self._codes, self._far, end = self._codec.first_codes(segment, shape.n_tokens)
        else:
            end = len(segment) - len(self._far) * width * shape.dtype.itemsize
        n_far = len(self._far)
        as_is = segment[max(0, end) :]
        if len(as_is) != n_far * width * shape.dtype.itemsize:
            raise ValueError(f"{len(segment)} bytes do not end with the numbers of {n_far} exceptions")
        heads = self._first() if l == 0 else self._further(l, segment[:end])
        if n_far:
            numbers = torch.frombuffer(bytearray(as_is), dtype=shape.dtype).view(n_far, width)
            heads[:, self._far] = numbers.view(n_far, len(heads), -1).transpose(0, 1)
            self._codes[self._far] = self._codec.codes(l, numbers.float())
        keys, values = heads.chunk(2)
        return keys, values

    def _first(self) -> Tensor:
        """Heads [2 K, C, D] of layer 0."""
        shape = self._shape
        tables = self._codec.tables
        n_heads, dim = shape.of_every_layer
        numbers = (self._codes.float() - tables.code_zero[0]) / tables.code_scale[0]
        by_head = numbers.view(shape.n_tokens, 2 * n_heads, dim).transpose(0, 1)
        return by_head.to(shape.dtype).contiguous()

    def _further(self, l: int, segment: memoryview) -> Tensor:
        """Heads [2 K, C, D] of layer l > 0."""
        shape = self._shape
        codec = self._codec
        library = native.native_library()
        symbols = None
        if shape.n_tokens:
            means = codec.means(l)
            model = codec.tables.model
            self._symbols = rans.decode(library, segment, self._symbols, shape.n_tokens, means, model)
            symbols = torch.from_numpy(self._symbols)
        heads, self._codes = rans.dequantize(
            library, self._codes, symbols, codec.layer(l), codec.tables.head_dim, shape.dtype
        )
        return heads


def _index_type(n_rows: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    return np.dtype("<u2") if n_rows <= 1 << 16 else np.dtype("<u4")
