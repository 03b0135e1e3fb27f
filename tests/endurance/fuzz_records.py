"""Damage the records of a real LMDB store in every way we could think of, and read it back.

A batch of cases is one store whose chunks are damaged behind its back, one case a chunk, by LMDB itself; the store is
then opened and every chunk is read. A damaged chunk must be told (CorruptRecord, StoreVersion, or a miss where its header
was deleted or names a codec, a level or tables that are not here), and never give another tensor than was put. A fifth
of the chunks is of format 1, a fifth raw in format 2, and three fifths are coded: in segments of many lengths, by int8,
by predict and, where it is installed, by cachegen, at all their levels. The reading is done in another process, so that
even a segmentation fault is counted and not the end; its memory is limited, so that no length may ask for gigabytes.

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
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path

import lmdb
import torch
from rich.progress import Progress

from blendserve.core import ChunkKV
from blendserve.errors import CorruptRecord, StoreVersion
from blendserve.store import KVStore, LMDBStore, chunk_key
from blendserve.store.codecs.base import (
    Codec,
    known_codec,
)
from blendserve.store.codecs.int8 import Int8
from blendserve.store.codecs.predict.codec import Predict
from blendserve.store.codecs.raw import Raw
from blendserve.store.record import CODE_OF
from tests.endurance.damages import DAMAGES, Changes, Records, Squeezed, Target, header_of_format_1
from tests.endurance.helpers import through

CAP = 1 << 30
BATCH = 100  # chunks in the store
SPARE = (
    3 << 30
)  # of address space for the reader: the store's map, which is mostly empty, and no hostile length


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
    """One with tables for KV of this shape: predict or, where it is installed, cachegen."""
    made = known_codec("cachegen" if i % 2 else "predict") or Predict
    return made.with_tables(i // 2 % len(made.levels) + made.levels[0], tables_of(made, kv))


def tables_of(made: type[Codec], kv: ChunkKV) -> bytes:
    n_layers, n_kv_heads, _, head_dim = kv.keys.shape
    return _tables_for(made, n_layers, n_kv_heads, head_dim)


@cache
def _tables_for(made: type[Codec], *shape: int) -> bytes:
    n_layers, n_kv_heads, head_dim = shape
    noise = torch.randn((2, n_layers, n_kv_heads, 100, head_dim), generator=torch.Generator().manual_seed(1))
    return made.fit([((0,) * 100, ChunkKV(noise[0], noise[1]))])


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
                if target.codec.needs_tables:
                    made = type(target.codec)
                    store.put_tables(target.codec.coding.codec, "reader", tables_of(made, target.kv))
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
