"""A remote source without a network, which follows a script of faults; a link whose rate a test sets."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from blendserve.fetch.incoming import ChunkRequest, IncomingChunk
from blendserve.fetch.link import LinkEstimator
from blendserve.fetch.source import ANY
from blendserve.store import ChunkKey, ChunkRecord, KVStore, MemoryStore, Miss, read_record
from blendserve.store.base import ReadTime
from blendserve.store.blobs import BlobReader
from blendserve.store.clock import TimeSource
from tests.support.waiting import ManualClock


class Known(LinkEstimator):
    """A link of a known rate."""

    def __init__(self, rate: float, clock: TimeSource = time) -> None:
        super().__init__(clock)
        self._known = rate

    @property
    def rate(self) -> float | None:
        return self._known


Fault = str  # "damage", "stall", "slow" or "cut"


@dataclass(eq=False)
class ScriptedSource:
    """Brings records layer by layer; a fault happens once, before a layer of a chunk. Its clock is manual."""

    records: Mapping[ChunkKey, Mapping[str, ChunkRecord]]  # by level, the finest first
    faults: dict[tuple[ChunkKey, int], Fault] = field(default_factory=dict)
    workers: int = 2
    rate: float | None = None  # of the link; None: measured
    before: Callable[[ChunkKey, int], object] = lambda key, l: None  # called before each layer; may wait
    name, deadline_s, wanted_s, batch_bytes = "the scripted source", 5.0, 0.0, 0
    max_parallel, in_flight_bytes = 64, 1 << 62

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.link = Known(self.rate, self.clock) if self.rate else LinkEstimator(self.clock)
        self.blobs: BlobReader = MemoryStore(0).blobs
        self.came: dict[ChunkKey, str] = {}  # chunks that came whole, and their levels
        self.asked: Counter[ChunkKey] = Counter()
        self.absent: set[ChunkKey] = set()
        self._interrupts = 0
        self._lock = threading.Lock()

    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        return {key for key in keys if key in self.records and key not in self.absent}

    def sizes(self, requests: Sequence[ChunkRequest]) -> Mapping[ChunkKey, Mapping[str, int]]:
        there = self.contains(r.key for r in requests)
        return {key: {level: r.n_bytes for level, r in self.records[key].items()} for key in there}

    def transfer(self, batch: Sequence[IncomingChunk]) -> None:
        levels = [chunk.level or ANY for chunk in batch]
        records = [self.records[chunk.key][level] for chunk, level in zip(batch, levels, strict=True)]
        self.asked.update(chunk.key for chunk in batch)
        try:
            self._bring(batch, records, levels)
        finally:  # the rest of a batch may be whole where one chunk is lost
            self.came |= {c.key: level for c, level in zip(batch, levels, strict=True) if c.is_whole}

    def _bring(
        self, batch: Sequence[IncomingChunk], records: Sequence[ChunkRecord], levels: Sequence[str]
    ) -> None:
        interrupts = self._interrupts
        with self.link.transfer():
            for chunk, record in zip(batch, records, strict=True):
                chunk.begin(record.header)
            for l in range(records[0].n_layers):
                for chunk, record in zip(batch, records, strict=True):
                    self.before(chunk.key, l)
                    if self._fails(chunk, l, interrupts):
                        return
                    self.clock.advance(1e-4)
                    self.link.arrived(len(record.segment(l)))
                    chunk.add(record.segment(l))
                if any(chunk.level != level for chunk, level in zip(batch, levels, strict=True)):
                    return

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

    def probe(self, keys: Sequence[ChunkKey], n_bytes: int) -> ReadTime | None:
        return None

    def close(self) -> None: ...


def slow_source(store: KVStore, token_s: float) -> ScriptedSource:
    """A machine that has the chunks of a store, behind a link that takes this long a token."""
    records = {key: {"raw": record} for key in list(store.keys()) if (record := read_record(store, key))}
    stats = store.stats()
    return ScriptedSource(records, rate=stats.bytes / stats.tokens / token_s)
