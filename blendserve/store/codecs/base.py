"""The contract of a codec: a chunk's KV <-> one segment of bytes per layer.

    encode   keys and values [L, K, C, D]  -> segment 0, segment 1, ..., segment L-1
    decode   segment 0 -> layer 0,  segment 1 (and layer 0) -> layer 1,  ...

A record names its codec, level and the hash of its tables (record.py), so a store may hold chunks of several codecs. A
chunk without its codec or tables is a miss with a reason: `Undecodable`. A decoder gets a segment only after its length
and checksum were checked.

`fit` learns the tables of a codec for one model: bytes without any Python object in them. The store keeps them under
their hash (blobs.py); a process parses them once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import ClassVar, Final, Literal, Protocol, TypeAlias
from weakref import WeakValueDictionary

import torch

from blendserve.core import TokenIds
from blendserve.errors import CorruptBlob, StoreUnavailable
from blendserve.kv import ChunkKV, KVShape
from blendserve.registry import CODECS

Buffer: TypeAlias = "bytes | bytearray | memoryview"
Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # keys before RoPE and values [K, C, D] of one layer
Tables: TypeAlias = "Callable[[bytes], bytes | None]"  # tables by hash; None for absent ones
Sample: TypeAlias = "tuple[TokenIds, ChunkKV]"  # for `fit`: a chunk's tokens [C] and its KV
Progress: TypeAlias = "Callable[[int, int], None]"  # (steps done, total)
MissKind = Literal["absent", "corrupt", "codec", "level", "tables", "unreachable", "slow link"]
UNREACHABLE: Final = "unreachable"
SLOW: Final = "slow link"  # computing the chunk is faster than transferring it

NAME_BYTES, TABLES_BYTES = 8, 16
NO_TABLES = bytes(TABLES_BYTES)
MAX_READY = 8  # codecs with parsed tables in memory: several levels and models


@dataclass(frozen=True, slots=True)
class Miss:
    """The reason why a chunk is not used."""

    kind: MissKind
    detail: str = ""


class Undecodable(Exception):
    """A record, its codec or its tables are missing. The message says which; `kind` says it in one word."""

    def __init__(self, why: str, kind: MissKind = "tables") -> None:
        super().__init__(why)
        self.kind: MissKind = kind


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """Shapes of a chunk by layer: keys and values are [K, C, D] each; values may have another D."""

    dtype: torch.dtype
    n_tokens: int  # C
    layers: tuple[KVShape, ...]
    state_rows: tuple[
        int, ...
    ] = ()  # of each layer's state map; 0: the layer keeps KV. (): all layers keep KV

    @classmethod
    def of(cls, kv: ChunkKV) -> ChunkShape:
        return cls(
            kv.keys[0].dtype,
            kv.n_tokens,
            tuple(KVShape(len(k), k.shape[-1], v.shape[-1]) for k, v in zip(kv.keys, kv.values, strict=True)),
            tuple(k.shape[1] if l in kv.recurrent else 0 for l, k in enumerate(kv.keys))
            if kv.recurrent
            else (),
        )

    @property
    def recurrent(self) -> frozenset[int]:
        """Layers with a state map."""
        return frozenset(l for l, n in enumerate(self.state_rows) if n)

    def n_rows(self, l: int) -> int:
        """The rows of layer l: C, or those of its state map."""
        return (self.state_rows[l] if self.state_rows else 0) or self.n_tokens

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def of_every_layer(self) -> tuple[int, int]:
        """K and D of all layers. Raises ValueError if they differ, or values have another D."""
        heads, dim, value_dim = self.layers[0]
        if len(set(self.layers)) > 1 or self.state_rows or dim != value_dim:
            raise ValueError(
                "its layers differ in shape, or keys and values do, which this codec cannot store"
            )
        return heads, dim

    def layer_bytes(self, l: int) -> int:
        """Bytes of layer l's keys and values, uncoded."""
        return self.n_rows(l) * self.layers[l].numbers * self.dtype.itemsize

    @property
    def n_bytes(self) -> int:
        """Bytes of all layers, uncoded."""
        return sum(map(self.layer_bytes, range(self.n_layers)))


@dataclass(frozen=True, slots=True)
class Coding:
    """A record's codec, level and tables: a reader needs all three to decode it."""

    codec: str  # its name in registry.CODECS
    level: int = 0  # on the codec's own scale; 0 if it has none
    tables: bytes = NO_TABLES  # hash of the codec's tables for the model; zeros if it has none

    def __post_init__(self) -> None:
        if not 0 < len(self.codec.encode()) <= NAME_BYTES or len(self.tables) != TABLES_BYTES:
            raise ValueError(
                f"a codec's name has 1 to {NAME_BYTES} bytes, its tables' hash {TABLES_BYTES}: {self}"
            )

    @classmethod
    def by_tables(cls, codec: str, level: int, tables: bytes) -> Coding:
        """The coding of a codec with these tables."""
        return cls(codec, level, tables_hash(tables))


class FittedModel(Protocol):
    """What a codec may learn from the model itself (engine/sensitivity.py)."""

    n_embeddings: int  # of its vocabulary
    window: int  # tokens of text that `sensitivity` looks at together

    def first_layer(self, ids: Sequence[int]) -> Pair:
        """Keys before RoPE and values of layer 0 [K, n, D]; they depend on the token alone."""

    def sensitivity(self, ids: TokenIds, windows: int, progress: Callable[[], None]) -> torch.Tensor | None:
        """The Fisher information of keys and values [L, 2, K * D, K * D]; None for too little text."""


class Decoder(Protocol):
    """Decodes one chunk."""

    def layer(self, l: int, segment: Buffer) -> Pair:
        """Layer l's keys before RoPE and values, [K, C, D] each; they may point into the segment.

        Called for l = 0, 1, 2, ... without a gap and by one thread at a time; in any order and by several threads if the
        codec is `random_access`. Raises ValueError for bytes that are no such segment.
        """


class Codec(ABC):
    """One codec at one level, with its tables."""

    random_access: ClassVar[bool] = False  # a layer can be decoded without the layers below it
    levels: ClassVar[tuple[int, ...]] = (0,)  # from the finest to the coarsest
    default_level: ClassVar[int] = 0
    needs_tables: ClassVar[bool] = False
    needs_equal_layers: ClassVar[bool] = False  # all of one shape
    keeps_states: ClassVar[bool] = False  # and state maps
    is_lossless: ClassVar[bool] = False  # decoding returns the very numbers that were encoded
    coding: Coding  # of the records that it writes

    @classmethod
    @abstractmethod
    def with_tables(cls, level: int, tables: bytes = b"") -> Codec:
        """The codec at one of its levels. tables: the result of `fit`; b"" if it needs none.

        Raises ValueError for bytes that are no tables of this codec.
        """

    @classmethod
    def for_reading(cls, coding: Coding, tables: Tables) -> Codec:
        """The codec that decodes such records.

        Raises Undecodable for a missing level or tables, ValueError for tables of another codec.
        """
        if coding.level not in cls.levels:
            raise Undecodable(
                f"codec {coding.codec!r} has no level {coding.level} here, only {', '.join(map(str, cls.levels))}: "
                "upgrade blendserve",
                "level",
            )
        raw = tables(coding.tables) if cls.needs_tables else b""
        if raw is None:
            raise Undecodable(
                f"the tables {coding.tables.hex()} of codec {coding.codec!r} are not in the store: copy them with "
                "`blendserve store merge` from the store that the chunks came from"
            )
        return cls.with_tables(coding.level, raw)

    @classmethod
    def fit(
        cls,
        samples: Iterable[Sample],
        model: FittedModel | None = None,
        progress: Progress = lambda done, total: None,
    ) -> bytes:
        """Tables for the model that computed the samples, which are read once and in order.

        samples: computed while they are read, so the codec stores what it needs of them. model: that model, for codecs
        that learn more from it; their tables are worse without it. progress: of the work after reading. Raises InputError
        for too few samples.
        """
        raise NotImplementedError(f"{cls.__name__} needs no tables")

    @classmethod
    @abstractmethod
    def check(cls, coding: Coding, shape: ChunkShape, lengths: Sequence[int]) -> None:
        """Raise ValueError when segments of these lengths [L] cannot hold such a chunk. Nothing is allocated for it."""

    @abstractmethod
    def expected_bytes(self, raw_bytes: int) -> int:
        """An estimate of the bytes that it writes for KV of `raw_bytes` uncoded bytes."""

    @abstractmethod
    def encode(self, kv: ChunkKV) -> list[Buffer]:
        """The segments of all layers, [L]. Raises StoreError when the tables are for KV of another shape."""

    def fits(self, shape: ChunkShape) -> bool:
        """Whether its tables are for KV of this shape."""
        return True

    def decoder(self, shape: ChunkShape) -> Decoder:
        """A decoder of one chunk of this shape. Raises Undecodable when the tables are for KV of another shape."""
        if not self.fits(shape):
            raise Undecodable(f"the tables {self.coding.tables.hex()} are for KV of another shape")
        return self.new_decoder(shape)

    def new_decoder(self, shape: ChunkShape) -> Decoder:
        """Make a decoder for a shape that fits; by default `decode` for each layer. Allocates nothing of that size."""
        return LayerDecoder(self, shape)

    def decode(self, shape: ChunkShape, l: int, segment: Buffer) -> Pair:
        """Layer l of a chunk with tokens, as `Decoder.layer`; of a codec with `random_access`."""
        raise NotImplementedError(f"{type(self).__name__} decodes layers in order")


@dataclass(frozen=True, slots=True)
class LayerDecoder:
    """Decodes each layer alone."""

    codec: Codec
    shape: ChunkShape

    def layer(self, l: int, segment: Buffer) -> Pair:
        if self.shape.n_rows(l):
            return self.codec.decode(self.shape, l, segment)
        heads, *dims = self.shape.layers[l]
        keys, values = (torch.empty(heads, 0, dim, dtype=self.shape.dtype) for dim in dims)
        return keys, values


def known_codec(name: str) -> type[Codec] | None:
    """The codec of that name; None if it is not installed."""
    try:
        codec: type[Codec] = CODECS.load(name)
    except (ValueError, ImportError):
        return None
    return codec


def tables_hasher() -> blake2b:
    """What computes `tables_hash` of bytes that come in parts."""
    return blake2b(digest_size=TABLES_BYTES, person=b"blendserve.tb.1")


def tables_hash(raw: Buffer) -> bytes:
    """The hash that names tables, and is their checksum."""
    hasher = tables_hasher()
    hasher.update(raw)
    return hasher.digest()


_CodecKey: TypeAlias = "tuple[type[Codec], Coding]"
_ready: dict[_CodecKey, Codec] = {}  # least recently used first
_reading = WeakValueDictionary["_CodecKey", Lock]()  # held while the tables of one codec are read and parsed
_lock = Lock()  # of both; never held over I/O


def codec_for(coding: Coding, tables: Tables = lambda hash: None) -> Codec:
    """Return the codec that decodes such records. Raises Undecodable.

    Its tables are parsed once and shared by all chunks. Tables of one hash are the same in every store, so ready ones are
    not read again. Only chunks that need the same tables wait while these are read.
    """
    made = known_codec(coding.codec)
    if made is None:
        why = f"this blendserve has no codec {coding.codec!r}: upgrade it, or install the codec's package"
        raise Undecodable(why, "codec")
    if not made.needs_tables:
        return made.for_reading(coding, tables)
    with _lock:
        reading = _reading.setdefault((made, coding), Lock())
    with reading:
        with _lock:
            codec = _ready.pop((made, coding), None)
        codec = codec or _read_codec(made, coding, tables)
        with _lock:
            _ready[made, coding] = codec
            if len(_ready) > MAX_READY:
                del _ready[next(iter(_ready))]
        return codec


def _read_codec(made: type[Codec], coding: Coding, tables: Tables) -> Codec:
    hash = coding.tables.hex()
    try:
        return made.for_reading(coding, tables)
    except CorruptBlob as error:
        raise Undecodable(str(error)) from error
    except StoreUnavailable as error:
        why = f"the tables {hash} cannot be read: {error.public_message}"
        raise Undecodable(why, UNREACHABLE) from error
    except ValueError as error:
        raise Undecodable(f"the tables {hash} are not of codec {coding.codec!r}: {error}") from error


def forget_ready() -> None:
    """Drop the ready codecs, as in a new process."""
    with _lock:
        _ready.clear()
