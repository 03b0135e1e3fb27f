"""Records of chunks as bytes: every damage that `verify` and reading must report.

DAMAGES are those of a chunk by any codec. LIES are values of header fields that agree with no other field of an uncoded
chunk: offset, struct format, values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash

from blendserve.store.key import ChunkKey

Records = list["bytes | None"]


@dataclass(frozen=True)
class Damage:
    """A change to the records of a chunk of at least two layers that `verify` must report."""

    name: str
    change: Callable[[ChunkKey, Records], Records]  # None = the record is missing
    layer: int | None  # the first that fails its check; None = the header fails
    readable: bool = False  # reading shows nothing of it


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


TOP32, TOP64 = 2**32 - 1, 2**64 - 1
LIES: list[tuple[int, str, list[Any]]] = [
    (0, "4s", [b"NOPE"]), (4, "H", [0]), (6, "H", [0, 9, 1]), (8, "I", [0, 2, TOP32]), (12, "I", [0, 3]),
    (16, "I", [0, TOP32]), (20, "I", [0, TOP32]), (24, "8s", [bytes(8), b"\xff" * 8]), (32, "I", [1, TOP32]),
    (36, "B", [1]), (51, "B", [255]), (52, "Q", [0, 1, TOP64]), (84, "Q", [0, TOP64]),
]  # fmt: skip


def _swap_all(key: ChunkKey, records: Records) -> Records:
    body = (records[0] or b"")[:-8]
    header = sealed(key, body[:52] + body[68:84] + body[52:68] + body[84:])
    return [header, records[2], records[1], *records[3:]]


DAMAGES: list[Damage] = [
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
    Damage("layers swapped with their lengths and checksums", _swap_all, 0),
    Damage("one layer more", lambda key, records: [*records, b"x"], None, readable=True),
]
