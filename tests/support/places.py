"""Places where stores of each kind keep their chunks, and a naive model of the contract.

A `Place` opens a store, opens it as another process would, and damages its records. `StoreModel` is the contract as a few
dictionaries.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb
import pytest

from blendserve.config import ValkeyConfig
from blendserve.core import ChunkKV
from blendserve.errors import CorruptRecord, StoreFull
from blendserve.fetch.copies import Copies
from blendserve.fetch.fetcher import KVFetcher
from blendserve.fetch.source import StoreSource
from blendserve.fetch.tiered import TieredStore, Write
from blendserve.fetch.write_queue import write_behind
from blendserve.store import ChunkRecord, KVStore, LMDBStore, MemoryStore, Snapshot
from blendserve.store.codecs.base import Codec
from blendserve.store.codecs.raw import Raw
from blendserve.store.key import TAG_BYTES, ChunkKey
from blendserve.store.policies import LRU
from blendserve.store.valkey import ValkeyStore
from blendserve.store.valkey_client import library
from blendserve.store.valkey_layout import HEADER, chunk_name, segment_name
from blendserve.store.view import decode
from tests.support.codecs import Toy
from tests.support.damages import BYTES, DAMAGES, Damage
from tests.support.stores import LAYERS, ROOMY, UNIT, FaultyStore, chunk, key_of, put_kv
from tests.support.valkey import needs_server
from tests.support.valkey import settings as valkey_settings
from tests.support.waiting import ManualClock


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
        self.counts: Counter[tuple[int | None, str, ChunkKey]] = Counter()  # by handle; None = written
        self.evictions = 0
        self._last = 0
        self.leases: dict[ChunkKey, tuple[int, object]] = {}  # end, owner

    def _tick(self) -> int:
        """Nanoseconds, later than ever before."""
        self._last = max(self._last + 1, self.clock.time_ns())
        return self._last

    def _order(self, key: ChunkKey) -> tuple[int, ChunkKey]:
        """The least recently used first; a server counts microseconds."""
        return self.used[key] // (1 if self.notes_with_writes else 1000), key

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

    def victims(self, key: ChunkKey, size: int) -> list[ChunkKey] | None:
        """The least recently used chunks that have to go, as few as possible; None when the rest is pinned."""
        others = [k for k in self.chunks if k != key and self._quota(k) == self._quota(key)]
        excess, victims = sum(self.sizes[k] for k in others) + size - self.cap, list[ChunkKey]()
        for k in sorted(set(others) - self.pins, key=self._order):
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
            self.evictions += 1
        if victims is None:
            return False
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

    frozen = True  # whether a snapshot is of the moment when it was opened
    reopens = True  # whether chunks outlive the store's object
    shared = True  # whether another process may open it, too
    leases = True  # whether of several handles one gets a lease
    leases_end_by_clock = True  # the manual one
    damageable = True
    damages: Sequence[Damage] = DAMAGES
    far: FaultyStore | None = None  # another machine's
    near: KVStore | None = None  # the own store of a place that has a far one
    codec: Codec = Raw()
    longest_pause_s = 100.0

    def __init__(self, folder: Path, cap: int = 5 * UNIT) -> None:
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
        return LMDBStore(self.folder / "kv", self.cap, eviction=LRU(), clock=self.clock)

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

    def __init__(self, folder: Path, cap: int = 5 * UNIT) -> None:
        super().__init__(folder, cap)
        self.codec = Toy(level=6)


class OnServer(Place):
    frozen = False
    damages = tuple(damage for damage in DAMAGES if not damage.readable)  # a layer too many stays
    leases_end_by_clock = False
    longest_pause_s = 1.0  # after a minute another thread writes notes

    def __init__(self, folder: Path, cap: int = 5 * UNIT) -> None:
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


class Tiered(Place):
    """A small store on disk, and another machine's: chunks are written to both at once."""

    frozen = damageable = False
    write: Write = "through"

    def open(self) -> TieredStore:
        self.near, far = self.own(), self._far()
        return TieredStore(self.near, far, self.write, waiting_bytes=2 * UNIT, clock=self.clock)

    def other(self) -> KVStore:
        return LMDBStore(self.folder / "far", ROOMY, eviction=LRU(), clock=self.clock)

    def own(self) -> KVStore:
        return LMDBStore(self.folder / "near", self.cap * 3 // 5, eviction=LRU(), clock=self.clock)

    def fetcher(self, store: KVStore, copies: Copies) -> KVFetcher:
        return KVFetcher(store, copies, prefetch_bytes=ROOMY)

    def _far(self) -> FaultyStore:
        before, self.far = self.far, FaultyStore(self.other(), self.clock)
        if before:
            self.far.down, self.far.damaged = before.down, before.damaged
        return self.far


class Behind(Tiered):
    """A small store in memory, and another machine's: chunks are written there in the background."""

    reopens = False
    write = "back"

    def own(self) -> KVStore:
        return MemoryStore(self.cap * 3 // 5, LRU(), clock=self.clock)


class Alone(Tiered):
    """Another machine's store alone."""

    def open(self) -> KVStore:  # type: ignore[override]
        return self._far()

    def fetcher(self, store: KVStore, copies: Copies) -> KVFetcher:
        source = StoreSource(store, clock=self.clock)
        return KVFetcher(MemoryStore(0), copies, source=source, prefetch_bytes=ROOMY)


STORES: dict[str, type[Place]] = {
    "memory": InMemory,
    "lmdb": OnDisk,
    "coded": Coded,
    "valkey": OnServer,
}
REMOTE_STORES: dict[str, type[Tiered]] = {"tiered": Tiered, "behind": Behind, "alone": Alone}
EVERY_KIND = [pytest.param(kind, marks=needs_server if kind == "valkey" else ()) for kind in STORES]
SHARED_KINDS = [pytest.param("lmdb"), pytest.param("valkey", marks=needs_server)]  # between processes


@dataclass(frozen=True)
class LookUp:
    """One look-up of a chunk."""

    kv: ChunkKV | None  # a copy of the chunk
    found: bool = False  # whether the snapshot gave a record
    corrupt: bool = False  # whether it raised CorruptRecord


def look_up(snapshot: Snapshot, store: KVStore, key: ChunkKey) -> LookUp:
    """Read a whole chunk in a snapshot of the store."""
    try:
        record = snapshot.get(key)
    except CorruptRecord:
        return LookUp(None, corrupt=True)
    if record is None:
        return LookUp(None)
    try:
        return LookUp(decode(record, store.blobs.get), True)
    except CorruptRecord:
        return LookUp(None, True, True)


# Histories

TENANT = "tenant"
KEYS = [*(key_of(n) for n in range(4)), *(key_of(n, TENANT) for n in range(2))]


def content(key: ChunkKey, tokens: int = 10, revision: int = 0) -> ChunkKV:
    """What a history stores under a key."""
    return chunk(tokens, seed=10 * KEYS.index(key) + revision)


def put(store: KVStore, key: ChunkKey, kv: ChunkKV, pin: bool, how: str, place: Place) -> bool:
    """Store a chunk in one of four ways; False when it does not fit."""
    codec = place.codec
    ways: dict[str, Callable[[], object]] = {
        "put": lambda: put_kv(store, key, kv, pin, codec),
        "uncoded": lambda: put_kv(store, key, kv, pin),
        "another key's": lambda: store.put(key, ChunkRecord.encode(KEYS[0], kv, codec), pin),
        "behind": lambda: list(write_behind(store, codec, [(key, kv)], most_tokens=1)) == [kv.n_bytes],
    }
    try:
        assert ways[how]()
    except StoreFull:
        return False
    return True
