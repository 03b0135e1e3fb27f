"""A chunk of a store, and every way we could think of to damage its records."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from blendserve.core import ChunkKV
from blendserve.registry import CODECS
from blendserve.store.codecs.base import (
    Buffer,
    ChunkShape,
    Codec,
    Coding,
    Pair,
    Tables,
    Undecodable,
)
from blendserve.store.codecs.int8 import Int8
from blendserve.store.codecs.raw import Raw, RawDecoder
from blendserve.store.lmdb.snapshot import HEADER, layer_name
from blendserve.store.record import CODE_OF

COMMON = {  # of a header: offset, format
    "magic": (0, "I"),
    "version": (4, "H"),
    "layers": (8, "I"),
    "kv_heads": (12, "I"),
    "head_dim": (16, "I"),
    "tokens": (20, "I"),
}
FIELDS = {
    1: {
        **COMMON,
        "dtype": (6, "B"),
        "codec": (7, "B"),
        "length": (24, "Q"),
        "checksum": (32, "Q"),
    },
    2: {
        **COMMON,
        "dtype": (6, "H"),
        "codec": (24, "Q"),
        "level": (32, "I"),
        "tables": (36, "Q"),
        "tables, second half": (44, "Q"),
        "length": (52, "Q"),
        "checksum": (60, "Q"),
    },
}
NAMES = dict.fromkeys((*FIELDS[1], *FIELDS[2]))


class Squeezed(Codec):
    """A codec with a level and tables, whose segments have any length, and hold the layer below's difference."""

    coding = Coding("squeezed", 3, b"tables of a test")

    levels = (3,)

    @classmethod
    def with_tables(cls, level: int = 3, tables: bytes = b"") -> Squeezed:
        return cls()

    @classmethod
    def for_reading(cls, coding: Coding, tables: Tables) -> Squeezed:
        if coding != cls.coding:
            raise Undecodable("another level or other tables")
        return cls()

    @classmethod
    def check(cls, coding: Coding, shape: ChunkShape, lengths: Sequence[int]) -> None:
        pass

    def expected_bytes(self, raw_bytes: int) -> int:
        return raw_bytes

    def encode(self, kv: ChunkKV) -> list[Buffer]:
        layers = [bytes(raw) for raw in Raw().encode(kv)]
        return [zlib.compress(xor(raw, below)) for raw, below in zip(layers, [b"", *layers], strict=False)]

    def decoder(self, shape: ChunkShape) -> _Unsqueezing:
        return _Unsqueezing(shape)


class _Unsqueezing:
    def __init__(self, shape: ChunkShape) -> None:
        self._below, self._raw = b"", RawDecoder(shape)

    def layer(self, l: int, segment: Buffer) -> Pair:
        self._below = xor(zlib.decompress(segment), self._below)
        return self._raw.layer(l, self._below)


def xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True)) if other else one


CODECS.add("squeezed", f"{__name__}:Squeezed")


@dataclass(frozen=True)
class Target:
    """One chunk of the store, as it was put."""

    key: bytes
    kv: ChunkKV  # as it comes back
    put: ChunkKV
    version: int  # of its records' format
    codec: Codec

    @property
    def names(self) -> list[bytes]:
        """Its records: the header first."""
        return [HEADER + self.key, *(layer_name(self.key, l) for l in range(self.kv.keys.shape[0]))]


Records = dict[bytes, bytes]
Changes = dict[bytes, "bytes | None"]  # None = delete
Damage = Callable[[random.Random, Target, Records], Changes]


def seal(key: bytes, body: bytes) -> bytes:
    """A header whose own checksum fits."""
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(key + body))


def lie(name: str, sealed: bool) -> Damage:
    """Put another value into one field of the header, with or without a checksum that fits it."""

    def damage(dice: random.Random, target: Target, records: Records) -> Changes:
        header = records[target.names[0]]
        offset, kind = FIELDS[target.version].get(name, FIELDS[target.version]["checksum"])
        (old,) = struct.unpack_from("<" + kind, header, offset)
        top = 2 ** (8 * struct.calcsize("<" + kind)) - 1
        values = {0, 1, 2, 3, 4, old - 1, old + 1, 2 * old, top, top // 2, dice.randrange(top)} - {old}
        body = bytearray(header[:-8])
        struct.pack_into("<" + kind, body, offset, dice.choice([v for v in sorted(values) if 0 <= v <= top]))
        return {target.names[0]: seal(target.key, bytes(body)) if sealed else bytes(body) + header[-8:]}

    return damage


def reshape(dice: random.Random, target: Target, records: Records) -> Changes:
    """Exchange two sizes, so that header and payload still agree in length, under a checksum that fits."""
    header = bytearray(records[target.names[0]][:-8])
    one, other = dice.sample([12, 16, 20], 2)
    header[one : one + 4], header[other : other + 4] = header[other : other + 4], header[one : one + 4]
    return {target.names[0]: seal(target.key, bytes(header))}


def relength(dice: random.Random, target: Target, records: Records) -> Changes:
    """Move a layer's length elsewhere, or bytes of it to another layer's, under a checksum that fits."""
    header, n_layers = bytearray(records[target.names[0]][:-8]), len(target.kv.keys)
    places = [24] if target.version == 1 else [52 + 16 * l for l in range(n_layers)]
    one, other = dice.choice(places), dice.choice(places)
    (length,), by = struct.unpack_from("<Q", header, one), dice.choice([-1, 1, 2, 8, 4096])
    struct.pack_into("<Q", header, one, max(0, length + by))
    if other != one:
        (length,) = struct.unpack_from("<Q", header, other)
        struct.pack_into("<Q", header, other, max(0, length - by))
    return {target.names[0]: seal(target.key, bytes(header))}


def lie_about_the_codec(dice: random.Random, target: Target, records: Records) -> Changes:
    """Name another coding that is known here, under a checksum that fits."""
    if target.version == 1:
        return lie("codec", sealed=True)(dice, target, records)
    header = bytearray(records[target.names[0]][:-8])
    tables = target.codec.coding.tables
    known = [
        Raw.coding,
        Squeezed.coding,
        Int8.coding,
        Coding("cachegen", 1, tables),
        Coding("predict", 2, tables),
    ]
    coding = dice.choice([*known, Coding("raw", 3), Coding("squeezed", 2), Coding("int8", 1)])
    struct.pack_into("<8sI16s", header, 24, coding.codec.encode(), coding.level, coding.tables)
    return {target.names[0]: seal(target.key, bytes(header))}


def reformat(dice: random.Random, target: Target, records: Records) -> Changes:
    """Say the same in the other format, and keep the layers' checksums, under a checksum that fits."""
    header, layers = records[target.names[0]], [records[name] for name in target.names[1:]]
    if target.version == 2:
        sums = b"".join(header[60 + 16 * l : 68 + 16 * l] for l in range(len(layers)))
        return {target.names[0]: seal(target.key, header_of_format_1(target, layers)[:32] + sums)}
    body = header[:4] + struct.pack("<HH", 2, header[6]) + header[8:24] + struct.pack("<8s20x", b"raw")
    for l, raw in enumerate(layers):
        body += struct.pack("<Q", len(raw)) + header[32 + 8 * l : 40 + 8 * l]
    return {target.names[0]: seal(target.key, body)}


def header_of_format_1(target: Target, layers: Sequence[bytes]) -> bytes:
    """As blendserve wrote it."""
    n_layers, n_kv_heads, n_tokens, head_dim = target.kv.keys.shape
    sizes = (n_layers, n_kv_heads, head_dim, n_tokens, len(layers[0]))
    body = fields = struct.pack("<4sHBBIIIIQ", b"BSKV", 1, CODE_OF[target.kv.keys.dtype], 0, *sizes)
    for l, raw in enumerate(layers):
        seed = xxhash.xxh3_64_intdigest(target.key + fields + struct.pack("<I", l))
        body += struct.pack("<Q", xxhash.xxh3_64_intdigest(raw, seed))
    return seal(target.key, body)


def on_a_record(change: Callable[[random.Random, bytes], bytes]) -> Damage:
    """Change the bytes of the header or of any layer."""

    def damage(dice: random.Random, target: Target, records: Records) -> Changes:
        name = dice.choice(target.names)
        return {name: change(dice, records[name])}

    return damage


def flip(dice: random.Random, raw: bytes) -> bytes:
    bad = bytearray(raw)
    for bit in dice.sample(range(8 * len(bad)), min(8 * len(bad), dice.choice([1, 1, 2, 3, 8, 32]))):
        bad[bit // 8] ^= 1 << bit % 8
    return bytes(bad)


def cut(dice: random.Random, raw: bytes) -> bytes:
    return raw[: dice.randrange(len(raw))] if raw else raw


def extend(dice: random.Random, raw: bytes) -> bytes:
    return raw + dice.randbytes(dice.choice([1, 2, 8, 64, 5000]))


def blank(dice: random.Random, raw: bytes) -> bytes:
    start, stop = sorted(dice.randrange(len(raw) + 1) for _ in range(2))
    return raw[:start] + bytes(stop - start) + raw[stop:]


def rotate(dice: random.Random, raw: bytes) -> bytes:
    by = dice.randrange(len(raw) + 1)
    return raw[by:] + raw[:by]


def noise(dice: random.Random, raw: bytes) -> bytes:
    return dice.randbytes(len(raw))


def drop(dice: random.Random, target: Target, records: Records) -> Changes:
    """Delete one record."""
    return {dice.choice(target.names): None}


def swap(dice: random.Random, target: Target, records: Records) -> Changes:
    """Exchange two layers, or the header and a layer."""
    one, other = dice.sample(target.names, 2)
    return {one: records[other], other: records[one]}


def steal(dice: random.Random, target: Target, records: Records) -> Changes:
    """Give it the same record of another chunk."""
    mine = dice.choice(target.names)
    theirs = [name for name in records if name[:1] == mine[:1] and name[29:] == mine[29:] and name != mine]
    return {mine: records[dice.choice(theirs)]}


DAMAGES: dict[str, Damage] = {
    **{f"{name}, resealed": lie(name, sealed=True) for name in NAMES},
    **{name: lie(name, sealed=False) for name in NAMES},
    **{f.__name__: f for f in (reshape, relength, lie_about_the_codec, reformat)},
    **{f.__name__: on_a_record(f) for f in (flip, cut, extend, blank, rotate, noise)},
    "flip again": on_a_record(flip),  # the likeliest damage, so more of it
    **{f.__name__: f for f in (drop, swap, steal)},
}
