"""Codecs under test: a toy one, and KV that the codec `predict` can learn.

The toy is a codec as a contributor adds it: one class, and one line in the registry.
Each layer's bytes are taken apart from those of the layer below (exclusive or), passed through a table of the model and
squeezed. So it is lossless, has levels and tables, and decodes a layer only after those below it. At level 0 nothing is
squeezed, and chunks of one shape take equally many bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import ClassVar

import torch

from blendserve.core import ChunkKV
from blendserve.store.codecs.base import (
    Buffer,
    ChunkShape,
    Codec,
    Coding,
    Pair,
    Tables,
    Undecodable,
    tables_hash,
)
from blendserve.store.codecs.predict.codec import Predict
from blendserve.store.codecs.raw import Raw


class Toy(Codec):
    """At one level of zlib, with the tables of one model."""

    levels = tuple(range(10))
    needs_tables = True
    tables_here: ClassVar[dict[bytes, bytes]] = {}  # by hash: 256 bytes, a permutation

    def __init__(self, level: int = 0, table: bytes = bytes(range(255, -1, -1))) -> None:
        self.coding = Coding("toy", level, tables_hash(table))
        self._table = table
        self.tables_here[self.coding.tables] = table

    @classmethod
    def with_tables(cls, level: int, tables: bytes = b"") -> Toy:
        if sorted(tables) != list(range(256)):
            raise ValueError(f"{len(tables)} bytes are no permutation of all bytes")
        return cls(level, tables)

    @classmethod
    def for_reading(cls, coding: Coding, tables: Tables) -> Toy:
        """From the store, or, as tests need not put them there, from this process."""
        raw = tables(coding.tables) or cls.tables_here.get(coding.tables)
        if raw is None:
            raise Undecodable(f"the tables {coding.tables.hex()} of codec 'toy' are not here")
        return cls.with_tables(coding.level, raw)

    @classmethod
    def check(cls, coding: Coding, shape: ChunkShape, lengths: Sequence[int]) -> None:
        if coding.level > 9 or shape.layer_bytes > 1100 * max(lengths):  # deflate reaches 1032 at most
            raise ValueError(
                f"{max(lengths)} bytes at level {coding.level} are no layer of {shape.layer_bytes}"
            )

    def expected_bytes(self, raw_bytes: int) -> int:
        return raw_bytes // 2 if self.coding.level else raw_bytes

    def encode(self, kv: ChunkKV) -> list[Buffer]:
        raw = [bytes(segment) for segment in Raw().encode(kv)]
        deltas = [_xor(layer, below) for layer, below in zip(raw, [b"", *raw], strict=False)]
        return [zlib.compress(delta.translate(self._table), self.coding.level) for delta in deltas]

    def decoder(self, shape: ChunkShape) -> ToyDecoder:
        return ToyDecoder(shape, self._table)


class ToyDecoder:
    """Remembers the layer below, and which one is due."""

    def __init__(self, shape: ChunkShape, table: bytes) -> None:
        self._raw, self._back = Raw().decoder(shape), bytes(table.index(byte) for byte in range(256))
        self._below, self._due = b"", 0

    def layer(self, l: int, segment: Buffer) -> Pair:
        assert l == self._due
        self._due += 1
        try:
            delta = zlib.decompress(segment)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        self._below = _xor(delta.translate(self._back), self._below)
        return self._raw.layer(l, self._below)


def _xor(one: bytes, other: bytes) -> bytes:
    mixed = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
    return mixed.to_bytes(len(one), "little")


def decoded(codec: Codec, kv: ChunkKV) -> ChunkKV:
    """The chunk after encoding and decoding."""
    decoder = codec.decoder(ChunkShape.of(kv))
    layers = [decoder.layer(l, segment) for l, segment in enumerate(codec.encode(kv))]
    return ChunkKV(*(torch.stack(part) for part in zip(*layers, strict=True)))


def related(n_tokens: int, seed: int, noise: float = 0.1) -> ChunkKV:
    """Layer 0 by token id; each further layer is the one below, rotated, with noise."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(50, 32, generator=generator)
    turns = [torch.linalg.qr(torch.randn(32, 32, generator=generator))[0] for _ in range(3)]
    generator.manual_seed(seed)
    ids = torch.randint(0, 50, (n_tokens,), generator=generator)
    layers = [rows[ids]]
    for turn in turns:
        layers.append(layers[-1] @ turn + noise * torch.randn(n_tokens, 32, generator=generator))
    heads = torch.stack(layers).view(4, n_tokens, 4, 8).transpose(1, 2)
    return ChunkKV(heads[:, :2].contiguous(), heads[:, 2:].contiguous(), ids=tuple(ids.tolist()))


@cache
def predict_tables() -> bytes:
    """Tables of `predict` for `related` KV."""
    return Predict.fit((kv.ids, kv) for kv in (related(60, seed) for seed in range(20)))


def refuses(call: Callable[..., object], *arguments: object) -> bool:
    """Whether a call raises ValueError."""
    try:
        call(*arguments)
    except ValueError:
        return True
    return False
