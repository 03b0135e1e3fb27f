"""Damage the records of a real LMDB store by the shared table and at random, and read it back.

A step damages each chunk of a store once, behind its back, and reads every chunk. A damaged chunk must be detected
(CorruptRecord, StoreVersion, or a miss where its header is gone or names a codec, a level or tables that are not
installed), and never give another tensor than was put. A third of the chunks is raw, the others coded: by int8, by
predict and, where it is installed, by cachegen, at all levels.

    python -m tests.endurance.fuzz_records --cases 10000 --seed 0
"""

from __future__ import annotations

import random
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import lmdb
import torch

from blendserve.core import ChunkKV
from blendserve.errors import CorruptRecord, StoreVersion
from blendserve.store import KVStore, LMDBStore, chunk_key
from blendserve.store.codecs.base import ChunkShape, Codec, known_codec
from blendserve.store.codecs.int8 import Int8
from blendserve.store.codecs.predict.codec import Predict
from blendserve.store.codecs.raw import Raw
from blendserve.store.record import CODE_OF
from tests.endurance.driver import Figures, Promises, main, none
from tests.support.damages import DAMAGES, LIES, Records, lie
from tests.support.stores import put_kv, read, same

CAP = 1 << 30
BATCH = 100  # chunks in the store


@dataclass(frozen=True)
class Target:
    """One chunk of the store."""

    key: bytes
    kv: ChunkKV  # as it comes back
    put: ChunkKV
    codec: Codec

    @property
    def names(self) -> list[bytes]:
        """Its records: the header, the layers."""
        layers = range(len(self.put.keys))
        return [b"h" + self.key, *(b"l" + self.key + struct.pack(">H", l) for l in layers)]


def targets(seed: int) -> list[Target]:
    """Every codec and dtype, several shapes, none, one and many tokens."""
    generator, made = torch.Generator().manual_seed(seed), []
    for i in range(BATCH):
        dtype = list(CODE_OF)[i % 3]
        shape = (3 + i % 2, 1 + i % 2, [0, 1, 2, 7, 40][i % 5], [2, 4, 16][i % 3])  # [L, K, C, D]
        kv = ChunkKV(*(torch.randn(shape, generator=generator).to(dtype) for _ in range(2)))
        kind = known_codec("cachegen" if i % 2 else "predict") or Predict
        level = i // 2 % len(kind.levels) + kind.levels[0]
        fitted = kind.with_tables(level, tables_of(kind, *shape))
        codec = [Raw(), Int8(), fitted][i // 3 % 3]
        made.append(Target(chunk_key("fuzz", (), (i,), str(dtype)), through(codec, kv), kv, codec))
    return made


@cache
def tables_of(made: type[Codec], n_layers: int, n_kv_heads: int, _: int, head_dim: int) -> bytes:
    noise = torch.randn((2, n_layers, n_kv_heads, 100, head_dim), generator=torch.Generator().manual_seed(1))
    return made.fit([((0,) * 100, ChunkKV(noise[0], noise[1]))])


def through(codec: Codec, kv: ChunkKV) -> ChunkKV:
    """What the codec makes of a chunk."""
    decoder = codec.decoder(ChunkShape.of(kv))
    layers = [decoder.layer(l, segment) for l, segment in enumerate(codec.encode(kv))]
    return ChunkKV(*(torch.stack(part) for part in zip(*layers, strict=True)))


# Damage at random, beside the shared table


def flip(dice: random.Random, raw: bytes) -> bytes:
    bad = bytearray(raw)
    for bit in dice.sample(range(8 * len(bad)), min(8 * len(bad), dice.choice([1, 1, 2, 3, 8, 32]))):
        bad[bit // 8] ^= 1 << bit % 8
    return bytes(bad)


CHANGES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "flip": flip,
    "cut": lambda dice, raw: raw[: dice.randrange(len(raw) + 1)],
    "extend": lambda dice, raw: raw + dice.randbytes(dice.choice([1, 2, 8, 64, 5000])),
    "noise": lambda dice, raw: dice.randbytes(len(raw)),
}


def draw(dice: random.Random, target: Target, records: Records, other: Records) -> tuple[str, Records]:
    """Any damage -> its name, and the records. other: of another chunk."""
    name = dice.choice(["table", "any value", "another chunk's record", *CHANGES])
    n = dice.randrange(len(records))
    if name == "table" and min(len(raw or b"") for raw in records) > 8:
        damage = dice.choice([d for d in DAMAGES if not d.readable])
        return damage.name, damage.change(target.key, records)
    if name == "any value":
        offset, kind, _ = dice.choice(LIES)
        raw = dice.choice([dice.choice([0, 1, 2, 3, 4, 8, 4096]).to_bytes(8, "little"), dice.randbytes(8)])
        (value,) = struct.unpack_from("<" + kind, raw)
        return f"any value at {offset}", lie(offset, kind, value).change(target.key, records)
    raw = CHANGES[name](dice, records[n] or b"") if name in CHANGES else other[min(n, len(other) - 1)] or b""
    return name, [*records[:n], raw, *records[n + 1 :]]


def judge(store: KVStore, target: Target) -> str:
    """Read a chunk back: detected, same (as was put), or wrong."""
    try:
        found = read(store, target.key)
        return "detected" if found is None else "same" if same(found, target.kv) else "wrong"
    except (CorruptRecord, StoreVersion):
        return "detected"
    except Exception as error:
        return f"crash: {error!r}"


class Fuzzer:
    """Each step damages a batch of chunks of one store, reads them, and mends them."""

    def __init__(self, cases: int, seed: int) -> None:
        self.cases, self.dice, self.targets = cases, random.Random(seed), targets(seed)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self.path = Path(self._stack.enter_context(tempfile.TemporaryDirectory())) / "kv"
        with LMDBStore(self.path, CAP) as store:
            for target in self.targets:
                if target.codec.needs_tables:
                    raw = tables_of(type(target.codec), *target.put.keys.shape)
                    store.blobs.put(target.codec.coding.codec, "reader", raw)
                put_kv(store, target.key, target.put, codec=target.codec)
        with lmdb.open(str(self.path), map_size=0) as env, env.begin() as txn:
            self.records: list[Records] = [[txn.get(name) for name in t.names] for t in self.targets]

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def step(self) -> tuple[int, int]:
        done = self.outcomes.total()
        n = min(BATCH, self.cases - done)
        drawn = [self._draw(i) for i in range(n)]
        self._write([records for _, records in drawn])
        with LMDBStore(self.path, CAP, read_only=True) as store:
            verdicts = [judge(store, target) for target in self.targets]
        self._write(self.records)
        assert {"same"}.issuperset(verdicts[n:]), "a chunk that was not damaged has changed"
        self.outcomes.update((kind, verdict) for (kind, _), verdict in zip(drawn, verdicts, strict=False))
        return done + n, self.cases

    def figures(self) -> Figures:
        verdicts = Counter(verdict.split(":")[0] for _, verdict in self.outcomes.elements())
        counts = {name: verdicts[name] for name in ("crash", "wrong", "same", "detected")}
        odd = {": ".join(one): n for one, n in self.outcomes.items() if one[1] != "detected"}
        kinds = len({kind for kind, _ in self.outcomes})
        return {"cases": verdicts.total(), **counts, "kinds": kinds, "odd": odd}

    def _draw(self, i: int) -> tuple[str, Records]:
        """A kind of damage, and records that differ from the chunk's."""
        while True:
            other = self.records[(i + self.dice.randrange(1, BATCH)) % BATCH]
            name, records = draw(self.dice, self.targets[i], self.records[i], other)
            if records != self.records[i]:
                return name, records

    def _write(self, changed: list[Records]) -> None:
        with lmdb.open(str(self.path), map_size=0, sync=False) as env, env.begin(write=True) as txn:
            for target, records in zip(self.targets, changed, strict=False):
                for name, raw in zip(target.names, records, strict=False):
                    txn.delete(name) if raw is None else txn.put(name, raw)


PROMISES: Promises = {
    **none("crash", "wrong"),
    "damage is detected": lambda found: found["detected"] > 0.9 * found["cases"],
}

if __name__ == "__main__":
    sys.exit(main(Fuzzer, PROMISES, cases=10_000, seed=0))
