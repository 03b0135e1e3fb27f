"""Damage the records of a real LMDB store in every way we could think of, and read it back.

A batch of cases is one store whose chunks are damaged behind its back, one case a chunk, by LMDB itself; the store is
then opened and every chunk is read. A damaged chunk must be told (CorruptRecord, StoreVersion, or not there at all
where its header was deleted), and never give another tensor than was put. The reading is done in another process, so
that even a segmentation fault is counted and not the end.

    python -m tests.endurance.fuzz_records --cases 10000 --seed 0

The last line is JSON; the exit code is 1 if anything crashed or a wrong tensor was accepted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import lmdb
import torch
import xxhash
from rich.progress import Progress

from blendserve.core import ChunkKV
from blendserve.errors import CorruptRecord, StoreVersion
from blendserve.store import KVStore, LMDBStore, chunk_key
from blendserve.store.record import CODE_OF
from blendserve.store.snapshot import HEADER, layer_name

CAP = 1 << 30
BATCH = 100  # chunks in the store
FIELDS = {  # of a header: offset, format
    "magic": (0, "I"),
    "version": (4, "H"),
    "dtype": (6, "B"),
    "codec": (7, "B"),
    "layers": (8, "I"),
    "kv_heads": (12, "I"),
    "head_dim": (16, "I"),
    "tokens": (20, "I"),
    "layer_bytes": (24, "Q"),
    "layer_checksum": (32, "Q"),
}


@dataclass(frozen=True)
class Target:
    """One chunk of the store, as it was put."""

    key: bytes
    kv: ChunkKV

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
        offset, kind = FIELDS[name]
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
    **{f"{name}, resealed": lie(name, sealed=True) for name in FIELDS},
    **{name: lie(name, sealed=False) for name in FIELDS},
    "reshape": reshape,
    **{f.__name__: on_a_record(f) for f in (flip, cut, extend, blank, rotate, noise)},
    "flip again": on_a_record(flip),  # the likeliest damage, so more of it
    **{f.__name__: f for f in (drop, swap, steal)},
}


def targets(seed: int) -> list[Target]:
    """The chunks of the store: every dtype, several shapes, none, one and many tokens."""
    generator, made = torch.Generator().manual_seed(seed), []
    for i in range(BATCH):
        dtype = list(CODE_OF)[i % 3]
        shape = (1 + i % 3, 1 + i % 2, [0, 1, 2, 7, 40][i % 5], [2, 4, 16][i % 3])  # [L, K, C, D]
        keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        made.append(Target(chunk_key("fuzz", (), (i,), str(dtype)), ChunkKV(keys, values)))
    return made


def judge(path: Path, seed: int) -> list[str]:
    """Read every chunk back: detected, same (as was put), wrong, or what was raised."""
    with LMDBStore(path, CAP, read_only=True) as store:
        return [_judge(store, target) for target in targets(seed)]


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
        with LMDBStore(path, CAP) as store:
            for target in self.targets:
                store.put(target.key, target.kv)
        with lmdb.open(str(path), map_size=0) as env, env.begin() as txn:
            self.records: Records = {bytes(name): bytes(raw) for name, raw in txn.cursor()}
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
