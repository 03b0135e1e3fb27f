"""Damage the records of a real LMDB store in every way we could think of, and read it back.

A batch of cases is one store whose chunks are damaged behind its back, one case a chunk, by LMDB itself; the store is
then opened and every chunk is read. A damaged chunk must be told (CorruptRecord, StoreVersion, or a miss where its header
was deleted or names a codec, a level or tables that are not here), and never give another tensor than was put. A fifth
of the chunks is of format 1, a fifth raw in format 2, and three fifths are coded: in segments of many lengths, by int8
and, where it is installed, by cachegen at all its levels. The reading is done in another process, so that even a
segmentation fault is counted and not the end; its memory is limited, so that no length may ask for gigabytes.

    python -m tests.endurance.fuzz_records --cases 10000 --seed 0

The last line is JSON; the exit code is 1 if anything crashed or a wrong tensor was accepted.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import resource
import struct
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import lmdb
import torch
import xxhash
from rich.progress import Progress

from blendserve.core import ChunkKV
from blendserve.errors import CorruptRecord, StoreVersion
from blendserve.registry import CODECS
from blendserve.store import KVStore, LMDBStore, chunk_key
from blendserve.store.codecs.base import (
    Buffer,
    ChunkShape,
    Codec,
    Coding,
    Pair,
    Tables,
    Undecodable,
    known_codec,
)
from blendserve.store.codecs.int8 import Int8
from blendserve.store.codecs.raw import Raw, RawDecoder
from blendserve.store.lmdb.snapshot import HEADER, layer_name
from blendserve.store.record import CODE_OF
from tests.endurance.helpers import through

CAP = 1 << 30
BATCH = 100  # chunks in the store
SPARE = (
    3 << 30
)  # of address space for the reader: the store's map, which is mostly empty, and no hostile length
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
    known = [Raw.coding, Squeezed.coding, Int8.coding, Coding("cachegen", 1, target.codec.coding.tables)]
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


def targets(seed: int) -> list[Target]:
    """The chunks of the store: every format, codec and dtype, several shapes, none, one and many tokens."""
    generator, made = torch.Generator().manual_seed(seed), []
    for i in range(BATCH):
        dtype = list(CODE_OF)[i % 3]
        shape = (1 + i % 3, 1 + i % 2, [0, 1, 2, 7, 40][i % 5], [2, 4, 16][i % 3])  # [L, K, C, D]
        keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        kv = ChunkKV(keys, values)
        codec = [Raw(), Raw(), Squeezed(), Int8(), learnt(kv, i)][i // 3 % 5]
        version = 2 if i // 3 % 5 else 1
        key = chunk_key("fuzz", (), (i,), str(dtype))
        made.append(Target(key, through(codec, kv), kv, version, codec))
    return made


def learnt(kv: ChunkKV, i: int) -> Codec:
    """cachegen with tables for KV of this shape, Int8 where it is not installed."""
    made = known_codec("cachegen")
    if made is None:
        return Int8()
    return made.with_tables(i % len(made.levels), tables_of(kv))


@cache
def tables_for(n_layers: int, n_kv_heads: int, head_dim: int) -> bytes:
    noise = torch.randn((2, n_layers, n_kv_heads, 100, head_dim), generator=torch.Generator().manual_seed(1))
    made = known_codec("cachegen")
    assert made is not None
    return made.fit([((0,) * 100, ChunkKV(noise[0], noise[1]))])


def tables_of(kv: ChunkKV) -> bytes:
    n_layers, n_kv_heads, _, head_dim = kv.keys.shape
    return tables_for(n_layers, n_kv_heads, head_dim)


def judge(path: Path, seed: int) -> list[str]:
    """Read every chunk back: detected, same (as was put), wrong, or what was raised."""
    logging.disable()  # what cannot be decoded is logged
    limit_memory()
    with LMDBStore(path, CAP, read_only=True) as store:
        return [_judge(store, target) for target in targets(seed)]


def limit_memory() -> None:
    """What this process may ask for from now on: little more than it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, hard))


def _judge(store: KVStore, target: Target) -> str:
    try:
        with store.reading() as snapshot:
            view = snapshot.get(target.key)
            if view is None:
                return "detected"
            layers = [view.layer(l) for l in range(view.n_layers)]
            read = ChunkKV(*(torch.stack(parts) for parts in zip(*layers, strict=True)))
            return "same" if _same(read, target.kv) else "wrong"
    except (CorruptRecord, StoreVersion):
        return "detected"
    except Exception as error:
        return f"crash: {error!r}"


def _same(a: ChunkKV, b: ChunkKV) -> bool:
    return a.keys.dtype == b.keys.dtype and torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


class Fuzzer:
    """One store, damaged and mended batch by batch."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.seed = path, seed
        self.dice = random.Random(seed)
        self.targets = targets(seed)
        for target in self.targets:
            with LMDBStore(path, CAP, codec=target.codec) as store:
                if target.codec.needs_tables and target.codec.coding.codec == "cachegen":
                    store.put_tables("cachegen", "reader", tables_of(target.kv))
                store.put(target.key, target.put)
        with lmdb.open(str(path), map_size=0) as env, env.begin() as txn:
            self.records: Records = {bytes(name): bytes(raw) for name, raw in txn.cursor()}
        for target in self.targets:
            if target.version == 1:
                layers = [self.records[name] for name in target.names[1:]]
                self.records[target.names[0]] = header_of_format_1(target, layers)
        self._write({**self.records})
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.pool = self._reader()

    def batch(self, n: int) -> None:
        """Damage the first n chunks, read all, mend them."""
        drawn = [self._draw(target) for target in self.targets[:n]]
        changes = {name: raw for _, change in drawn for name, raw in change.items()}
        self._write(changes)
        verdicts = self._judge()
        self._write({name: self.records[name] for name in changes})
        for (kind, _), verdict in zip(drawn, verdicts, strict=False):
            self.outcomes[kind, verdict] += 1
        if not {"same", "unread"}.issuperset(verdicts[n:]):
            raise SystemExit("a chunk that was not damaged does not read as it was put")

    def _draw(self, target: Target) -> tuple[str, Changes]:
        """A kind of damage, and what it does to this chunk: something at least."""
        while True:
            kind = self.dice.choice(list(DAMAGES))
            change = DAMAGES[kind](self.dice, target, self.records)
            if any(raw != self.records[name] for name, raw in change.items()):
                return kind, change

    def _write(self, changes: Changes) -> None:
        with lmdb.open(str(self.path), map_size=0, sync=False) as env, env.begin(write=True) as txn:
            for name, raw in changes.items():
                if raw is None:
                    txn.delete(name)
                else:
                    txn.put(name, raw)

    def _judge(self) -> list[str]:
        try:
            return self.pool.submit(judge, self.path, self.seed).result()
        except BrokenProcessPool:
            self.pool = self._reader()
            return ["crash: the reader died", *["unread"] * (BATCH - 1)]

    def _reader(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        fuzzer = Fuzzer(Path(folder) / "kv", asked.seed)
        task = progress.add_task("damaging records", total=asked.cases)
        for done in range(0, asked.cases, BATCH):
            n = min(BATCH, asked.cases - done)
            fuzzer.batch(n)
            progress.advance(task, n)
        fuzzer.pool.shutdown()
    return report(fuzzer.outcomes, asked.seed, time.perf_counter() - began)


def report(outcomes: Counter[tuple[str, str]], seed: int, seconds: float) -> int:
    """Print what went wrong, then the sums -> exit code."""
    sums: Counter[str] = Counter()
    for (kind, verdict), n in sorted(outcomes.items()):
        sums[verdict.split(":")[0]] += n
        if verdict != "detected":
            print(f"{n} x {kind}: {verdict}")
    result = {
        "cases": sum(sums.values()),
        "crashes": sums["crash"],
        "wrong_tensors_accepted": sums["wrong"],
        "unnoticed_but_harmless": sums["same"],
        "detected": sums["detected"],
        "unread": sums["unread"],
        "kinds": len({kind for kind, _ in outcomes}),
        "seed": seed,
        "seconds": round(seconds, 1),
    }
    print(json.dumps(result))
    return 1 if result["crashes"] or result["wrong_tensors_accepted"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
