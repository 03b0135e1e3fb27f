"""Codecs under test: a toy one with tables, and KV that the codec `predict` can learn."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import ClassVar

import torch

from blendserve.kv import ChunkKV, join_layers
from blendserve.store.codecs.base import Buffer, ChunkShape, Codec, Coding, Pair, Tables, tables_hash
from blendserve.store.codecs.predict.codec import Predict
from blendserve.store.codecs.raw import Raw


class Toy(Codec):
    """A codec as a contributor adds it, in one class: uncoded bytes through a table of the model, squeezed by zlib.

    At level 0 nothing is squeezed, and chunks of one shape take equally many bytes.
    """

    random_access = True
    levels = tuple(range(10))
    needs_tables = True
    tables_here: ClassVar[dict[bytes, bytes]] = {}  # by hash: 256 bytes, a permutation

    def __init__(self, level: int = 0, table: bytes = bytes(range(255, -1, -1))) -> None:
        self.coding = Coding("toy", level, tables_hash(table))
        self._table, self._back = table, bytes(map(table.index, range(256)))
        self.tables_here[self.coding.tables] = table

    @classmethod
    def with_tables(cls, level: int, tables: bytes = b"") -> Toy:
        if sorted(tables) != list(range(256)):
            raise ValueError(f"{len(tables)} bytes are no permutation of all bytes")
        return cls(level, tables)

    @classmethod
    def for_reading(cls, coding: Coding, tables: Tables) -> Codec:
        """From the store, or, as tests need not put them there, from this process."""
        return super().for_reading(coding, lambda hash: tables(hash) or cls.tables_here.get(hash))

    @classmethod
    def check(cls, coding: Coding, shape: ChunkShape, lengths: Sequence[int]) -> None:
        if coding.level > 9 or shape.layer_bytes(0) > 1100 * max(lengths):  # deflate reaches 1032 at most
            raise ValueError(
                f"{lengths} bytes at level {coding.level} are no layers of {shape.layer_bytes(0)}"
            )

    def expected_bytes(self, raw_bytes: int) -> int:
        return raw_bytes // 2 if self.coding.level else raw_bytes

    def encode(self, kv: ChunkKV) -> list[Buffer]:
        return [
            zlib.compress(bytes(raw).translate(self._table), self.coding.level) for raw in Raw().encode(kv)
        ]

    def decode(self, shape: ChunkShape, l: int, segment: Buffer) -> Pair:
        try:
            raw = zlib.decompress(segment).translate(self._back)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        return Raw().decode(shape, l, raw)


def decoded(codec: Codec, kv: ChunkKV) -> ChunkKV:
    """The chunk after encoding and decoding."""
    decoder = codec.decoder(ChunkShape.of(kv))
    layers = [decoder.layer(l, segment) for l, segment in enumerate(codec.encode(kv))]
    return ChunkKV(*(join_layers(part) for part in zip(*layers, strict=True)))


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
