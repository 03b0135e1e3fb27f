"""Stores under test: every kind behind one interface, a naive model of the contract, faults and damage.

A `Place` is where a store of one kind keeps its chunks: it opens the store, opens it as another process would, and
damages its records. `StoreModel` is the contract as a few dictionaries. `FaultyStore` stands for another machine.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import torch

from blendserve.config import ValkeyConfig
from blendserve.core import ChunkKV
from blendserve.errors import CorruptRecord, StoreFull, StoreUnavailable
from blendserve.store import KVStore, LayeredStore, LMDBStore, MemoryStore, ReadAhead, Snapshot
from blendserve.store.base import ChunkView, Meanwhile, TimeSaved
from blendserve.store.codecs.base import Codec
from blendserve.store.codecs.raw import Raw
from blendserve.store.key import TAG_BYTES, ChunkKey
from blendserve.store.layered import Write
from blendserve.store.policies import LRU, Admission, Always
from blendserve.store.tiers import Tier, TieredStore
from blendserve.store.valkey.client import library
from blendserve.store.valkey.names import HEADER, chunk_name, segment_name
from blendserve.store.valkey.store import ValkeyStore
from blendserve.store.wrapped import WrappedStore
from tests.store.helpers import chunk
from tests.store.toy_codec import Toy
from tests.store.valkey.servers import settings as valkey_settings
from tests.support.damages import BYTES, DAMAGES, Damage
from tests.support.waiting import ManualClock

UNIT = chunk(10).n_bytes
CAP = 5 * UNIT
LAYERS = 3  # of every chunk
ROOMY = 1 << 30


def tier(n_bytes: float, admission: Admission | None = None, name: str = "tier") -> Tier:
    """A tier in this process's memory."""
    copy: Callable[..., Any] = lambda pair: (pair[0].clone(), pair[1].clone())  # noqa: E731
    return Tier(name, round(n_bytes), admission or Always(), copy)


# Faults


class FaultyStore(WrappedStore):
    """A store that stands for another machine's. A test sets its faults at any time.

    down: every call fails. gate: while cleared, every call waits. latency_s: of every call, on the clock.
    damaged: chunks whose reading fails until they are stored again. refuses: chunks that do not fit.
    """

    def __init__(self, store: KVStore, clock: ManualClock | None = None) -> None:
        super().__init__(store)
        self._clock = clock or ManualClock()
        self.down, self.latency_s, self.gate = False, 0.0, threading.Event()
        self.gate.set()
        self.damaged, self.refuses = set[ChunkKey](), set[ChunkKey]()
        self.calls: Counter[str] = Counter()
        self.batches: list[int] = []  # the number of chunks in each `expect`

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        self.call("reading")
        with self._store.reading() as snapshot:
            yield _FaultySnapshot(snapshot, self)

    def call(self, name: str) -> None:
        """Count a call, wait for the gate. Raises StoreUnavailable while the store is down."""
        assert self.gate.wait(60)
        self.calls[name] += 1
        self._clock.sleep(self.latency_s)
        if self.down:
            raise StoreUnavailable("the network is down")


def _faulty(name: str) -> Callable[..., Any]:
    def method(self: FaultyStore, *args: Any, **options: Any) -> Any:
        self.call(name)
        if name.startswith("put") and args[0] in self.refuses:
            raise StoreFull("the store is full")
        if name in {"put", "put_coded", "put_uncoded", "delete"}:
            self.damaged.discard(args[0])
        return getattr(WrappedStore, name)(self, *args, **options)

    return method


for _name in (
    *("put", "put_coded", "put_uncoded", "delete", "coded", "present", "wants", "info", "pin", "unpin"),
    *("lease", "leases", "ids", "keys", "tables", "all_tables", "put_tables", "__contains__"),
):
    setattr(FaultyStore, _name, _faulty(_name))


class _FaultySnapshot:
    def __init__(self, snapshot: Snapshot, store: FaultyStore) -> None:
        self._snapshot, self._store = snapshot, store

    def expect(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None = None, saved: TimeSaved | None = None
    ) -> None:
        self._store.batches.append(len(keys))

    def get(self, key: ChunkKey) -> ChunkView | None:
        if key in self._store.damaged:
            raise CorruptRecord(key, "it is damaged on purpose")
        return self._snapshot.get(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._snapshot, name)


# The contract


class StoreModel:
    """What a store of one place must hold: dictionaries, an order of use, pins, leases and counters.

    A reader notes uses and look-ups; they count for all handles once its handle (`who`) writes them.
    """

    def __init__(
        self, cap: int, clock: ManualClock, quota: Callable[[ChunkKey], bytes], notes_with_writes: bool
    ) -> None:
        """quota: chunks of one value share the cap. notes_with_writes: else notes are written to find victims."""
        self.cap, self.clock, self._quota, self.notes_with_writes = cap, clock, quota, notes_with_writes
        self.chunks, self.sizes = dict[ChunkKey, ChunkKV](), dict[ChunkKey, int]()
        self.used, self.pins = dict[ChunkKey, int](), set[ChunkKey]()
        self.history: list[tuple[ChunkKey, ChunkKV | None]] = []  # every change of a chunk
        self.notes: dict[int, dict[ChunkKey, int]] = {0: {}, 1: {}}
        self.counts: Counter[tuple[int | None, str]] = Counter()  # by handle; None = written
        self.leases: dict[ChunkKey, tuple[int, object]] = {}  # end, owner

    def write_notes(self, who: int) -> None:
        """A later use that another handle has written stays."""
        for key, used in self.notes[who].items():
            if key in self.chunks:
                self.used[key] = max(used, self.used[key])
        self.notes[who] = {}
        for counter in ("hits", "misses"):
            self.counts[None, counter] += self.counts.pop((who, counter), 0)

    def note(self, who: int, key: ChunkKey, found: bool) -> None:
        if found:
            self.notes[who][key] = self.clock.time_ns()
        self.counts[who, "hits" if found else "misses"] += 1

    def victims(self, key: ChunkKey, size: int) -> list[ChunkKey] | None:
        """The least recently used chunks that have to go, as few as possible; None when the rest is pinned."""
        others = [k for k in self.chunks if k != key and self._quota(k) == self._quota(key)]
        excess, victims = sum(self.sizes[k] for k in others) + size - self.cap, list[ChunkKey]()
        for k in sorted(set(others) - self.pins, key=self.used.__getitem__):
            if excess > 0:
                victims.append(k)
                excess -= self.sizes[k]
        return victims if excess <= 0 else None

    def put(self, who: int, key: ChunkKey, kv: ChunkKV, size: int, pin: bool) -> bool:
        """False = StoreFull."""
        victims = self.victims(key, size)
        if victims is not None if self.notes_with_writes else victims != []:
            self.write_notes(who)
        for victim in (victims := self.victims(key, size)) or ():
            self.delete(victim)
            self.counts[None, "evictions"] += 1
        if victims is None:
            return False
        self.chunks[key], self.sizes[key], self.used[key] = kv, size, self.clock.time_ns()
        self.pins |= {key} if pin else set()
        self.history.append((key, kv))
        return True

    def delete(self, key: ChunkKey) -> bool:
        self.pins.discard(key)
        self.history.append((key, None))
        return self.chunks.pop(key, None) is not None

    def lease(self, key: ChunkKey, seconds: float, owner: object) -> bool:
        """Whether the owner gets the lease: one at a time, until it is released or its time is over."""
        if self.leases.get(key, (0, None))[0] > self.clock.time_ns():
            return False
        self.leases[key] = self.clock.time_ns() + round(seconds * 1e9), owner
        return True

    def release(self, key: ChunkKey, owner: object) -> None:
        if self.leases.get(key, (0, None))[1] == owner:
            del self.leases[key]


# Places


class Place:
    """Where one store keeps its chunks, on a manual clock; made anew for every example. cap: in bytes."""

    frozen = True  # whether a snapshot is of the moment when it was opened
    reopens = True  # whether chunks outlive the store's object
    shared = True  # whether another process may open it, too
    leases = True  # whether of several handles one gets a lease
    leases_end_by_clock = True  # the manual one
    damageable = True
    damages: Sequence[Damage] = DAMAGES
    ends_any_lease = True  # when a chunk is stored; else its own handle's
    far: FaultyStore | None = None
    near: KVStore | None = None  # the own store of a place that has a far one
    codec: Codec = Raw()
    longest_pause_s = 100.0

    def __init__(self, folder: Path, cap: int = CAP) -> None:
        self.folder, self.cap, self.clock = folder, cap, ManualClock()

    def model(self) -> StoreModel:
        return StoreModel(self.cap, self.clock, lambda key: b"", notes_with_writes=True)

    def open(self) -> KVStore:
        raise NotImplementedError

    def other(self) -> KVStore:
        """The store as another process opens it."""
        return self.open()

    def damage(self, key: ChunkKey, damage: Damage) -> None:
        """Change a chunk's records; called while the place is closed."""
        raise NotImplementedError

    def size(self, kv: ChunkKV, uncoded: bool = False) -> int:
        return sum(map(len, (Raw() if uncoded else self.codec).encode(kv)))

    def close(self) -> None:
        """Called when the stores are closed."""


def _names_on_disk(key: ChunkKey) -> list[bytes]:
    return [b"h" + key, *(b"l" + key + struct.pack(">H", l) for l in range(LAYERS + 1))]


def _changed(
    get: Callable[[bytes], bytes | None], names: Sequence[bytes], key: ChunkKey, damage: Damage
) -> Iterator[tuple[bytes, bytes | None]]:
    """The names of the records that a damage changes, and what they are then."""
    records = [get(name) for name in names[:-1]]
    yield from zip(names, damage.change(key, records), strict=False)


class InMemory(Place):
    reopens = shared = leases = damageable = False

    def open(self) -> KVStore:
        return MemoryStore(self.cap, LRU(), clock=self.clock)


class OnDisk(Place):
    def open(self) -> KVStore:
        return LMDBStore(self.folder / "kv", self.cap, eviction=LRU(), codec=self.codec, clock=self.clock)

    def damage(self, key: ChunkKey, damage: Damage) -> None:
        folder = self.folder / "kv"
        with lmdb.open(str(folder), map_size=0) as env:
            with env.begin(write=True) as txn:
                for name, raw in _changed(txn.get, _names_on_disk(key), key, damage):
                    txn.delete(name) if raw is None else txn.put(name, raw)
            n_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        data = folder / "data.mdb"
        os.truncate(data, max(n_bytes, data.stat().st_size))  # as the store does: see Environment


class Coded(OnDisk):
    damages = BYTES

    def __init__(self, folder: Path, cap: int = CAP) -> None:
        super().__init__(folder, cap)
        self.codec = Toy(level=6)


class Tiered(OnDisk):
    def open(self) -> KVStore:
        return TieredStore(super().open(), [tier(1.5 * UNIT, name="near"), tier(3 * UNIT, name="next")])

    def other(self) -> KVStore:
        return OnDisk.open(self)


class OnServer(Place):
    frozen = False
    damages = tuple(
        damage for damage in DAMAGES if not damage.readable
    )  # storing again leaves a layer too many
    ends_any_lease = leases_end_by_clock = False
    longest_pause_s = 1.0  # after a minute another thread writes notes

    def __init__(self, folder: Path, cap: int = CAP) -> None:
        super().__init__(folder, cap)
        self._settings: ValkeyConfig = valkey_settings(folder.parent)
        self._client = library().Valkey.from_url(self._settings.url)
        self._client.flushdb()

    def model(self) -> StoreModel:
        return StoreModel(self.cap, self.clock, lambda key: key[:TAG_BYTES], notes_with_writes=False)

    def open(self) -> KVStore:
        return ValkeyStore(self._settings, self.cap, eviction=LRU(), clock=self.clock)

    def damage(self, key: ChunkKey, damage: Damage) -> None:
        name, fields = chunk_name(key), [HEADER, *map(segment_name, range(LAYERS + 1))]
        for field, raw in _changed(self._client.hgetall(name).get, fields, key, damage):
            self._client.hdel(name, field) if raw is None else self._client.hset(name, field, raw)

    def close(self) -> None:
        self._client.close()


class Layered(Place):
    """A small store on disk behind a tier, and another machine's: chunks are written to both at once."""

    frozen = damageable = False
    write: Write = "through"

    def open(self) -> KVStore:
        self.near, far = self.own(), self._far()
        return LayeredStore(
            self.near, far, [tier(UNIT)], self.write, ROOMY, waiting_bytes=2 * UNIT, clock=self.clock
        )

    def other(self) -> KVStore:
        return LMDBStore(self.folder / "far", ROOMY, eviction=LRU(), clock=self.clock)

    def own(self) -> KVStore:
        return LMDBStore(self.folder / "near", self.cap * 3 // 5, eviction=LRU(), clock=self.clock)

    def _far(self) -> FaultyStore:
        before, self.far = self.far, FaultyStore(self.other(), self.clock)
        if before:
            self.far.down, self.far.damaged = before.down, before.damaged
        return self.far


class Behind(Layered):
    """A small store in memory, and another machine's: chunks are written there in the background."""

    reopens = False
    write = "back"

    def own(self) -> KVStore:
        return MemoryStore(self.cap * 3 // 5, LRU(), clock=self.clock)


class Ahead(Layered):
    """Another machine's store alone, read ahead of requests."""

    def open(self) -> KVStore:
        return ReadAhead(self._far(), ROOMY, clock=self.clock)


STORES: dict[str, type[Place]] = {
    "memory": InMemory,
    "lmdb": OnDisk,
    "coded": Coded,
    "tiered": Tiered,
    "valkey": OnServer,
    "layered": Layered,
    "behind": Behind,
    "ahead": Ahead,
}


@dataclass(frozen=True)
class LookUp:
    """One look-up of a chunk."""

    kv: ChunkKV | None  # a copy of the chunk
    found: bool = False  # whether the snapshot gave a view
    corrupt: bool = False  # whether it raised CorruptRecord
    tier: str = ""  # where the view read from


def look_up(snapshot: Snapshot, key: ChunkKey) -> LookUp:
    """Read a whole chunk in a snapshot."""
    try:
        view = snapshot.get(key)
    except CorruptRecord:
        return LookUp(None, corrupt=True)
    if view is None:
        return LookUp(None)
    try:
        layers = [[part.clone() for part in view.layer(l)] for l in range(view.n_layers)]
    except CorruptRecord:
        return LookUp(None, True, True)
    return LookUp(
        ChunkKV(*(torch.stack(parts) for parts in zip(*layers, strict=True))), True, tier=snapshot.tier(key)
    )
