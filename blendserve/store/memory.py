"""Chunk KV in this process's memory: the plain store, and the other one's oracle in tests.

Uncoded chunks are kept as tensors, coded ones as their segments, which are decoded when they are read.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from blendserve.config import PlaceConfig
from blendserve.core import ChunkKV, TokenIds
from blendserve.errors import StoreFull, unraised
from blendserve.store.base import (
    LOCAL,
    ChunkInfo,
    KVStore,
    Meanwhile,
    StoreStats,
    TimeSaved,
    VerifyReport,
    full,
    stats_of,
)
from blendserve.store.chunk import StoredChunk
from blendserve.store.clock import Clock
from blendserve.store.codecs.base import Buffer, ChunkShape, Codec, Undecodable, tables_hash
from blendserve.store.codecs.raw import Raw
from blendserve.store.key import ChunkKey, namespace_tag
from blendserve.store.policies import Admission, Always, Candidate, Eviction, Policies, Refuse
from blendserve.store.record import Coded, Header, check_segment, seal, validate_kv
from blendserve.store.tables import TablesInfo, check_room, checked
from blendserve.store.traffic import Traffic, add_up


@dataclass(frozen=True, slots=True)
class MemoryChunk:
    """A chunk's own copy of its tensors."""

    kv: ChunkKV
    version: object = field(default_factory=object, compare=False, repr=False)  # no two are the same

    @property
    def n_layers(self) -> int:
        return int(self.kv.keys.shape[0])

    @property
    def n_tokens(self) -> int:
        return self.kv.n_tokens

    @property
    def n_bytes(self) -> int:
        return self.kv.n_bytes

    raw_bytes = n_bytes

    def layer(self, l: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= l < self.n_layers:
            raise IndexError(f"a chunk of {self.n_layers} layers has no layer {l}")
        return self.kv.keys[l], self.kv.values[l]


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """A chunk as it was coded."""

    header: Header
    segments: list[Buffer]  # [L]

    @property
    def n_tokens(self) -> int:
        return self.header.shape.n_tokens

    @property
    def n_bytes(self) -> int:
        return self.header.n_bytes

    @property
    def raw_bytes(self) -> int:
        return self.header.shape.n_bytes


Kept: TypeAlias = "MemoryChunk | MemoryRecord"


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The chunks as they were when it was opened; later puts and deletes do not reach it."""

    chunks: dict[ChunkKey, Kept]
    traffic: Traffic
    tables: dict[bytes, bytes]
    undecodable: dict[ChunkKey, Undecodable] = field(default_factory=dict)

    def expect(
        self, keys: Sequence[ChunkKey], meanwhile: Meanwhile | None = None, saved: TimeSaved | None = None
    ) -> None:
        """Nothing to do: it is all here."""

    def tier(self, key: ChunkKey) -> str:
        return LOCAL

    def get(self, key: ChunkKey) -> MemoryChunk | StoredChunk | None:
        kept = self.chunks.get(key)
        if kept is None:
            self.traffic.miss(key)
            return None
        try:
            chunk = kept if isinstance(kept, MemoryChunk) else self._stored(key, kept)
        except Undecodable as error:
            self.traffic.miss(key, undecodable=str(error))
            self.undecodable[key] = unraised(error)
            return None
        self.traffic.hit(key)
        return chunk

    def _stored(self, key: ChunkKey, kept: MemoryRecord) -> StoredChunk:
        count = partial(self.traffic.count, key, "corrupt")
        return StoredChunk(key, kept.header, kept.segments.__getitem__, self.tables.get, count)


class MemoryStore(KVStore):
    """A KVStore of at most `cap_bytes` of payload that ends with the process."""

    persistent = needs_folder = False
    tells_ids = True

    def __init__(
        self,
        cap_bytes: int,
        eviction: Eviction | None = None,
        admission: Admission | None = None,
        codec: Codec | None = None,
        clock: Clock = time,
    ) -> None:
        """codec: of what is written; whatever is there is read by its own."""
        self.cap_bytes = cap_bytes
        self._codec = codec or Raw()
        self._tables: dict[bytes, tuple[TablesInfo, bytes]] = {}
        self._eviction = eviction or Refuse()
        self._admission = admission or Always()
        self._traffic = Traffic(self._admission, clock)
        self._chunks: dict[ChunkKey, Kept] = {}
        self._used: dict[ChunkKey, int] = {}
        self._pins: set[ChunkKey] = set()
        self._counts: Counter[tuple[bytes, str]] = Counter()
        self._lock = threading.RLock()

    @classmethod
    def from_config(
        cls, config: PlaceConfig, path: Path | None, read_only: bool, policies: Policies
    ) -> MemoryStore:
        return cls(config.cap_bytes, *policies)

    @contextmanager
    def reading(self) -> Iterator[MemorySnapshot]:
        with self._lock:
            tables = {hash: raw for hash, (_, raw) in self._tables.items()}
            snapshot = MemorySnapshot(dict(self._chunks), self._traffic, tables)
        yield snapshot

    def put(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        codec = self._codec
        if isinstance(codec, Raw):
            return self.put_uncoded(key, kv, pin)
        validate_kv(kv)
        return self.put_coded(key, Coded(ChunkShape.of(kv), codec.coding, codec.encode(kv), kv.ids), pin)

    def put_uncoded(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        validate_kv(kv)
        copy = ChunkKV(kv.keys.detach().cpu().clone(), kv.values.detach().cpu().clone(), ids=kv.ids)
        return self._keep(key, MemoryChunk(copy), pin)

    def put_coded(self, key: ChunkKey, coded: Coded, pin: bool = False) -> bool:
        return self._keep(key, MemoryRecord(seal(key, coded), [bytes(part) for part in coded.segments]), pin)

    def coded(self, key: ChunkKey) -> Coded | None:
        kept = self._chunks.get(key)
        if kept is None:
            return None
        if isinstance(kept, MemoryChunk):
            return Coded(ChunkShape.of(kept.kv), Raw.coding, Raw().encode(kept.kv), kept.kv.ids)
        segments = [check_segment(key, kept.header, l, part) for l, part in enumerate(kept.segments)]
        return Coded(kept.header.shape, kept.header.coding, segments, kept.header.ids)

    def write_by(self, codec: Codec) -> None:
        self._codec = codec

    def put_tables(self, codec: str, fingerprint: str, raw: bytes, current: bool = True) -> bytes:
        hash = tables_hash(raw)
        with self._lock:
            check_room(self.all_tables(), hash, len(raw))
            made = self._traffic.now() if current else 0
            self._tables[hash] = TablesInfo(hash, codec, fingerprint, len(raw), made), bytes(raw)
        return hash

    def tables(self, hash: bytes) -> bytes | None:
        found = self._tables.get(hash)
        return None if found is None else checked(hash, found[1])

    def all_tables(self) -> list[TablesInfo]:
        with self._lock:
            return [self._tables[hash][0] for hash in sorted(self._tables)]

    def delete_tables(self, hash: bytes) -> bool:
        with self._lock:
            return self._tables.pop(hash, None) is not None

    def wants(self, key: ChunkKey, raw_bytes: int) -> bool:
        try:
            with self._lock:
                return self._admitted(key, self._codec.expected_bytes(raw_bytes))
        except StoreFull:
            return False

    def pin(self, keys: Iterable[ChunkKey]) -> int:
        with self._lock:
            found = self._chunks.keys() & set(keys)
            self._pins |= found
            return len(found)

    def unpin(self, keys: Iterable[ChunkKey]) -> int:
        with self._lock:
            found = self._chunks.keys() & set(keys)
            self._pins -= found
            return len(found)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._chunks

    def info(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkInfo]:
        with self._lock:
            found = {key: self._chunks[key] for key in keys if key in self._chunks}
            return {
                key: ChunkInfo(kept.n_tokens, kept.n_bytes, kept.raw_bytes, key in self._pins, LOCAL)
                for key, kept in found.items()
            }

    def ids(self, keys: Iterable[ChunkKey]) -> Iterator[tuple[ChunkKey, TokenIds]]:
        for key in keys:
            kept = self._chunks.get(key)
            ids = kept.kv.ids if isinstance(kept, MemoryChunk) else kept.header.ids if kept else ()
            if ids:
                yield key, ids

    def delete(self, key: ChunkKey) -> bool:
        with self._lock:
            there = key in self._chunks
            self._forget(key)
            return there

    def keys(self, namespace: str | None = None) -> Iterator[ChunkKey]:
        with self._lock:
            return iter(sorted(key for key in self._chunks if key.startswith(namespace_tag(namespace))))

    def hot(self) -> frozenset[ChunkKey]:
        with self._lock:
            return frozenset(self._chunks)

    def stats(self, namespace: str | None = None) -> StoreStats:
        with self._lock:
            keys = list(self.keys(namespace))
            kept = [self._chunks[key] for key in keys]
            sizes = [
                (c.n_tokens, c.n_bytes, c.raw_bytes, k in self._pins) for k, c in zip(keys, kept, strict=True)
            ]
            self._settle()
            counts = add_up(self._counts, namespace_tag(namespace))
            infos = self.all_tables()
        return stats_of("memory", "", self.cap_bytes, sizes, counts, namespace, infos)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        chunks = len(self._chunks)  # nothing outside this process can have changed them
        if progress:
            progress(chunks, chunks)
        return VerifyReport(chunks, ())

    def close(self) -> None:
        with self._lock:
            self._chunks.clear()
            self._pins.clear()

    def _keep(self, key: ChunkKey, kept: Kept, pin: bool) -> bool:
        with self._lock:
            if not pin and not self._admitted(key, kept.n_bytes):
                return False
            for victim in self._victims(key, kept.n_bytes):
                self._forget(victim.key)
                self._traffic.count(victim.key, "evictions")
            self._chunks[key], self._used[key] = kept, self._traffic.now()
            self._pins |= {key} if pin else set()
            return True

    def _admitted(self, key: ChunkKey, n_bytes: int) -> bool:
        """Whether a chunk on demand is worth its victims. Raises StoreFull when it cannot be had at any price."""
        victims = [] if key in self._chunks else self._victims(key, n_bytes)
        if not victims or self._admission.admits(key, n_bytes, victims, len(self._chunks)):
            return True
        self._traffic.count(key, "refused")
        return False

    def _victims(self, key: ChunkKey, n_bytes: int) -> list[Candidate]:
        self._settle()
        free = [k for k in self._chunks if k != key and k not in self._pins]
        oldest = [Candidate(k, self._chunks[k].n_bytes) for k in sorted(free, key=self._used.__getitem__)]
        others = sum(chunk.n_bytes for k, chunk in self._chunks.items() if k != key)
        victims = self._eviction.victims(oldest, others + n_bytes - self.cap_bytes)
        if victims is None:
            raise full("the KV store in memory", others, n_bytes, self.cap_bytes)
        return victims

    def _settle(self) -> None:
        """Take over what was noted of reads."""
        notes = self._traffic.take()
        self._used.update({key: used for key, used in notes.used.items() if key in self._chunks})
        self._counts.update(notes.counts)

    def _forget(self, key: ChunkKey) -> None:
        self._chunks.pop(key, None)
        self._used.pop(key, None)
        self._pins.discard(key)
