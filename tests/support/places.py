"""Places where stores of each kind keep their chunks, and a naive model of the contract.

A `Place` opens a store, opens it as another process would, and damages its records. `StoreModel` is the contract as a few
dictionaries.
"""

from __future__ import annotations

import shutil
import struct
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from blendserve.config import ValkeyConfig
from blendserve.errors import StoreFull
from blendserve.fetch.copies import Copies
from blendserve.fetch.fetcher import KVFetcher
from blendserve.fetch.source import StoreSource
from blendserve.fetch.tiered import TieredStore
from blendserve.fetch.write_queue import write_behind
from blendserve.kv import ChunkKV
from blendserve.store import ChunkRecord, KVStore, LMDBStore, MemoryStore
from blendserve.store.codecs.base import Codec
from blendserve.store.codecs.raw import Raw
from blendserve.store.key import TAG_BYTES, ChunkKey
from blendserve.store.valkey import ValkeyStore
from blendserve.store.valkey_client import library
from blendserve.store.valkey_layout import HEADER, chunk_name, segment_name
from tests.support.codecs import Toy
from tests.support.damages import Damage
from tests.support.stores import LAYERS, ROOMY, UNIT, FaultyStore, chunk, key_of, tamper
from tests.support.valkey import needs_server
from tests.support.valkey import settings as valkey_settings
from tests.support.waiting import ManualClock


class StoreModel:
    """What a store of one place must hold: dictionaries, an order of use, pins, leases and counters.

    A reader notes uses and look-ups; they count for all handles once its handle (`who`) writes them.
    """

    def __init__(self, cap: int, clock: ManualClock, server: bool) -> None:
        """server: its operator limits what it holds, and notes are written by time; elsewhere with every change."""
        self.cap, self.clock, self.server = cap, clock, server
        self.chunks, self.sizes = dict[ChunkKey, ChunkKV](), dict[ChunkKey, int]()
        self.used, self.pins = dict[ChunkKey, int](), set[ChunkKey]()
        self.history: list[tuple[ChunkKey, ChunkKV | None]] = []  # every change of a chunk
        self.notes: dict[int, dict[ChunkKey, int]] = {0: {}, 1: {}}
        self.counts: Counter[tuple[int | None, str, ChunkKey]] = Counter()  # by handle; None = written
        self.evictions = 0
        self._last = 0
        self.leases: dict[ChunkKey, tuple[int, object]] = {}  # end, owner

    def _tick(self) -> int:
        """Nanoseconds, later than ever before."""
        self._last = max(self._last + 1, self.clock.time_ns())
        return self._last

    def write_notes(self, who: int) -> None:
        """A later use that another handle has written stays."""
        for key, used in self.notes[who].items():
            if key in self.chunks:
                self.used[key] = max(used, self.used[key])
        self.notes[who] = {}
        for name in [name for name in self.counts if name[0] == who]:
            self.counts[None, name[1], name[2]] += self.counts.pop(name)

    def note(self, who: int, key: ChunkKey, found: bool) -> None:
        if found:
            self.notes[who][key] = self._tick()
        self.counts[who, "hits" if found else "misses", key] += 1

    def counted(self, who: int, counter: str, keys: Collection[ChunkKey]) -> int:
        """What a handle sees: its own counts and the written ones."""
        return sum(
            n
            for (handle, name, key), n in self.counts.items()
            if handle in (who, None) and name == counter and key in keys
        )

    def victims(self, key: ChunkKey, size: int) -> tuple[list[ChunkKey], bool]:
        """The chunks that have to go, as few as possible, and whether those make room.

        The least recently used go first, those of namespaces above an equal part of the cap before all others.
        """
        if self.server:
            return [], True
        others = [k for k in self.chunks if k != key]
        excess, victims = sum(self.sizes[k] for k in others) + size - self.cap, list[ChunkKey]()
        held = Counter({key[:TAG_BYTES]: size})
        for k in others:
            held[k[:TAG_BYTES]] += self.sizes[k]
        spared = {t for t, n in held.items() if n * len(+held) <= self.cap}
        for k in sorted(set(others) - self.pins, key=lambda k: (k[:TAG_BYTES] in spared, self.used[k], k)):
            if excess > 0:
                victims.append(k)
                excess -= self.sizes[k]
        return victims, excess <= 0

    def put(self, who: int, key: ChunkKey, kv: ChunkKV, size: int, pin: bool) -> bool:
        """False = StoreFull."""
        if self.victims(key, size)[1] and not self.server:
            self.write_notes(who)
        victims, fits = self.victims(key, size)
        if not fits:
            return False
        for victim in victims:
            self.delete(victim)
        self.evictions += len(victims)
        self.chunks[key], self.sizes[key], self.used[key] = kv, size, self._tick()
        self.pins |= {key} if pin else set()
        self.history.append((key, kv))
        return True

    def delete(self, key: ChunkKey) -> bool:
        self.pins.discard(key)
        self.history.append((key, None))
        return self.chunks.pop(key, None) is not None

    def lease(self, key: ChunkKey, seconds: float, owner: object) -> bool:
        """Whether the owner gets the lease: one at a time, until it is released or its time is over."""
        now = self.clock.time_ns()
        self.leases = {k: lease for k, lease in self.leases.items() if lease[0] > now}
        if key in self.leases:
            return False
        self.leases[key] = self.clock.time_ns() + round(seconds * 1e9), owner
        return True

    def release(self, key: ChunkKey, owner: object) -> None:
        if self.leases.get(key, (0, None))[1] == owner:
            del self.leases[key]


# Places


class Place:
    """Where one store keeps its chunks, on a manual clock; made anew for every example. cap: in bytes."""

    server = False  # whose snapshots follow the store, and whose leases end by its own clock
    lasts = True  # chunks outlive the store's object, and other processes open it, too
    far: FaultyStore | None = None  # another machine's
    near: KVStore | None = None  # the own store of a place that has a far one
    coded = False
    longest_pause_s = 100.0

    def __init__(self, folder: Path, cap: int = 5 * UNIT) -> None:
        self.folder, self.cap, self.clock = folder, cap, ManualClock()
        self.codec: Codec = Toy(level=6) if self.coded else Raw()

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


class InMemory(Place):
    lasts = False

    def open(self) -> KVStore:
        return MemoryStore(self.cap, clock=self.clock)


class OnDisk(Place):
    coded = True

    def open(self) -> KVStore:
        return LMDBStore(self.folder / "kv", self.cap, clock=self.clock)

    def damage(self, key: ChunkKey, damage: Damage) -> None:
        names = [b"h" + key, *(b"l" + key + struct.pack(">H", l) for l in range(LAYERS + 1))]

        def change(txn: lmdb.Transaction) -> None:
            records: list[Any] = [txn.get(name) for name in names[:-1]]
            for name, raw in zip(names, damage.change(key, records), strict=False):
                txn.delete(name) if raw is None else txn.put(name, raw)

        tamper(self.folder / "kv", change)


class OnServer(Place):
    server = True
    coded = True
    longest_pause_s = 1.0  # after a minute another thread writes notes

    def __init__(self, folder: Path, cap: int = 5 * UNIT) -> None:
        super().__init__(folder, cap)
        self._settings: ValkeyConfig = valkey_settings(folder.parent)
        self._client = library().Valkey.from_url(self._settings.url)
        self._client.flushdb()

    def open(self) -> KVStore:
        return ValkeyStore(self._settings, self.cap, clock=self.clock)

    def damage(self, key: ChunkKey, damage: Damage) -> None:
        name, fields = chunk_name(key), [HEADER, *map(segment_name, range(LAYERS))]
        records = self._client.hmget(name, fields)
        for field, raw in zip(fields, damage.change(key, records), strict=True):
            self._client.hdel(name, field) if raw is None else self._client.hset(name, field, raw)

    def close(self) -> None:
        self._client.close()


class Tiered(Place):
    """A small store on disk, and another machine's, to which chunks are written in the background."""

    def open(self) -> TieredStore:
        self.near, far = self.own(), self._far()
        return TieredStore(self.near, far, waiting_bytes=2 * UNIT, clock=self.clock)

    def other(self) -> KVStore:
        return LMDBStore(self.folder / "far", ROOMY, clock=self.clock)

    def own(self) -> KVStore:
        return LMDBStore(self.folder / "near", self.cap * 3 // 5, clock=self.clock)

    def fetcher(self, store: KVStore, copies: Copies) -> KVFetcher:
        return KVFetcher(store, copies, prefetch_bytes=ROOMY)

    def _far(self) -> FaultyStore:
        before, self.far = self.far, FaultyStore(self.other(), self.clock)
        if before:
            self.far.down, self.far.damaged = before.down, before.damaged
        return self.far


class Alone(Tiered):
    """Another machine's store alone."""

    def open(self) -> KVStore:  # type: ignore[override]
        return self._far()

    def fetcher(self, store: KVStore, copies: Copies) -> KVFetcher:
        source = StoreSource(store, clock=self.clock)
        return KVFetcher(MemoryStore(0), copies, source=source, prefetch_bytes=ROOMY)


STORES: dict[str, type[Place]] = {"memory": InMemory, "lmdb": OnDisk, "valkey": OnServer}
REMOTE_STORES: dict[str, type[Tiered]] = {"tiered": Tiered, "alone": Alone}
EVERY_KIND = [pytest.param(kind, marks=needs_server if kind == "valkey" else ()) for kind in STORES]
SHARED_KINDS = [pytest.param("lmdb"), pytest.param("valkey", marks=needs_server)]  # between processes


# Histories

TENANT = "tenant"
KEYS = [*(key_of(n) for n in range(4)), *(key_of(n, TENANT) for n in range(2))]


def content(key: ChunkKey, tokens: int = 10, revision: int = 0) -> ChunkKV:
    """What a history stores under a key."""
    return chunk(tokens, seed=10 * KEYS.index(key) + revision)


def put(store: KVStore, key: ChunkKey, kv: ChunkKV, pin: bool, how: str, place: Place) -> bool:
    """Store a chunk in one of four ways; False when it does not fit."""
    try:
        if how == "behind":
            return list(write_behind(store, place.codec, [(key, kv)], most_tokens=1)) == [kv.n_bytes]
        codec = Raw() if how == "uncoded" else place.codec
        record = ChunkRecord.encode(KEYS[0] if how == "another key's" else key, kv, codec)
        return store.put(key, record, pin)
    except StoreFull:
        return False


def explore(machine: Callable[[Path], RuleBasedStateMachine], folder: Path) -> None:
    """Run histories of a state machine, each in a folder of its own."""
    examples, made = max(40, settings().max_examples * 2 // 5), list[Path]()
    phases = tuple(Phase) if examples > 40 else (Phase.generate,)  # shrinking a history takes minutes

    def make() -> RuleBasedStateMachine:
        if made:
            shutil.rmtree(made[-1], ignore_errors=True)
        made.append(folder / str(len(made)))
        made[-1].mkdir()
        return machine(made[-1])

    options = settings(max_examples=examples, stateful_step_count=30, phases=phases)
    run_state_machine_as_test(make, settings=options)  # type: ignore[arg-type]
