"""The contract of a codec: a chunk's KV <-> one segment of bytes per layer.

    encode   keys and values [L, K, C, D]  -> segment 0, segment 1, ..., segment L-1
    decode   segment 0 -> layer 0,  segment 1 (and layer 0) -> layer 1,  ...

A record says which codec wrote it, at which level, and the hash of the tables that it needs (record.py), so one store
may hold chunks of several codecs. A chunk whose codec or tables are not here is a miss with a reason: `Undecodable`.
A segment reaches a decoder only after its length and its checksum were found right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import torch

from blendserve.core import ChunkKV
from blendserve.registry import CODECS

Buffer: TypeAlias = "bytes | bytearray | memoryview"
Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # keys before RoPE and values [K, C, D] of one layer

NAME_BYTES, TABLES_BYTES = 8, 16
NO_TABLES = bytes(TABLES_BYTES)


class Undecodable(Exception):
    """What decodes a record is not here. The message says what is missing."""


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """Keys and values of a chunk are [L, K, C, D] each."""

    dtype: torch.dtype
    n_layers: int  # L
    n_kv_heads: int  # K
    head_dim: int  # D
    n_tokens: int  # C

    @classmethod
    def of(cls, kv: ChunkKV) -> ChunkShape:
        n_layers, n_kv_heads, n_tokens, head_dim = kv.keys.shape
        return cls(kv.keys.dtype, n_layers, n_kv_heads, head_dim, n_tokens)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's keys and values, uncoded."""
        return 2 * self.n_kv_heads * self.n_tokens * self.head_dim * self.dtype.itemsize

    @property
    def n_bytes(self) -> int:
        """Bytes of all layers, uncoded."""
        return self.n_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class Coding:
    """How a record was coded: what has to be known before any of it can be decoded."""

    codec: str  # its name in registry.CODECS
    level: int = 0  # on the codec's own scale; 0 where it has none
    tables: bytes = NO_TABLES  # hash of the codec's tables for the model; zeros where it has none

    def __post_init__(self) -> None:
        if not 0 < len(self.codec.encode()) <= NAME_BYTES or len(self.tables) != TABLES_BYTES:
            raise ValueError(
                f"a codec's name has 1 to {NAME_BYTES} bytes, its tables' hash {TABLES_BYTES}: {self}"
            )


class Decoder(Protocol):
    """Decodes one chunk."""

    def layer(self, l: int, segment: Buffer) -> Pair:
        """Layer l's keys before RoPE and values, [K, C, D] each; they may point into the segment.

        Called for l = 0, 1, 2, ... without a gap and by one thread at a time; in any order and by several threads if the
        codec is `random_access`. Raises ValueError for bytes that are no such segment.
        """
        ...


class Codec(ABC):
    """One codec at one level, with its tables."""

    random_access: ClassVar[bool] = False  # whether a layer can be decoded without the layers below it
    coding: Coding  # what is said by the records that it writes

    @classmethod
    @abstractmethod
    def for_reading(cls, coding: Coding) -> Codec:
        """The codec that decodes such records. Raises Undecodable when the level or the tables are not here."""

    @classmethod
    @abstractmethod
    def check(cls, coding: Coding, shape: ChunkShape, lengths: Sequence[int]) -> None:
        """Raise ValueError when segments of these lengths [L] cannot hold such a chunk. Nothing is allocated for it."""

    @abstractmethod
    def expected_bytes(self, raw_bytes: int) -> int:
        """About how many bytes it writes for KV that takes so many uncoded."""

    @abstractmethod
    def encode(self, kv: ChunkKV) -> list[Buffer]:
        """The segments of all layers, [L]."""

    @abstractmethod
    def decoder(self, shape: ChunkShape) -> Decoder:
        """For one chunk of this shape."""


def known_codec(name: str) -> type[Codec] | None:
    """The codec of that name, None when this installation has none."""
    try:
        codec: type[Codec] = CODECS.load(name)
    except (ValueError, ImportError):
        return None
    return codec


def codec_for(coding: Coding) -> Codec:
    """The codec that decodes such records. Raises Undecodable."""
    codec = known_codec(coding.codec)
    if codec is None:
        raise Undecodable(
            f"this blendserve has no codec {coding.codec!r}: upgrade it, or install what brings the codec"
        )
    return codec.for_reading(coding)
