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

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blendserve.errors import InputError, StoreError
from blendserve.extras import install_hint
from blendserve.kv import ChunkKV, KVShape, stacked
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
from blendserve.store.codecs.raw import aligned

try:
    import constriction
except ImportError as error:
    raise ImportError(f"codec 'cachegen' needs the package constriction: {install_hint('codecs')}") from error

BINS = (32, 16, 8)  # of all levels, in the order of the tables
LEVELS = {  # bins of the first layers and of the others; share of the first layers, for keys and for values
    0: (32, 16, (40 / 80, 20 / 80)),
    1: (32, 16, (10 / 32, 2 / 32)),
    2: (16, 8, (10 / 32, 2 / 32)),
}
FEWEST = 64  # tokens to learn distributions from
_TABLES = struct.Struct("<4sIII")
_MAGIC = b"CGT1"


class CacheGen(Codec):
    """The codec at one level, with the distributions of one model."""

    random_access = True
    levels = tuple(LEVELS)
    default_level = 1
    needs_tables = True
    needs_equal_layers = True

    def __init__(self, level: int, tables: bytes) -> None:
        """Raises ValueError for bytes that are no such tables."""
        self.coding = Coding.by_tables("cachegen", level, tables)
        self._shape, self._weights = _parsed(tables)  # (L, K, D), [L, 2, K * D, 53]
        self._models: dict[tuple[int, int], list[Any]] = {}

    @classmethod
    def with_tables(cls, level: int, tables: bytes = b"") -> CacheGen:
        return cls(level, tables)

    @classmethod
    def check(cls, coding: Coding, shape: ChunkShape, lengths: Sequence[int]) -> None:
        scales = 4 * shape.n_tokens
        n = 2 * shape.n_tokens * math.prod(shape.of_every_layer)
        for length in lengths:
            if length < scales or length % 4 or length > scales + 3 * n + 16:  # 24 bits an integer at most
                raise ValueError(f"it says {length} bytes a layer, which is no length of {n} integers")

    @classmethod
    def fit(
        cls,
        samples: Iterable[Sample],
        model: FittedModel | None = None,
        progress: Progress = lambda done, total: None,
    ) -> bytes:
        """The frequency of each integer in each channel, at every number of bins."""
        counts = np.zeros(1)
        n_tokens = 0
        shape = (0, 0, 0)
        for _, kv in samples:
            counts = counts + _counts(kv)
            n_tokens = n_tokens + kv.n_tokens
            shape = (kv.n_layers, *ChunkShape.of(kv).of_every_layer)
        if n_tokens < FEWEST:
            raise InputError(f"{n_tokens} tokens are too few to fit tables on: give at least {FEWEST}")
        progress(1, 1)
        return _TABLES.pack(_MAGIC, *shape) + _weights(counts, n_tokens).astype("<u2").tobytes()

    def expected_bytes(self, raw_bytes: int) -> int:
        return raw_bytes // 5

    def fits(self, shape: ChunkShape) -> bool:
        n_layers, heads, dim = self._shape
        return shape.layers == (KVShape(heads, dim, dim),) * n_layers

    def encode(self, kv: ChunkKV) -> list[Buffer]:
        if not self.fits(ChunkShape.of(kv)):
            raise StoreError(
                f"the tables {self.coding.tables.hex()} are for another model: fit some by `blendserve codec fit`"
            )
        return [self._segment(l, kv) for l in range(len(kv.keys))]

    def decode(self, shape: ChunkShape, l: int, segment: Buffer) -> Pair:
        n_tokens = shape.n_tokens
        decoded = []
        scales = aligned(memoryview(segment)[: 4 * n_tokens], torch.bfloat16).view(2, n_tokens)
        words = np.frombuffer(segment, "<u4", offset=4 * n_tokens).astype(np.uint32)
        coder = constriction.stream.stack.AnsCoder(words)
        for part in (0, 1):
            channels = self._channels(l, part)
            rows = np.stack([coder.decode(model, n_tokens) for model in channels])  # [K * D, C]
            decoded.append(_values(rows, scales[part], self._bins(l, part), shape))
        if not coder.is_empty():
            raise ValueError("it goes on after its last integer")
        return decoded[0], decoded[1]

    def _bins(self, l: int, part: int) -> int:
        """The number of bins of layer l's keys (part 0) or values (1)."""
        first, others, shares = LEVELS[self.coding.level]
        return first if l < round(shares[part] * self._shape[0]) else others

    def _channels(self, l: int, part: int) -> list[Any]:
        """The distributions of the channels [K * D] of layer l's keys or values."""
        if (l, part) not in self._models:
            bins = self._bins(l, part)
            at = sum(symbols_of(other) for other in BINS[: BINS.index(bins)])
            weights = self._weights[l, part, :, at : at + symbols_of(bins)].astype(float)
            made = [constriction.stream.model.Categorical(w, perfect=False) for w in weights]
            self._models[l, part] = made
        return self._models[l, part]

    def _segment(self, l: int, kv: ChunkKV) -> bytes:
        coder = constriction.stream.stack.AnsCoder()
        scales = [b"", b""]
        for part, x in ((1, kv.values[l]), (0, kv.keys[l])):  # a stack: the last is decoded first
            scale, integers = quantised(x, self._bins(l, part))
            scales[part] = scale.view(torch.uint8).numpy().tobytes()
            rows = integers.T.contiguous().to(torch.int32).numpy()  # [K * D, C]
            for row, model in reversed(list(zip(rows, self._channels(l, part), strict=True))):
                if len(row):
                    coder.encode_reverse(row, model)
        words: bytes = coder.get_compressed().astype("<u4").tobytes()
        return b"".join(scales) + words


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


def _parsed(raw: bytes) -> tuple[tuple[int, int, int], np.ndarray]:
    """(L, K, D), and the frequency of each integer for each layer, part and channel [L, 2, K * D, 53], none of them 0."""
    if len(raw) < _TABLES.size:
        raise ValueError(f"{len(raw)} bytes are too few")
    magic, n_layers, n_kv_heads, head_dim = _TABLES.unpack_from(raw)
    shape = (n_layers, 2, n_kv_heads * head_dim, sum(map(symbols_of, BINS)))
    if magic != _MAGIC or len(raw) != _TABLES.size + 2 * math.prod(shape):
        raise ValueError(f"{len(raw)} bytes that begin with {magic!r} do not fit the shape {shape}")
    weights = np.frombuffer(raw, "<u2", offset=_TABLES.size).reshape(shape)
    if not weights.all():
        raise ValueError("an integer has no weight")
    return (n_layers, n_kv_heads, head_dim), weights


def _values(rows: np.ndarray, scales: Tensor, bins: int, shape: ChunkShape) -> Tensor:
    """[K * D, C] -> [K, C, D]"""
    most = bins // 2 - 1
    values = torch.from_numpy(rows).float().sub_(most).mul_(scales.float() / most)
    by_head = values.view(*shape.of_every_layer, shape.n_tokens)
    return by_head.transpose(1, 2).to(shape.dtype).contiguous()


def _counts(kv: ChunkKV) -> np.ndarray:
    """[L, 2, K * D, 53]"""
    both = torch.stack((stacked(kv.keys), stacked(kv.values)), dim=1)
    parts = []  # [L, 2, K, C, D]
    for n, bins in ((symbols_of(bins), bins) for bins in BINS):
        integers = quantised(both, bins)[1].long().transpose(-1, -2)  # [L, 2, K * D, C]
        rows = torch.arange(math.prod(integers.shape[:3])).view(*integers.shape[:3], 1)
        counted = torch.bincount((rows * n + integers).flatten(), minlength=rows.numel() * n)
        parts.append(counted.view(*integers.shape[:3], n).numpy())
    return np.concatenate(parts, axis=-1)


def _weights(counts: np.ndarray, n_tokens: int) -> np.ndarray:
    """Weights in 16 bits, none of them 0: an unseen integer gets half the weight of one that was seen once."""
    sizes = [symbols_of(bins) for bins in BINS]
    total = n_tokens + 0.5 * np.repeat(sizes, sizes)  # of each integer's distribution
    return np.maximum(1, np.rint(65535 * ((counts + 0.5) / total))).clip(max=65535)
