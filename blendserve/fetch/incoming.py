"""Remote chunks in transit: a header, and checked segments that readers wait for as they arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from blendserve.store import ChunkKey, ChunkRecord, Miss
from blendserve.store.codecs.base import Buffer
from blendserve.store.record import Header, ignore

FAILED_S = 10.0  # a damaged chunk is not read again for this time


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """One chunk that a prompt can use, and what having it is worth."""

    key: ChunkKey
    n_tokens: int
    saved_s: float | None = None  # prefill time that having it saves; None: fetch it at any cost
    compute_s: float | None = None  # time to compute it alone; None: never compute it while waiting


OnLayer: TypeAlias = "Callable[[IncomingChunk], None]"


def keep_level(chunk: IncomingChunk) -> None:
    """Leave a chunk at its level."""


@dataclass(eq=False)
class IncomingChunk:
    """A chunk in transit. A source calls `begin`, `add` and `end`; readers wait for `changed`. Thread-safe."""

    key: ChunkKey
    sizes: Mapping[str, int]  # bytes by level, the finest first
    changed: threading.Condition  # shared by all chunks of a fetcher
    level: str | None = None  # requested level. The source stops when it changes; None: give up
    n_left: int = 0  # bytes that are still to come
    patience_s: float = float("inf")  # time without a byte after which the link counts as dead
    header: Header | None = None
    segments: list[Buffer] = field(default_factory=list)
    miss: Miss | None = None
    is_started: bool = False  # a transfer asks for it
    n_asked: int = 0  # times that a transfer asked for it
    users: int = 1  # fetches and holds that use it
    is_kept: bool = False  # for the local store, which it is being written to
    report: Callable[..., None] = ignore  # as of a ChunkRecord
    is_restarted: bool = False  # its level has changed in transit
    on_layer: OnLayer = keep_level  # may change `level`

    @property
    def is_whole(self) -> bool:
        header = self.header
        return header is not None and len(self.segments) == header.shape.n_layers

    @property
    def is_done(self) -> bool:
        """Return whether nothing more will arrive."""
        return self.miss is not None or self.is_whole

    @property
    def n_bytes(self) -> int:
        """Return the bytes that have arrived."""
        return sum(map(len, self.segments))

    def start(self, level: str, patience_s: float = float("inf"), on_layer: OnLayer = keep_level) -> None:
        """Note that a transfer is about to ask for the chunk. on_layer: called after each layer but the last."""
        self.is_started = True
        self.level = level
        self.patience_s = patience_s
        self.on_layer = on_layer
        self.n_left = self.sizes[level]
        self.n_asked += 1

    def begin(self, header: Header) -> None:
        """Note that a record begins to arrive: the first one, or another level in its place."""
        with self.changed:
            if self.miss is None:
                self.header = header
                self.segments = []
                self.n_left = header.n_bytes
                self.changed.notify_all()

    def add(self, segment: Buffer) -> None:
        """Append the next layer, which was checked."""
        with self.changed:
            if self.miss is not None:
                return
            self.segments.append(segment)
            self.n_left -= len(segment)
            self.changed.notify_all()
        if not self.is_whole:
            self.on_layer(self)

    def end(self, miss: Miss) -> None:
        """Give up the rest of the chunk. The first reason counts; a whole chunk stays."""
        with self.changed:
            if not self.is_done:
                self.miss = miss
                self.level = None
                self.changed.notify_all()

    def record(self) -> ChunkRecord:
        """Return the record of a whole chunk."""
        assert self.header
        return ChunkRecord(self.key, self.header, self.segments.__getitem__, self.report, trusted=True)


class IncomingChunks:
    """Every chunk of one fetcher that is in transit, or here and in use. Fetches share them. Thread-safe."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.changed = threading.Condition()
        self._chunks: dict[ChunkKey, IncomingChunk] = {}
        self._failed: dict[ChunkKey, tuple[float, str]] = {}  # until when, and why
        self._now = now

    def find(self, key: ChunkKey) -> IncomingChunk | Miss | None:
        """Return the chunk for one more user, or why it is not read now, or None if it must be requested."""
        with self.changed:
            until, why = self._failed.get(key, (0.0, ""))
            if until > self._now():
                return Miss("corrupt", f"it was damaged when it was last read ({why})")
            chunk = self._chunks.get(key)
            if chunk is None or chunk.miss:
                return None
            chunk.users += 1
            return chunk

    def create(self, key: ChunkKey, sizes: Mapping[str, int]) -> IncomingChunk:
        """Add a chunk with one user, in place of one that was missed."""
        with self.changed:
            chunk = self._chunks[key] = IncomingChunk(key, sizes, self.changed)
            return chunk

    def release(self, chunk: IncomingChunk) -> bool:
        """Count one user less -> whether it was the last one."""
        with self.changed:
            chunk.users -= 1
            if chunk.users <= 0 and self._chunks.get(chunk.key) is chunk:
                del self._chunks[chunk.key]
            return chunk.users <= 0

    def has(self, chunk: IncomingChunk) -> bool:
        """Return whether this very chunk is not forgotten."""
        return self._chunks.get(chunk.key) is chunk

    def refuse(self, key: ChunkKey, why: str) -> None:
        """Do not read a damaged chunk for FAILED_S."""
        with self.changed:
            now = self._now()
            self._failed = {k: failed for k, failed in self._failed.items() if failed[0] > now}
            self._failed[key] = now + FAILED_S, why

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Forget chunks that were stored or deleted: the next fetch requests them again."""
        with self.changed:
            for key in keys:
                self._chunks.pop(key, None)
                self._failed.pop(key, None)

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def n_bytes(self) -> int:
        """Return the bytes that have arrived, of all chunks."""
        with self.changed:
            return sum(chunk.n_bytes for chunk in self._chunks.values())
