"""Remote sources without a network: a link whose rate a test sets, and one that follows a script of faults."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from blendserve.errors import StoreUnavailable
from blendserve.fetch.incoming import ChunkRequest, IncomingChunk
from blendserve.fetch.link import LinkEstimator, LinkSample
from blendserve.fetch.source import ANY, StoreSource
from blendserve.store import ChunkKey, ChunkRecord, KVStore, MemoryStore, Miss
from blendserve.store.blobs import BlobStore
from blendserve.store.record import Header
from tests.support.waiting import ManualClock

SAMPLED = 0.01  # the share of a chunk in a probe


class FarSource(StoreSource):
    """A store on another machine: a transfer takes `latency_s` and `token_s` a token. A test sets the fields."""

    def __init__(self, store: KVStore, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        super().__init__(store, clock=self.clock)
        self.latency_s = self.token_s = 0.0
        self.down = False  # a probe fails
        self.fetched: Counter[ChunkKey] = Counter()
        self.probed: list[int] = []  # bytes asked for by each probe

    def read(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, ChunkRecord | Exception]:  # type: ignore[override]
        self.fetched.update(keys)
        found = super().read(keys)
        n_tokens = sum(r.n_tokens for r in found.values() if isinstance(r, ChunkRecord))
        self.clock.advance(self.latency_s + self.token_s * n_tokens)
        return found  # type: ignore[return-value]

    def _probe(self, keys: Sequence[ChunkKey], n_bytes: int) -> tuple[LinkSample | None, Header | None]:
        self.probed.append(n_bytes)
        found = super().read(keys)
        records = (r for r in found.values() if isinstance(r, ChunkRecord))
        record = next(records, None)
        seconds = self.latency_s + SAMPLED * self.token_s * (record.n_tokens if record else 0)
        self.clock.advance(seconds)
        if self.down:
            raise StoreUnavailable("the network is down")
        if record is None:
            return None, None
        sample = LinkSample(self.latency_s, seconds, max(1, round(SAMPLED * record.n_bytes)))
        return sample, record.header


Fault = str  # "damage", "stall", "slow" or "cut"


@dataclass(eq=False)
class ScriptedSource:
    """Brings records layer by layer; a fault happens once, before a layer of a chunk. Its clock is manual."""

    records: Mapping[ChunkKey, Mapping[str, ChunkRecord]]  # by level, the finest first
    faults: dict[tuple[ChunkKey, int], Fault] = field(default_factory=dict)
    clock: ManualClock = field(default_factory=ManualClock)
    workers: int = 2
    layer_s: float = 1e-4
    came: dict[ChunkKey, str] = field(default_factory=dict)  # chunks that came whole, and their levels
    name, deadline_s, wanted_s, batch_bytes = "the scripted source", 5.0, 0.0, 0
    max_interleaved, in_flight_bytes = 64, 1 << 62

    def __post_init__(self) -> None:
        self.link = LinkEstimator(self.clock)
        self.blobs: BlobStore = MemoryStore(0).blobs
        self.absent: set[ChunkKey] = set()
        self._interrupts = 0
        self._lock = threading.Lock()

    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        return {key for key in keys if key in self.records and key not in self.absent}

    def sizes(self, requests: Sequence[ChunkRequest]) -> Mapping[ChunkKey, Mapping[str, int]]:
        there = self.contains(r.key for r in requests)
        return {key: {level: r.n_bytes for level, r in self.records[key].items()} for key in there}

    def transfer(self, batch: Sequence[IncomingChunk]) -> None:
        interrupts, levels = self._interrupts, [chunk.level or ANY for chunk in batch]
        records = [self.records[chunk.key][level] for chunk, level in zip(batch, levels, strict=True)]
        with self.link.transfer():
            for chunk, record in zip(batch, records, strict=True):
                chunk.begin(record.header)
            for l in range(records[0].n_layers):
                for chunk, record in zip(batch, records, strict=True):
                    if self._fails(chunk, l, interrupts):
                        return
                    self.clock.advance(self.layer_s)
                    self.link.arrived(len(record.segment(l)))
                    chunk.add(record.segment(l))
                if any(chunk.level != level for chunk, level in zip(batch, levels, strict=True)):
                    return
        self.came |= {chunk.key: level for chunk, level in zip(batch, levels, strict=True) if chunk.is_whole}

    def _fails(self, chunk: IncomingChunk, l: int, interrupts: int) -> bool:
        with self._lock:
            fault = self.faults.pop((chunk.key, l), "")
        if fault == "damage":
            chunk.end(Miss("corrupt", f"layer {l} is damaged on purpose"))
        elif fault == "slow":
            self.clock.advance(1.0)
        elif fault == "stall":
            pause = threading.Event()
            while self._interrupts == interrupts and not chunk.is_done:
                self.clock.advance(0.05)
                pause.wait(0.001)
        return fault in {"damage", "stall", "cut"}

    def interrupt(self, late: bool) -> str:
        self._interrupts += 1
        return f"{self.name} does not answer"

    def probe(self, keys: Sequence[ChunkKey], n_bytes: int) -> LinkSample | None:
        return None

    def close(self) -> None: ...
