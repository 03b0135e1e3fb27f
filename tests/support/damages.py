"""Records of chunks as bytes: how older formats wrote them, and every damage that `verify` and reading must report.

DAMAGES are those of a chunk in today's format, by any codec that stores raw layers; BYTES know no field of a header and
hold for every format and codec; LIES are fields that agree with no other, by format; FORMATS has its writer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import torch
import xxhash

from blendserve.core import ChunkKV
from blendserve.store import record
from blendserve.store.codecs.raw import Raw
from blendserve.store.key import ChunkKey

Records = list["bytes | None"]
Encode = Callable[[ChunkKey, ChunkKV], "tuple[bytes, list[bytes]]"]


@dataclass(frozen=True)
class Damage:
    """A change to the records of a chunk of at least two layers that `verify` must report."""

    name: str
    change: Callable[[ChunkKey, Records], Records]  # None = the record is missing
    layer: int | None  # the first that fails its check; None = the header fails
    readable: bool = False  # reading shows nothing of it

    def __str__(self) -> str:
        return self.name


def sealed(key: ChunkKey, body: bytes) -> bytes:
    """A header record whose own checksum fits the key."""
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(key + body))


def relabelled(key: ChunkKey, header: bytes, *fields: tuple[int, str, object]) -> bytes:
    """A header with other values at offsets (offset, struct format, value), under a checksum that fits."""
    body = bytearray(header[:-8])
    for offset, kind, value in fields:
        struct.pack_into("<" + kind, body, offset, value)
    return sealed(key, bytes(body))


# Damage


def _at(n: int, change: Callable[[bytes], bytes | None], name: str) -> Damage:
    def damage(_: ChunkKey, records: Records) -> Records:
        return [change(raw or b"") if i == n else raw for i, raw in enumerate(records)]

    return Damage(name, damage, n - 1 if n else None)


def _flip(at: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]


def lie(offset: int, kind: str, value: object) -> Damage:
    """Another value in a field of the header, under a checksum that fits: no other field agrees with it."""

    def change(key: ChunkKey, records: Records) -> Records:
        return [relabelled(key, records[0] or b"", (offset, kind, value)), *records[1:]]

    return Damage(f"header says {value!r} at {offset}", change, None)


TOP32, TOP64 = 2**32 - 1, 2**64 - 1
LIES: dict[int, list[tuple[int, str, list[Any]]]] = {
    1: [(0, "4s", [b"NOPE"]), (4, "H", [0, 2]), (6, "B", [0, 9, 1]), (7, "B", [1]), (8, "I", [0, 2, TOP32]),
        (12, "I", [0, 3]), (16, "I", [0, TOP32]), (20, "I", [0, TOP32]), (24, "Q", [0, TOP64])],
    3: [(0, "4s", [b"NOPE"]), (4, "H", [0, 1]), (6, "H", [0, 9, 1]), (8, "I", [0, 2, TOP32]), (12, "I", [0, 3]),
        (16, "I", [0, TOP32]), (20, "I", [0, TOP32]), (24, "8s", [bytes(8), b"\xff" * 8]), (32, "I", [1, TOP32]),
        (36, "B", [1]), (51, "B", [255]), (52, "Q", [0, 1, TOP64]), (84, "Q", [0, TOP64])],
}  # fmt: skip
LIES[2] = LIES[3]

BYTES: list[Damage] = [
    _at(0, _flip(9), "flipped header"),
    _at(0, lambda raw: raw[:-3], "header cut short"),
    _at(0, lambda raw: raw + b"\0", "header with a byte more"),
    _at(0, lambda raw: b"", "empty header"),
    _at(1, _flip(3), "flipped layer 0"),
    _at(2, _flip(5), "flipped layer 1"),
    _at(1, lambda raw: raw[:2], "layer 0 cut short"),
    _at(1, lambda raw: raw + b"\0", "layer 0 with a byte more"),
    _at(2, lambda raw: bytes(len(raw)), "layer 1 of zeros"),
    _at(2, lambda raw: None, "layer 1 missing"),
    Damage("all layers missing", lambda key, records: [records[0], *[None] * (len(records) - 1)], 0),
    Damage("layers swapped", lambda key, records: [records[0], records[2], records[1], *records[3:]], 0),
]


def _swap_all(key: ChunkKey, records: Records) -> Records:
    body = (records[0] or b"")[:-8]
    header = sealed(key, body[:52] + body[68:84] + body[52:68] + body[84:])
    return [header, records[2], records[1], *records[3:]]


SWAPPED = Damage("layers swapped with their lengths and checksums", _swap_all, 0)
DAMAGES: list[Damage] = [
    *BYTES,
    SWAPPED,
    *(lie(offset, kind, value) for offset, kind, values in LIES[3] for value in values),
    Damage("one layer more", lambda key, records: [*records, b"x"], None, readable=True),
]


# Formats. Those of 1 and 2 are frozen: they follow nothing of the package.


def encode(key: ChunkKey, kv: ChunkKV) -> tuple[bytes, list[bytes]]:
    """Today's format."""
    header, segments = record.encode(key, kv, Raw())
    return record.encode_header(key, header), [bytes(segment) for segment in segments]


DTYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def _layers(kv: ChunkKV) -> list[bytes]:
    return [
        b"".join(part[l].contiguous().view(torch.uint8).numpy().tobytes() for part in (kv.keys, kv.values))
        for l in range(len(kv.keys))
    ]


def encode_1(key: ChunkKey, kv: ChunkKV) -> tuple[bytes, list[bytes]]:
    """magic 4 | version 2 | dtype 1 | codec 1 | L, K, D, C 4 each | bytes of a layer 8 | checksums 8 L | checksum 8."""
    layers, (n_layers, n_kv_heads, n_tokens, head_dim) = _layers(kv), kv.keys.shape
    sizes = (n_layers, n_kv_heads, head_dim, n_tokens, len(layers[0]))
    fields = struct.pack("<4sHBBIIIIQ", b"BSKV", 1, DTYPES[kv.keys.dtype], 0, *sizes)
    seeds = [xxhash.xxh3_64_intdigest(key + fields + struct.pack("<I", l)) for l in range(n_layers)]
    sums = [xxhash.xxh3_64_intdigest(raw, seed) for raw, seed in zip(layers, seeds, strict=True)]
    return sealed(key, fields + struct.pack(f"<{n_layers}Q", *sums)), layers


def encode_2(key: ChunkKey, kv: ChunkKV) -> tuple[bytes, list[bytes]]:
    """As format 3, under another number and without token ids."""
    layers, (n_layers, n_kv_heads, n_tokens, head_dim) = _layers(kv), kv.keys.shape
    sizes = (DTYPES[kv.keys.dtype], n_layers, n_kv_heads, head_dim, n_tokens)
    body = fields = struct.pack("<4sHHIIII8s20x", b"BSKV", 2, *sizes, b"raw")
    for l, raw in enumerate(layers):
        seed = xxhash.xxh3_64_intdigest(key + fields + struct.pack("<I", l))
        body += struct.pack("<QQ", len(raw), xxhash.xxh3_64_intdigest(raw, seed))
    return sealed(key, body), layers


FORMATS: dict[int, Encode] = {1: encode_1, 2: encode_2, 3: encode}


def make_store_of_format_1(path: Path, chunks: dict[ChunkKey, ChunkKV]) -> None:
    """An LMDB store of format 1, with one hit and one miss counted."""
    path.mkdir()
    with lmdb.open(str(path), map_size=1 << 28) as env, env.begin(write=True) as txn:
        mark = b"BLKV" + struct.pack("<H", 1)
        txn.put(b"m:format", mark + xxhash.xxh3_64_digest(mark))
        txn.put(b"m:bytes", sealed(b"", struct.pack("<Q", sum(kv.n_bytes for kv in chunks.values()))))
        for used, (key, kv) in enumerate(chunks.items(), start=1):
            header, layers = encode_1(key, kv)
            txn.put(b"h" + key, header)
            for l, raw in enumerate(layers):
                txn.put(b"l" + key + struct.pack(">H", l), raw)
            txn.put(b"u" + key, sealed(key, struct.pack("<QQIB", used, kv.n_bytes, kv.n_tokens, False)))
            txn.put(b"o" + struct.pack(">Q", used) + key, b"")
        tag = next(iter(chunks))[:8]
        txn.put(b"c" + tag, sealed(tag, struct.pack("<5Q", 1, 1, 0, 0, 0)))
