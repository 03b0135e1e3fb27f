"""A chunk's record: one header, and one segment per layer. No pickle.

    header   magic 4 | format 2 | dtype 2 | L 4 | K 4 | D 4 | C 4 | codec 8 | level 4 | hash of the codec's tables 16
             | (length 8 | checksum 8) of each layer | id 4 of each token, or of none
             | checksum of the chunk's key and all of the above 8                                          little-endian
    segment  the codec's bytes of the layer (codecs/)                               checksums are xxh3-64

That is format 3, of keys and values that are all [K, C, D]. Where their shapes differ, the header is of format 4: K and D
of the first layer, and (K 4 | D of keys 4 | D of values 4) of each layer before the lengths. Where some layers have a
state map it is of format 5: (rows of a state map 4, or 0) of each layer follow.

The header's own checksum is checked first. It covers the key, so a header under another key is damage. Then every
field is checked against the others. The first six bytes and the last eight mean the same in every format, so a header of
another format is not taken for a damaged one.

The checksum of a layer is seeded with the key, the fields and the layer's number. So undamaged bytes of another chunk,
layer, dtype, shape or codec fail it as well.

Runs of stored text are found by token ids (blend/runs.py). The ids reveal no more than the KV does.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from blendserve.core import TokenIds
from blendserve.errors import CorruptRecord, StoreError, StoreVersion
from blendserve.kv import ChunkKV, KVShape
from blendserve.store.codecs.base import NAME_BYTES, Buffer, ChunkShape, Codec, Coding, known_codec

MAGIC = b"BSKV"
FORMAT, FORMAT_BY_LAYER, FORMAT_WITH_STATES = 3, 4, 5
DTYPES = {1: torch.bfloat16, 2: torch.float16, 3: torch.float32}
CODE_OF = {dtype: code for code, dtype in DTYPES.items()}

_PRELUDE = struct.Struct("<4sH")
_FIELDS = struct.Struct(f"<4sHHIIII{NAME_BYTES}sI16s")
_SUM = struct.Struct("<Q")
_SHAPE = struct.Struct("<III")
_LAYER = struct.Struct("<QQ")
ID_BYTES = ROWS_BYTES = 4
SMALLEST = _PRELUDE.size + _SUM.size


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header record."""

    shape: ChunkShape
    coding: Coding
    lengths: tuple[int, ...]  # of each layer's segment
    checksums: tuple[int, ...]  # of each layer
    fields: bytes  # the record up to here: part of every layer's checksum
    token_ids: TokenIds = ()  # [C], or none if the writer did not know them

    @property
    def n_bytes(self) -> int:
        """Bytes of all segments, as stored."""
        return sum(self.lengths)


def ignore(event: str, why: str = "") -> None:
    """A report that is not counted."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A chunk as a codec wrote it. Its segments may lie in a store's memory; each is checked when it is read."""

    key: bytes
    header: Header
    read: Callable[[int], Buffer | None]  # layer l's bytes, None for a missing layer
    report: Callable[..., None] = ignore  # the store counts: "corrupt", or "undecodable" and why
    trusted: bool = False  # the bytes were checked, and nothing can have changed them since

    @classmethod
    def encode(cls, key: bytes, kv: ChunkKV, codec: Codec) -> ChunkRecord:
        """Encode a chunk's KV. Raises StoreError for tensors that are no chunk KV."""
        validate_kv(kv)
        return cls.from_segments(key, ChunkShape.of(kv), codec.coding, codec.encode(kv), kv.ids)

    @classmethod
    def from_segments(
        cls,
        key: bytes,
        shape: ChunkShape,
        coding: Coding,
        segments: Sequence[Buffer],
        token_ids: TokenIds = (),
    ) -> ChunkRecord:
        """Make the header of segments [L] that a codec wrote."""
        fields = _pack(shape, coding)
        sums = tuple(_segment_checksum(key, fields, l, segment) for l, segment in enumerate(segments))
        header = Header(shape, coding, tuple(map(len, segments)), sums, fields, token_ids)
        return cls(key, header, segments.__getitem__, trusted=True)

    @property
    def shape(self) -> ChunkShape:
        return self.header.shape

    @property
    def coding(self) -> Coding:
        return self.header.coding

    @property
    def token_ids(self) -> TokenIds:
        return self.header.token_ids

    @property
    def n_layers(self) -> int:
        return self.header.shape.n_layers

    @property
    def n_tokens(self) -> int:
        return self.header.shape.n_tokens

    @property
    def n_bytes(self) -> int:
        """Bytes of all segments, as stored."""
        return self.header.n_bytes

    @property
    def raw_bytes(self) -> int:
        """Bytes of the decoded KV."""
        return self.header.shape.n_bytes

    def header_bytes(self) -> bytes:
        """The header record."""
        layers = b"".join(map(_LAYER.pack, self.header.lengths, self.header.checksums))
        body = self.header.fields + layers + np.asarray(self.header.token_ids, "<u4").tobytes()
        return body + _SUM.pack(xxhash.xxh3_64_intdigest(self.key + body))

    def segment(self, l: int) -> Buffer:
        """Layer l as the codec wrote it. Raises CorruptRecord, IndexError, and the errors of `read`."""
        if not 0 <= l < self.n_layers:
            raise IndexError(f"a chunk of {self.n_layers} layers has no layer {l}")
        raw = self.read(l)
        if self.trusted and raw is not None:
            return raw
        try:
            return check_segment(self.key, self.header, l, raw)
        except CorruptRecord:
            self.report("corrupt")
            raise

    def segments(self) -> list[Buffer]:
        """All layers, [L]. Raises CorruptRecord."""
        return [self.segment(l) for l in range(self.n_layers)]

    def copy(self) -> ChunkRecord:
        """A copy in memory of its own, every segment checked. Raises CorruptRecord."""
        segments = [bytes(segment) for segment in self.segments()]
        return ChunkRecord(self.key, self.header, segments.__getitem__, trusted=True)

    def for_key(self, key: bytes) -> ChunkRecord:
        """The same chunk under another key. Raises CorruptRecord."""
        if key == self.key:
            return self
        return ChunkRecord.from_segments(key, self.shape, self.coding, self.segments(), self.token_ids)


def decode_header(key: bytes, raw: Buffer) -> Header:
    """Read a header record. Raises CorruptRecord; StoreVersion for a whole header of another format."""
    raw = bytes(raw)
    if len(raw) < SMALLEST:
        raise CorruptRecord(key, f"its header has {len(raw)} bytes, the smallest has {SMALLEST}")
    body = raw[: -_SUM.size]
    (own,) = _SUM.unpack(raw[-_SUM.size :])
    if xxhash.xxh3_64_intdigest(key + body) != own:
        raise CorruptRecord(key, "its header fails its checksum")
    magic, version = _PRELUDE.unpack_from(body)
    try:
        if magic != MAGIC or version < 1:
            raise ValueError(f"it starts with {magic!r} and format {version}")
        if version not in (FORMAT, FORMAT_BY_LAYER, FORMAT_WITH_STATES):
            newer = "upgrade blendserve, or give this version a store of its own (store.location)"
            remedy = newer if version > FORMAT else "run `blendserve precompute` to store it again"
            raise StoreVersion(
                f"chunk {key.hex()} was stored in format {version}, this blendserve reads formats {FORMAT} to "
                f"{FORMAT_WITH_STATES}: {remedy}"
            )
        header = _parse(body)
        if codec := known_codec(header.coding.codec):
            codec.check(header.coding, header.shape, header.lengths)
    except (ValueError, struct.error) as error:
        raise CorruptRecord(key, f"its header makes no sense: {error}") from None
    return header


def check_segment(key: bytes, header: Header, l: int, raw: Buffer | None) -> Buffer:
    """Layer l's bytes, checked; None = missing. Raises CorruptRecord."""
    if raw is None:
        raise CorruptRecord(key, f"layer {l} is missing", l)
    if len(raw) != header.lengths[l]:
        raise CorruptRecord(key, f"layer {l} has {len(raw)} bytes, its header says {header.lengths[l]}", l)
    if _segment_checksum(key, header.fields, l, raw) != header.checksums[l]:
        raise CorruptRecord(key, f"layer {l} fails its checksum", l)
    return raw


def validate_kv(kv: ChunkKV) -> None:
    """Raise StoreError for tensors that cannot be stored."""
    for keys, values in zip(kv.keys, kv.values, strict=False):
        if keys.shape[:-1] != values.shape[:-1] or keys.dtype != values.dtype:
            raise StoreError(
                f"a layer's keys and values must be alike, these are {keys.dtype} {tuple(keys.shape)} "
                f"and {values.dtype} {tuple(values.shape)}"
            )
        if keys.dim() != 3 or 0 in (keys.shape[0], keys.shape[2], values.shape[2]):
            raise StoreError(f"a layer's KV is [K, C, D] with only C allowed to be 0, not {list(keys.shape)}")
    if not 0 < len(kv.keys) == len(kv.values):
        raise StoreError(f"a chunk has keys of {len(kv.keys)} layers and values of {len(kv.values)}")
    if (
        len(
            of := {(x.dtype, kv.n_tokens if l in kv.recurrent else x.shape[1]) for l, x in enumerate(kv.keys)}
        )
        > 1
    ):
        raise StoreError(f"a chunk's layers must have one dtype and one number of tokens, not {of}")
    if (dtype := kv.keys[0].dtype) not in CODE_OF:
        raise StoreError(
            f"a chunk's KV is stored as {', '.join(map(str, CODE_OF))}, not {dtype}: convert it first"
        )
    if len(kv.ids) not in (0, kv.n_tokens):
        raise StoreError(
            f"a chunk of {kv.n_tokens} tokens has {len(kv.ids)} token ids: give all of them or none"
        )


def _segment_checksum(key: bytes, fields: bytes, l: int, raw: Buffer) -> int:
    """The checksum of these bytes as layer l of this chunk, of this shape, dtype and coding."""
    seed = xxhash.xxh3_64_intdigest(key + fields + l.to_bytes(4, "little"))
    return xxhash.xxh3_64_intdigest(raw, seed)


def _pack(shape: ChunkShape, coding: Coding) -> bytes:
    """The fields in front of a header."""
    heads, dim, value_dim = shape.layers[0]
    dtype = CODE_OF[shape.dtype]
    sizes = (shape.n_layers, heads, dim, shape.n_tokens)
    differ = len(set(shape.layers)) > 1 or dim != value_dim
    version = FORMAT_WITH_STATES if shape.state_rows else FORMAT_BY_LAYER if differ else FORMAT
    fields = _FIELDS.pack(MAGIC, version, dtype, *sizes, coding.codec.encode(), coding.level, coding.tables)
    layers = b"".join(_SHAPE.pack(*layer) for layer in shape.layers if version != FORMAT)
    return fields + layers + np.asarray(shape.state_rows, "<u4").tobytes()


def _parse(body: bytes) -> Header:
    """A header without its checksum. Raises ValueError, struct.error."""
    _, version, dtype, n_layers, heads, dim, n_tokens, codec, level, tables = _FIELDS.unpack_from(body)
    rows_at = _FIELDS.size + (n_layers * _SHAPE.size if version != FORMAT else 0)
    end = rows_at + (n_layers * ROWS_BYTES if version == FORMAT_WITH_STATES else 0)
    ids_at = end + n_layers * _LAYER.size
    if len(body) not in (ids_at, ids_at + n_tokens * ID_BYTES):
        raise ValueError(
            f"it has {len(body)} bytes, which do not fit {n_layers} layers and {n_tokens} tokens"
        )
    shapes = [KVShape(heads, dim, dim)] * n_layers
    if version != FORMAT:
        shapes = [KVShape(*sizes) for sizes in _SHAPE.iter_unpack(body[_FIELDS.size : rows_at])]
    state_rows = tuple(np.frombuffer(body[rows_at:end], "<u4").tolist())
    if version == FORMAT_WITH_STATES and all(state_rows):
        raise ValueError("no layer has KV")
    if dtype not in DTYPES or not shapes or not all(map(all, shapes)):
        raise ValueError(f"dtype {dtype}, layers of {shapes}")
    segments = struct.unpack_from(f"<{2 * n_layers}Q", body, end)
    token_ids = tuple(np.frombuffer(body[ids_at:], "<u4").tolist())
    coding = Coding(codec.rstrip(b"\0").decode(), level, tables)
    shape = ChunkShape(DTYPES[dtype], n_tokens, tuple(shapes), state_rows)
    return Header(shape, coding, segments[::2], segments[1::2], body[:end], token_ids)
