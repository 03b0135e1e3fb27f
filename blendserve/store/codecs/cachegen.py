"""CacheGen's codec (SIGCOMM'24, arXiv 2310.07240) as its authors released it: the baseline for our own codecs.

A token's keys, over all heads, share one scale, and so do its values. They are rounded to 2m+1 integers, where the
layer's number of bins is 2m+2: 32 in the first layers, 16 in the others. The integers of a channel are coded with one
static distribution for each layer and channel, learnt from other text (`fit`).

    segment   scales of keys [C], of values [C], in bf16 | words of 4 of an ANS coder: keys' channels [K * D], values'
    tables    "CGT1" | L 4 | K 4 | D 4 | weights of 2 bytes [L, 2, K * D, 53]: 31, 15 and 7 integers       little-endian

Level 1 was released for models of 7B, level 0 for those of 70B, both scaled to the model's layers. Level 2, with half as
many bins as level 1, was not released: it adds a point to the curve of size against error.

Differences: keys are those before RoPE. All chunks share the distributions, as in the paper; the released code sends some
with every chunk, which costs more. ANS of the library `constriction` replaces arithmetic coding, at the same length to
one word a layer. Nothing is pickled. The paper codes tokens as differences from the first of their ten; the released code
and this one do not: for keys before RoPE and values, differences at the same step take more bits
(docs/research/decisions.md).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blendserve.core import ChunkKV
from blendserve.errors import InputError, StoreError
from blendserve.extras import install_hint
from blendserve.models.model import DecoderModel
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
from blendserve.store.codecs.raw import aligned

try:
    import constriction
except ImportError as error:
    raise ImportError(f"codec 'cachegen' needs the package constriction: {install_hint('codecs')}") from error

BINS = (32, 16, 8)  # of all levels, in the order of the tables
FEWEST = 64  # tokens to learn distributions from
_TABLES = struct.Struct("<4sIII")
_MAGIC = b"CGT1"


@dataclass(frozen=True, slots=True)
class Level:
    """The numbers of bins of the first layers and of the others."""

    first: int
    others: int
    keys: float  # share of the layers that are the first, for keys
    values: float

    def bins(self, part: int, l: int, n_layers: int) -> int:
        """Of keys (part 0) or values (1) of layer l."""
        return self.first if l < round((self.keys, self.values)[part] * n_layers) else self.others


LEVELS = {
    0: Level(32, 16, 40 / 80, 20 / 80),
    1: Level(32, 16, 10 / 32, 2 / 32),
    2: Level(16, 8, 10 / 32, 2 / 32),
}


@dataclass(frozen=True, slots=True)
class Weights:
    """Parsed tables: the frequency of each integer, for each layer, part and channel."""

    n_kv_heads: int
    head_dim: int
    seen: np.ndarray  # [L, 2, K * D, 53], none of them 0

    @property
    def n_layers(self) -> int:
        return len(self.seen)

    @classmethod
    def parse(cls, raw: bytes) -> Weights:
        """Raises ValueError."""
        if len(raw) < _TABLES.size:
            raise ValueError(f"{len(raw)} bytes are too few")
        magic, n_layers, n_kv_heads, head_dim = _TABLES.unpack_from(raw)
        shape = (n_layers, 2, n_kv_heads * head_dim, sum(map(symbols_of, BINS)))
        if magic != _MAGIC or len(raw) != _TABLES.size + 2 * shape[0] * shape[1] * shape[2] * shape[3]:
            raise ValueError(f"{len(raw)} bytes that begin with {magic!r} do not fit the shape {shape}")
        seen = np.frombuffer(raw, "<u2", offset=_TABLES.size).reshape(shape)
        if not seen.all():
            raise ValueError("an integer has no weight")
        return cls(n_kv_heads, head_dim, seen)

    def of(self, l: int, part: int, bins: int) -> np.ndarray:
        """[K * D, integers]"""
        at = sum(symbols_of(other) for other in BINS[: BINS.index(bins)])
        found: np.ndarray = self.seen[l, part, :, at : at + symbols_of(bins)]
        return found

    def fits(self, shape: ChunkShape) -> bool:
        return (self.n_layers, self.n_kv_heads, self.head_dim) == (
            shape.n_layers,
            shape.n_kv_heads,
            shape.head_dim,
        )


class CacheGen(Codec):
    """The codec at one level, with the distributions of one model."""

    random_access = True
    levels = tuple(LEVELS)
    default_level = 1
    needs_tables = True

    def __init__(self, level: int, weights: Weights, hash: bytes) -> None:
        self.coding = Coding("cachegen", level, hash)
        self._weights, self._level = weights, LEVELS[level]
        self._models: dict[int, list[list[Any]]] = {}

    @classmethod
    def with_tables(cls, level: int, tables: bytes = b"") -> CacheGen:
        return cls(level, Weights.parse(tables), tables_hash(tables))

    @classmethod
    def check(cls, coding: Coding, shape: ChunkShape, lengths: Sequence[int]) -> None:
        scales, n = 4 * shape.n_tokens, 2 * shape.n_tokens * shape.n_kv_heads * shape.head_dim
        for length in lengths:
            if length < scales or length % 4 or length > scales + 3 * n + 16:  # 24 bits an integer at most
                raise ValueError(f"it says {length} bytes a layer, which is no length of {n} integers")

    def expected_bytes(self, raw_bytes: int) -> int:
        return raw_bytes // 5

    def encode(self, kv: ChunkKV) -> list[Buffer]:
        shape = ChunkShape.of(kv)
        if not self._weights.fits(shape):
            raise StoreError(
                f"the tables {self.coding.tables.hex()} are for another reader: fit some by `blendserve codec fit`"
            )
        return [self._segment(l, kv) for l in range(shape.n_layers)]

    def decoder(self, shape: ChunkShape) -> CacheGenDecoder:
        if not self._weights.fits(shape):
            raise Undecodable(f"the tables {self.coding.tables.hex()} are for KV of another shape")
        return CacheGenDecoder(self, shape)

    @classmethod
    def fit(
        cls,
        samples: Iterable[Sample],
        adapter: DecoderModel | None = None,
        progress: Progress = lambda done, total: None,
    ) -> bytes:
        """The frequency of each integer in each channel, at every number of bins."""
        seen, tokens, shape = None, 0, None
        for _, kv in samples:
            shape, tokens = ChunkShape.of(kv), tokens + kv.n_tokens
            counted = _counts(kv)
            seen = counted if seen is None else seen + counted
        if seen is None or shape is None or tokens < FEWEST:
            raise InputError(f"{tokens} tokens are too few to fit tables on: give at least {FEWEST}")
        progress(1, 1)
        head = _TABLES.pack(_MAGIC, shape.n_layers, shape.n_kv_heads, shape.head_dim)
        return head + _weights(seen, tokens).astype("<u2").tobytes()

    def bins(self, l: int, part: int) -> int:
        return self._level.bins(part, l, self._weights.n_layers)

    def models(self, l: int) -> list[list[Any]]:
        """The distributions of the channels of layer l's keys, and of its values."""
        if l not in self._models:
            self._models[l] = [
                [
                    constriction.stream.model.Categorical(w, perfect=False)
                    for w in self._weights.of(l, part, self.bins(l, part)).astype(float)
                ]
                for part in (0, 1)
            ]
        return self._models[l]

    def _segment(self, l: int, kv: ChunkKV) -> bytes:
        parts = [quantised(x[l], self.bins(l, part)) for part, x in enumerate((kv.keys, kv.values))]
        coder = constriction.stream.stack.AnsCoder()
        for (_, integers), models in reversed(list(zip(parts, self.models(l), strict=True))):  # a stack
            rows = integers.T.contiguous().to(torch.int32).numpy()  # [K * D, C]
            for row, model in reversed(list(zip(rows, models, strict=True))):
                if len(row):
                    coder.encode_reverse(row, model)
        scales = b"".join(scale.view(torch.uint8).numpy().tobytes() for scale, _ in parts)
        words: bytes = coder.get_compressed().astype("<u4").tobytes()
        return scales + words


@dataclass(frozen=True, slots=True)
class CacheGenDecoder:
    """Decodes the layers of one shape."""

    codec: CacheGen
    shape: ChunkShape

    def layer(self, l: int, segment: Buffer) -> Pair:
        shape = self.shape
        n_tokens = shape.n_tokens
        if not n_tokens:
            keys, values = torch.empty((2, shape.n_kv_heads, 0, shape.head_dim), dtype=shape.dtype)
            return keys, values
        scales = aligned(memoryview(segment)[: 4 * n_tokens], torch.bfloat16).view(2, n_tokens)
        words = np.frombuffer(segment, "<u4", offset=4 * n_tokens).astype(np.uint32)
        coder = constriction.stream.stack.AnsCoder(words)
        found = []
        for part, models in enumerate(self.codec.models(l)):
            rows = np.stack([coder.decode(model, n_tokens) for model in models])  # [K * D, C]
            found.append(_values(rows, scales[part], self.codec.bins(l, part), shape))
        if not coder.is_empty():
            raise ValueError("it goes on after its last integer")
        return found[0], found[1]


def symbols_of(bins: int) -> int:
    """The number of integers at a number of bins, 0 included."""
    return 2 * (bins // 2 - 1) + 1


def quantised(x: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """[..., K, C, D] -> scales [..., C] in bf16, and integers from 0 on [..., C, K * D]. NaN counts as 0."""
    most = bins // 2 - 1
    flat = x.detach().cpu().float().transpose(-3, -2).flatten(-2)  # [..., C, K * D]
    scales = flat.abs().amax(dim=-1).to(torch.bfloat16)
    shares = flat * (most / scales.float().clamp(min=torch.finfo(torch.float32).tiny)).unsqueeze(-1)
    return scales, shares.nan_to_num(0.0).round().clamp(-most, most).to(torch.int8) + most


def _values(rows: np.ndarray, scales: Tensor, bins: int, shape: ChunkShape) -> Tensor:
    """[K * D, C] -> [K, C, D]"""
    most = bins // 2 - 1
    values = torch.from_numpy(rows).float().sub_(most).mul_(scales.float() / most)
    by_head = values.view(shape.n_kv_heads, shape.head_dim, shape.n_tokens)
    return by_head.transpose(1, 2).to(shape.dtype).contiguous()


def _counts(kv: ChunkKV) -> np.ndarray:
    """[L, 2, K * D, 53]"""
    n_layers, n_kv_heads, _, head_dim = kv.keys.shape
    n_channels, both = n_kv_heads * head_dim, torch.stack((kv.keys, kv.values), dim=1)  # [L, 2, K, C, D]
    parts = []
    for bins in BINS:
        n = symbols_of(bins)
        integers = quantised(both, bins)[1].long().transpose(-1, -2)  # [L, 2, K * D, C]
        rows = torch.arange(n_layers * 2 * n_channels).view(n_layers, 2, n_channels, 1)
        counted = torch.bincount((rows * n + integers).flatten(), minlength=rows.numel() * n)
        parts.append(counted.view(n_layers, 2, n_channels, n).numpy())
    return np.concatenate(parts, axis=-1)


def _weights(seen: np.ndarray, tokens: int) -> np.ndarray:
    """In 16 bits, none of them 0: an unseen integer gets half the weight of one that was seen once."""
    parts, at = [], 0
    for bins in BINS:
        n = symbols_of(bins)
        shares = (seen[..., at : at + n] + 0.5) / (tokens + 0.5 * n)
        parts.append(np.maximum(1, np.rint(65535 * shares)).clip(max=65535))
        at += n
    return np.concatenate(parts, axis=-1)
