"""Chunks, look-ups and damage for tests of stores; `FaultyStore` stands for a store on another machine."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import torch

from blendserve.errors import CorruptRecord, StoreUnavailable
from blendserve.fetch.copies import CopyCache
from blendserve.fetch.incoming import ChunkRequest
from blendserve.kv import ChunkKV, join_layers
from blendserve.store import ChunkRecord, KVStore, LMDBStore, Snapshot
from blendserve.store.blobs import BlobStore
from blendserve.store.codecs.base import Buffer, Codec
from blendserve.store.codecs.raw import Raw
from blendserve.store.key import ChunkKey, chunk_key
from blendserve.store.policies import Admission, Always
from blendserve.store.view import ChunkView, open_view
from tests.support.waiting import ManualClock

LAYERS = 3
CAP = 10_000_000
BIG = 300  # tokens: a layer of 19,200 bytes, on pages of its own
ROOMY = 1 << 30

Change = Callable[[lmdb.Transaction], object]


# Chunks


def key_of(n: int, namespace: str = "") -> ChunkKey:
    return chunk_key("model", (1, 2), (n,), "float32", namespace)


def chunk(
    tokens: int = 5,
    layers: int = LAYERS,
    kv_heads: int = 2,
    head_dim: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> ChunkKV:
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, kv_heads, tokens, head_dim)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return ChunkKV(keys, values)


def chunk_by_layer(
    tokens: int, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype = torch.float32
) -> ChunkKV:
    """A chunk whose layers have these numbers of kv heads, dims of keys, and of values."""
    generator = torch.Generator().manual_seed(0)
    sides = [[torch.randn(s[0], tokens, s[i], generator=generator).to(dtype) for s in shapes] for i in (1, 2)]
    return ChunkKV(*map(join_layers, sides))


def read(store: KVStore, key: ChunkKey) -> ChunkKV | None:
    """A copy of the stored chunk, None where it is absent or undecodable. Raises CorruptRecord."""
    with store.snapshot() as snapshot:
        record = snapshot.get(key)
        view = record and open_view(record, store.blobs.get)
        return copy_of(view) if isinstance(view, ChunkView) else None


def put_kv(store: KVStore, key: ChunkKey, kv: ChunkKV, pin: bool = False, codec: Codec | None = None) -> bool:
    """Encode a chunk and store it."""
    return store.put(key, ChunkRecord.encode(key, kv, codec or Raw()), pin)


def has(store: KVStore, key: ChunkKey) -> bool:
    return key in store.contains([key])


def copy_of(view: ChunkView) -> ChunkKV:
    layers = (view.layer(l) for l in range(view.n_layers))
    return ChunkKV(*(join_layers(parts) for parts in zip(*layers, strict=True)))


def same(a: ChunkKV | None, b: ChunkKV) -> bool:
    """Equal bit for bit, NaNs included."""
    if a is None or len(a.keys) != len(b.keys):
        return False
    pairs = [*zip(a.keys, b.keys, strict=True), *zip(a.values, b.values, strict=True)]
    return all(
        (x.dtype, x.shape) == (y.dtype, y.shape) and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in ((x.contiguous(), y.contiguous()) for x, y in pairs)
    )


def stored(store: KVStore, most: int = 30) -> set[int]:
    """The numbers of the keys in the store."""
    numbers = {key_of(n): n for n in range(most)}
    return {numbers[key] for key in store.contains(numbers)}


def filled(path: Path) -> None:
    """Make an LMDB store of large chunks 0, 1 and 2."""
    with LMDBStore(path, CAP) as store:
        for n in range(3):
            put_kv(store, key_of(n), chunk(BIG, seed=n))


def tamper(path: Path, change: Change) -> None:
    """Change the records of a closed LMDB store."""
    with lmdb.open(str(path), map_size=0) as env:
        with env.begin(write=True) as txn:
            change(txn)
        n_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    data = path / "data.mdb"
    os.truncate(data, max(n_bytes, data.stat().st_size))  # as the store does: see Environment


def flip(name: bytes, at: int) -> Change:
    """Flip a bit of a record."""

    def change(txn: lmdb.Transaction) -> None:
        raw = bytearray(txn.get(name) or b"")
        raw[at] ^= 4
        txn.put(name, bytes(raw))

    return change


UNIT = chunk(10).n_bytes


def kv(n: int) -> ChunkKV:
    """A chunk of one unit, what tests store under `key_of(n)`."""
    return chunk(10, seed=n)


def requests(*numbers: int, **costs: float) -> list[ChunkRequest]:
    """For chunks of one unit."""
    return [ChunkRequest(key_of(n), 10, **costs) for n in numbers]


def cache(n_bytes: float, admission: Admission | None = None, name: str = "cache") -> CopyCache:
    """Copies in this process's memory."""
    copy: Callable[..., Any] = lambda pair: (pair[0].clone(), pair[1].clone())  # noqa: E731
    return CopyCache(name, round(n_bytes), admission or Always(), copy)


# Faults


def _delegating(base: type) -> Any:
    """A subclass whose abstract methods are `self.call(name, ...)`."""

    def method(name: str) -> Callable[..., Any]:
        return lambda self, *args, **options: self.call(name, *args, **options)

    names: frozenset[str] = base.__abstractmethods__  # type: ignore[attr-defined]
    return type(f"Delegating{base.__name__}", (base,), {name: method(name) for name in names})


class FaultyStore(_delegating(KVStore)):  # type: ignore[misc]
    """A store that stands for another machine's. A test sets its faults at any time.

    down: every call fails. gate: while cleared, every call waits. latency_s: of every call, on the clock.
    damaged: chunks whose reading fails until they are stored again: of their header, or of `damaged_layer`.
    """

    def __init__(self, store: KVStore, clock: ManualClock | None = None) -> None:
        self._store = store
        self.kind, self.location, self.read_only = store.kind, store.location, store.read_only
        self.cap_bytes = store.cap_bytes
        self._clock, self.blobs = clock or ManualClock(), _FaultyBlobs(self, store.blobs)
        self.down, self.latency_s, self.gate = False, 0.0, threading.Event()
        self.gate.set()
        self.damaged = set[ChunkKey]()
        self.damaged_layer: int | None = None
        self.n_open = 0  # snapshots
        self.calls: Counter[str] = Counter()
        self.batches: list[int] = []  # the number of chunks that each snapshot was asked for

    @contextmanager
    def snapshot(self) -> Iterator[Any]:
        self.pass_gate("snapshot")
        with self._store.snapshot() as snapshot:
            self.batches.append(0)
            self.n_open += 1
            try:
                yield _FaultySnapshot(snapshot, self)
            finally:
                self.n_open -= 1

    def close(self) -> None:
        self._store.close()

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Raises StoreUnavailable while the store is down."""
        self.pass_gate(name)
        if name in {"put", "delete"}:
            self.damaged -= {args[0]} if name == "put" else set(args[0])
        return getattr(self._store, name)(*args, **options)

    def pass_gate(self, name: str) -> None:
        """Wait for the gate, count the call. Raises StoreUnavailable while the store is down."""
        assert self.gate.wait(60)
        self._clock.sleep(self.latency_s)
        is_down = self.down
        self.calls[name] += 1
        if is_down:
            raise StoreUnavailable("the network is down")


class _FaultyBlobs(_delegating(BlobStore)):  # type: ignore[misc]
    def __init__(self, store: FaultyStore, blobs: BlobStore) -> None:
        self._store, self._blobs = store, blobs

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        self._store.pass_gate(f"blobs.{name}")
        return getattr(self._blobs, name)(*args, **options)


class _FaultySnapshot:
    def __init__(self, snapshot: Snapshot, store: FaultyStore) -> None:
        self._snapshot, self._store = snapshot, store

    def get(self, key: ChunkKey, count: bool = True) -> ChunkRecord | None:
        self._store.batches[-1] += 1
        damaged, layer = key in self._store.damaged, self._store.damaged_layer
        if damaged and layer is None:
            raise CorruptRecord(key, "it is damaged on purpose")
        record = self._snapshot.get(key, count)
        if not record or not damaged:
            return record

        def read(l: int) -> Buffer:
            if l == layer:
                raise CorruptRecord(key, f"layer {l} is damaged on purpose")
            return record.segment(l)

        return replace(record, read=read)
