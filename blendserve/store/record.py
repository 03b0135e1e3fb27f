"""Bytes <-> chunk: one header record per chunk, one segment per layer. No pickle.

    header   magic 4 | format 2 | dtype 2 | L 4 | K 4 | D 4 | C 4 | codec 8 | level 4 | hash of the codec's tables 16
             | (length 8 | checksum 8) of each layer | id 4 of each token, or of none
             | checksum of the chunk's key and all of the above 8                                          little-endian
    segment  what the codec wrote for the layer (codecs/)                           checksums are xxh3-64

The header's own checksum is checked first and covers the key, so a header filed under another key is damage
too. Then every field is checked against every other and against the lengths that are really there. The
first six bytes and the checksum in the last eight hold for any later format, so that a newer header can be
told from a damaged one.

The checksum of a layer is seeded with the key, the fields in front and the layer's number. So bytes that
are whole but not these (another chunk's, another layer's, or read in another dtype, shape or codec) fail it as
well.

Token ids are what near-duplicates are found by (blend/near). They tell nobody more than the KV does.

Format 2 had no token ids. Format 1 knew no codecs: dtype and a zero took a byte each, the bytes of every layer stood
once, behind C, and then the checksums. Both are still read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from blendserve.core import ChunkKV, TokenIds
from blendserve.errors import CorruptRecord, StoreError, StoreVersion
from blendserve.store.codecs.base import NAME_BYTES, Buffer, ChunkShape, Codec, Coding, known_codec
from blendserve.store.codecs.raw import Raw

MAGIC = b"BSKV"
FORMAT = 3
DTYPES = {1: torch.bfloat16, 2: torch.float16, 3: torch.float32}
CODE_OF = {dtype: code for code, dtype in DTYPES.items()}

_PRELUDE = struct.Struct("<4sH")
_FIELDS = struct.Struct(f"<4sHHIIII{NAME_BYTES}sI16s")
_FIELDS_1 = struct.Struct("<4sHBBIIIIQ")
_SUM = struct.Struct("<Q")
ID_BYTES = 4
SMALLEST = _PRELUDE.size + _SUM.size


@dataclass(frozen=True, slots=True)
class Header:
    """What a header record says."""

    shape: ChunkShape
    coding: Coding
    lengths: tuple[int, ...]  # of each layer's segment
    checksums: tuple[int, ...]  # of each layer
    fields: bytes  # the record up to here, in its own format: part of every layer's checksum
    ids: TokenIds = ()  # [C], or none where nobody told

    @property
    def n_bytes(self) -> int:
        """Bytes of all segments, as stored."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Coded:
    """A chunk as a codec left it: what one store may give another without decoding it."""

    shape: ChunkShape
    coding: Coding
    segments: list[Buffer]  # [L]
    ids: TokenIds = ()  # [C], or none where nobody told


def encode(key: bytes, kv: ChunkKV, codec: Codec) -> tuple[Header, list[Buffer]]:
    """A chunk's header and its L segments. Raises StoreError for tensors that are no chunk KV."""
    validate_kv(kv)
    coded = Coded(ChunkShape.of(kv), codec.coding, codec.encode(kv), kv.ids)
    return seal(key, coded), coded.segments


def seal(key: bytes, coded: Coded) -> Header:
    """The header of a coded chunk under this key, in the present format."""
    fields = _pack(coded.shape, coded.coding)
    sums = (_segment_checksum(key, fields, l, segment) for l, segment in enumerate(coded.segments))
    return Header(coded.shape, coded.coding, tuple(map(len, coded.segments)), tuple(sums), fields, coded.ids)


def encode_header(key: bytes, header: Header) -> bytes:
    """The header record of the chunk `key`."""
    layers = [number for pair in zip(header.lengths, header.checksums, strict=True) for number in pair]
    body = header.fields + struct.pack(f"<{len(layers)}Q", *layers) + np.asarray(header.ids, "<u4").tobytes()
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(key + body))


def decode_header(key: bytes, raw: Buffer) -> Header:
    """Read a header record. Raises CorruptRecord, or StoreVersion for a whole header of a newer format."""
    raw = bytes(raw)
    if len(raw) < SMALLEST:
        raise CorruptRecord(key, f"its header has {len(raw)} bytes, the smallest has {SMALLEST}")
    body, (own,) = raw[: -_SUM.size], _SUM.unpack(raw[-_SUM.size :])
    if xxhash.xxh3_64_intdigest(key + body) != own:
        raise CorruptRecord(key, "its header fails its checksum")
    magic, version = _PRELUDE.unpack_from(body)
    if magic == MAGIC and version > FORMAT:
        raise StoreVersion(
            f"chunk {key.hex()} was stored in format {version} by a newer blendserve, this one reads format {FORMAT}: "
            "upgrade blendserve, or give this version a store of its own (store.path)"
        )
    try:
        if magic != MAGIC or version not in _PARSERS:
            raise ValueError(f"it starts with {magic!r} and format {version}")
        header = _PARSERS[version](body)
        if codec := known_codec(header.coding.codec):
            codec.check(header.coding, header.shape, header.lengths)
    except (ValueError, struct.error) as error:
        raise CorruptRecord(key, f"its header makes no sense: {error}") from None
    return header


def check_segment(key: bytes, header: Header, l: int, raw: Buffer | None) -> Buffer:
    """Layer l's segment, if that is what these bytes are; None = there are none. Raises CorruptRecord."""
    if raw is None:
        raise CorruptRecord(key, f"layer {l} is missing", l)
    if len(raw) != header.lengths[l]:
        raise CorruptRecord(key, f"layer {l} has {len(raw)} bytes, its header says {header.lengths[l]}", l)
    if _segment_checksum(key, header.fields, l, raw) != header.checksums[l]:
        raise CorruptRecord(key, f"layer {l} fails its checksum", l)
    return raw


def validate_kv(kv: ChunkKV) -> None:
    """Raise StoreError for tensors that cannot be stored."""
    keys, values = kv.keys, kv.values
    if keys.shape != values.shape or keys.dtype != values.dtype:
        raise StoreError(
            f"a chunk's keys and values must be alike, these are {keys.dtype} {tuple(keys.shape)} "
            f"and {values.dtype} {tuple(values.shape)}"
        )
    if keys.dtype not in CODE_OF:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in CODE_OF)
        raise StoreError(f"a chunk's KV is stored as {names}, not {keys.dtype}: convert it first")
    if keys.dim() != 4 or 0 in (keys.shape[0], keys.shape[1], keys.shape[3]):
        raise StoreError(f"a chunk's KV is [L, K, C, D] with only C allowed to be 0, not {list(keys.shape)}")
    if len(kv.ids) not in (0, kv.n_tokens):
        raise StoreError(
            f"a chunk of {kv.n_tokens} tokens has the ids of all of them or of none, not of {len(kv.ids)}"
        )


def _segment_checksum(key: bytes, fields: bytes, l: int, raw: Buffer) -> int:
    """What tells that these bytes are layer l of this chunk, of this shape, dtype and coding."""
    seed = xxhash.xxh3_64_intdigest(key + fields + l.to_bytes(4, "little"))
    return xxhash.xxh3_64_intdigest(raw, seed)


def _pack(shape: ChunkShape, coding: Coding) -> bytes:
    """The fields in front of a header of the present format."""
    dtype, sizes = CODE_OF[shape.dtype], (shape.n_layers, shape.n_kv_heads, shape.head_dim, shape.n_tokens)
    return _FIELDS.pack(MAGIC, FORMAT, dtype, *sizes, coding.codec.encode(), coding.level, coding.tables)


def _parse(body: bytes) -> Header:
    """A header of the present format. Raises ValueError, struct.error."""
    _, _, dtype, *sizes, codec, level, tables = _FIELDS.unpack_from(body)
    shape, end = _shape(dtype, *sizes), len(body)
    if n_ids := end - _FIELDS.size - shape.n_layers * 2 * _SUM.size:
        end -= shape.n_tokens * ID_BYTES
    layers = _layers(body[:end], _FIELDS.size, shape.n_layers, 2)
    ids = tuple(np.frombuffer(body[end:], "<u4").tolist()) if n_ids else ()
    coding = Coding(codec.rstrip(b"\0").decode(), level, tables)
    return Header(shape, coding, layers[::2], layers[1::2], body[: _FIELDS.size], ids)


def _parse_2(body: bytes) -> Header:
    """A header of format 2. Raises ValueError, struct.error."""
    if (header := _parse(body)).ids:
        raise ValueError("it has token ids, which format 2 does not")
    return header


def _parse_1(body: bytes) -> Header:
    """A header of format 1. Raises ValueError, struct.error."""
    _, _, dtype, codec, *sizes, layer_bytes = _FIELDS_1.unpack_from(body)
    shape = _shape(dtype, *sizes)
    checksums = _layers(body, _FIELDS_1.size, shape.n_layers, 1)
    if codec or layer_bytes != shape.layer_bytes:
        raise ValueError(
            f"it says {layer_bytes} bytes a layer in codec {codec}, its shape {shape.layer_bytes}"
        )
    return Header(shape, Raw.coding, (layer_bytes,) * shape.n_layers, checksums, body[: _FIELDS_1.size])


_PARSERS = {1: _parse_1, 2: _parse_2, FORMAT: _parse}


def _shape(dtype: int, n_layers: int, n_kv_heads: int, head_dim: int, n_tokens: int) -> ChunkShape:
    if dtype not in DTYPES or not (n_layers and n_kv_heads and head_dim):
        raise ValueError(f"dtype {dtype}, shape {[n_layers, n_kv_heads, n_tokens, head_dim]}")
    return ChunkShape(DTYPES[dtype], n_layers, n_kv_heads, head_dim, n_tokens)


def _layers(body: bytes, start: int, n_layers: int, each: int) -> tuple[int, ...]:
    """The numbers behind the fields, so many for each layer."""
    if len(body) != start + n_layers * each * _SUM.size:
        raise ValueError(f"it has {len(body)} bytes, which do not fit {n_layers} layers")
    return struct.unpack_from(f"<{n_layers * each}Q", body, start)
