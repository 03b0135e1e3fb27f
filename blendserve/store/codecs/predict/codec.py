"""Chunks to segments and back, at one level, with one reader's tables.

    segment 0      number of new rows 4 | a row's number for each token, 2 or 4 | new rows of W      little-endian
    segment l > 0  what kernels/coding.py writes of the layer's symbols; empty for a chunk of no tokens

A row of layer 0 is one of the tables', or new: a token that was not seen when they were fitted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from blendserve.core import ChunkKV
from blendserve.errors import StoreError
from blendserve.kernels.coding import LayerMap, to_codes
from blendserve.kernels.ops import pack, reconstruct, unpack
from blendserve.models.adapter import Adapter
from blendserve.store.codecs.base import (
    Buffer,
    ChunkShape,
    Codec,
    Coding,
    Pair,
    Progress,
    Sample,
    Undecodable,
    tables_hash,
)
from blendserve.store.codecs.predict.fit import fit
from blendserve.store.codecs.predict.symbols import contexts, flat, quantised
from blendserve.store.codecs.predict.tables import STEPS, Tables

EXPECTED = (
    6,
    8,
    10,
    12,
    14,
)  # times smaller, by level, at the least: text like that of the tables does better
CLOSE = 2  # codes that a row may be off, as another machine or dtype rounds otherwise

_COUNT = struct.Struct("<I")


class Predict(Codec):
    """At one level, with the tables of one reader."""

    levels = tuple(range(1, len(STEPS) + 1))
    default_level = 3
    needs_tables = True

    def __init__(self, level: int, tables: Tables, hash: bytes) -> None:
        self.coding = Coding("predict", level, hash)
        self.tables = tables
        self._layers: dict[int, LayerMap] = {}
        self._inverses: dict[int, Tensor] = {}
        self._lock = Lock()

    @classmethod
    def with_tables(cls, level: int, tables: bytes = b"") -> Predict:
        return cls(level, Tables.parse(tables), tables_hash(tables))

    @classmethod
    def fit(
        cls,
        samples: Iterable[Sample],
        adapter: Adapter | None = None,
        progress: Progress = lambda done, total: None,
    ) -> bytes:
        return fit(samples, adapter, progress).to_bytes()

    @classmethod
    def check(cls, coding: Coding, shape: ChunkShape, lengths: Sequence[int]) -> None:
        width = 2 * shape.n_kv_heads * shape.head_dim
        most = shape.n_tokens * (width + 4) + _COUNT.size
        if not 2 * shape.n_tokens + _COUNT.size <= lengths[0] <= most:
            raise ValueError(f"it says {lengths[0]} bytes of layer 0 for {shape.n_tokens} tokens")
        for length in lengths[1:]:
            if (length > 0) != (shape.n_tokens > 0) or length > 64 + 3 * shape.n_tokens * width:
                raise ValueError(
                    f"it says {length} bytes a layer for {shape.n_tokens} tokens of {width} numbers"
                )

    def expected_bytes(self, raw_bytes: int) -> int:
        return raw_bytes // EXPECTED[self.coding.level - 1]

    def layer(self, l: int) -> LayerMap:
        """Of this level; made once."""
        with self._lock:
            if l not in self._layers:
                self._layers[l] = self.tables.layer(l, self.coding.level)
            return self._layers[l]

    def means(self, l: int) -> np.ndarray:
        """[N]: how large symbols of layer l are, before any is known."""
        n = len(self.layer(l).residual)
        found: np.ndarray = self.tables.means[self.coding.level - 1, l - 1, :n].numpy()
        return found

    def encode(self, kv: ChunkKV) -> list[Buffer]:
        if not self.tables.fits(ChunkShape.of(kv)):
            raise StoreError(
                f"the tables {self.coding.tables.hex()} are for another reader: fit some by `blendserve codec fit`"
            )
        numbers = flat(kv)  # [L, C, W]
        segment, below = self._encode_first(numbers[0], kv.ids)
        segments: list[Buffer] = [segment]
        symbols = None
        for l in range(1, len(numbers)):
            segment, below, symbols = self._encode_layer(l, numbers[l], below, symbols)
            segments.append(segment)
        return segments

    def decoder(self, shape: ChunkShape) -> PredictDecoder:
        if not self.tables.fits(shape):
            raise Undecodable(f"the tables {self.coding.tables.hex()} are for KV of another shape")
        return PredictDecoder(self, shape)

    def _encode_first(self, numbers: Tensor, ids: Sequence[int]) -> tuple[bytes, Tensor]:
        """[C, W] -> the segment, and the codes [C, W] that are decoded from it."""
        tables = self.tables
        codes = to_codes(numbers, tables.code_scale[0], tables.code_zero[0])
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
        rows = b"".join(new)
        segment = _COUNT.pack(len(new)) + at.astype(_index_type(known + len(new))).tobytes() + rows
        return segment, self.first_codes(segment, len(codes))

    def first_codes(self, segment: Buffer, n_tokens: int) -> Tensor:
        """Codes of layer 0 [C, W]. Raises ValueError."""
        tables, width = self.tables, self.tables.width
        (new,) = _COUNT.unpack_from(segment)
        kind = _index_type(len(tables.ids) + new)
        if len(segment) != _COUNT.size + n_tokens * kind.itemsize + new * width:
            raise ValueError(f"{len(segment)} bytes are not {n_tokens} tokens and {new} rows")
        at = torch.from_numpy(np.frombuffer(segment, kind, n_tokens, _COUNT.size).astype(np.int64))
        rows = np.frombuffer(segment, np.int8, new * width, _COUNT.size + n_tokens * kind.itemsize)
        if n_tokens and int(at.max()) >= len(tables.ids) + new:
            raise ValueError("a token has a row that is not there")
        known = at < len(tables.ids)
        codes = torch.empty(n_tokens, width, dtype=torch.int8)
        codes[known] = tables.rows[at[known]]
        codes[~known] = torch.from_numpy(rows.copy()).view(new, width)[at[~known] - len(tables.ids)]
        return codes

    def _encode_layer(
        self, l: int, numbers: Tensor, below: Tensor, symbols: np.ndarray | None
    ) -> tuple[bytes, Tensor, np.ndarray]:
        """[C, W] -> the segment, the codes that the decoder will have, and the symbols [C, N]."""
        layer, dim = self.layer(l), self.tables.head_dim
        predicted, _ = reconstruct(below, None, layer, dim, torch.float32)
        left = numbers - predicted.transpose(0, 1).reshape(numbers.shape)
        along = (left @ self._inverse(l)[:, : len(layer.residual)]).numpy()
        found = quantised(along, STEPS[self.coding.level - 1])
        _, codes = reconstruct(below, torch.from_numpy(found), layer, dim, torch.float32)
        segment = (
            pack(found, contexts(symbols, len(found)), self.means(l), self.tables.model)
            if len(found)
            else b""
        )
        return segment, codes, found

    def _inverse(self, l: int) -> Tensor:
        """[W, W]: numbers -> axes."""
        with self._lock:
            if l not in self._inverses:
                axes = self.tables.axes[l - 1].double() * self.tables.axes_scale[l - 1].double()
                self._inverses[l] = torch.linalg.inv(axes).float()
            return self._inverses[l]


class PredictDecoder:
    """Remembers the layer below, and which one is due."""

    def __init__(self, codec: Predict, shape: ChunkShape) -> None:
        self._codec, self._shape, self._due = codec, shape, 0
        self._below = torch.empty(0)
        self._symbols: np.ndarray | None = None

    def layer(self, l: int, segment: Buffer) -> Pair:
        if l != self._due:
            raise ValueError(f"layer {l} is decoded where layer {self._due} is due")
        self._due += 1
        shape, codec = self._shape, self._codec
        if l == 0:
            self._below = codec.first_codes(segment, shape.n_tokens)
            tables = codec.tables
            numbers = (self._below.float() - tables.code_zero[0]) / tables.code_scale[0]
            by_head = numbers.view(shape.n_tokens, 2 * shape.n_kv_heads, shape.head_dim).transpose(0, 1)
            heads = by_head.to(shape.dtype).contiguous()
            return heads[: shape.n_kv_heads], heads[shape.n_kv_heads :]
        layer = codec.layer(l)
        if shape.n_tokens:
            seen = contexts(self._symbols, shape.n_tokens)
            symbols = unpack(memoryview(segment), seen, codec.means(l), codec.tables.model)
        else:
            symbols = np.zeros((0, len(layer.residual)), np.int8)
        self._symbols = symbols
        given = self._below, torch.from_numpy(symbols)
        heads, self._below = reconstruct(*given, layer, shape.head_dim, shape.dtype)
        return heads[: shape.n_kv_heads], heads[shape.n_kv_heads :]


def _index_type(n_rows: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    return np.dtype("<u2") if n_rows <= 1 << 16 else np.dtype("<u4")
