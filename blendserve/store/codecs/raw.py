"""Uncoded tensors: keys [K, C, D], then values, contiguous. Bit-exact, and read without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from blendserve.kv import ChunkKV
from blendserve.store.codecs.base import Buffer, ChunkShape, Codec, Coding, Pair

# torch warns once per process that a read-only buffer could be written to: suppress it here
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class Raw(Codec):
    """No coding."""

    random_access = keeps_states = is_lossless = True
    coding = Coding("raw")

    @classmethod
    def with_tables(cls, level: int = 0, tables: bytes = b"") -> Raw:
        return cls()

    @classmethod
    def segment_bytes(cls, shape: ChunkShape, l: int) -> int:
        """Bytes of layer l's segment."""
        return shape.layer_bytes(l)

    @classmethod
    def check(cls, coding: Coding, shape: ChunkShape, lengths: Sequence[int]) -> None:
        if coding != cls.coding:
            raise ValueError("it names a level or tables, which this codec does not have")
        for l, length in enumerate(lengths):
            if length != (expected := cls.segment_bytes(shape, l)):
                raise ValueError(f"it says {length} bytes of layer {l}, its shape {expected}")

    def expected_bytes(self, raw_bytes: int) -> int:
        return raw_bytes

    def encode(self, kv: ChunkKV) -> list[Buffer]:
        return [self.segment(*layer) for layer in zip(kv.keys, kv.values, strict=True)]

    def segment(self, keys: torch.Tensor, values: torch.Tensor) -> Buffer:
        """Encode one layer's keys and values [K, C, D]."""
        both = torch.cat((keys.detach().reshape(-1), values.detach().reshape(-1))).cpu()
        return both.view(torch.uint8).numpy().data

    def decode(self, shape: ChunkShape, l: int, segment: Buffer) -> Pair:
        """Views over the segment."""
        heads, dim, value_dim = shape.layers[l]
        n = shape.n_rows(l)
        keys, values = torch.split(aligned(segment, shape.dtype), [heads * n * d for d in (dim, value_dim)])
        return keys.view(heads, n, dim), values.view(heads, n, value_dim)


def aligned(segment: Buffer, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """The values [n] from `offset` on; a view if they are aligned, else a copy."""
    flat = torch.frombuffer(segment, dtype=dtype, offset=offset)
    if flat.data_ptr() % dtype.itemsize:  # a small record between others: LMDB aligns those to two bytes only
        flat = torch.frombuffer(bytearray(memoryview(segment)[offset:]), dtype=dtype)
    return flat
