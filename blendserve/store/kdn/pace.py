"""What is known of link, decoding and computing: what a choice of levels rests on, of a store, over its requests.

The link's rate leaves out the round trip, in which nothing can come: a small body that took mostly the way there and
back would say little of how fast a large one comes.

Decoding is measured before the first request, on the first layers of one chunk at every level, as a first request that
had to try levels out would be the worse for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from blendserve.errors import CorruptRecord
from blendserve.store.chunk import StoredChunk
from blendserve.store.codecs.base import Tables
from blendserve.store.kdn.adapt import Meter
from blendserve.store.kdn.client import Client
from blendserve.store.kdn.collection import LENGTH, MOST_HEADER
from blendserve.store.key import ChunkKey
from blendserve.store.record import decode_header

LAYERS = 5  # that decoding is measured on; the first one, which is coded otherwise, is not counted
BESIDE = 1.3  # times what it takes alone: decoding beside a request that keeps all cores busy
HEAD_BYTES = 1 << 16  # most headers, and more
SILENT = 1.0  # bytes a second


class Pace:
    """Safe to share between threads."""

    def __init__(self) -> None:
        self.computing: float | None = None  # seconds a token
        self.last_bytes_per_s: float | None = None  # of the last chunk that came whole
        self.round_trip = 0.0  # seconds
        self._decoding: dict[str, float] = {}  # seconds a token, by level
        self._meter = Meter()
        self._silent = False
        self.n_bytes = 0  # that have arrived
        self._lock = threading.Lock()

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """From the question for a body on, to its end."""
        with self._lock:
            self._meter.begin(time.monotonic(), self.round_trip)
        try:
            yield
        finally:
            with self._lock:
                self._meter.end(time.monotonic())

    def arrived(self, n_bytes: int) -> None:
        with self._lock:
            self._silent = False
            self.n_bytes += n_bytes
            self._meter.arrived(n_bytes, time.monotonic())

    def silence(self) -> None:
        """The link counts as dead until something arrives."""
        with self._lock:
            self._silent = True

    def bytes_per_s(self) -> float | None:
        """Of the link, None while nothing is known of it."""
        with self._lock:
            return SILENT if self._silent else self._meter.bytes_per_s(time.monotonic())

    def decoding(self, word: str) -> float:
        """Seconds a token; 0 where it was not measured."""
        return self._decoding.get(word, 0.0)

    def learn_decoding(self, client: Client, key: ChunkKey, words: Sequence[str], tables: Tables) -> None:
        """By this chunk, at the levels that are not known yet. Raises what the client does, StoreError, Undecodable."""
        for word in words:
            if word not in self._decoding:
                self._decoding[word] = BESIDE * _decoding(client, key, word, tables)


def _decoding(client: Client, key: ChunkKey, word: str, tables: Tables) -> float:
    """Seconds a token: the least that a layer took, times the layers."""
    path, head = f"{client.path('chunks', key.hex())}?level={word}", b""

    def have(end: int) -> None:
        nonlocal head
        if end > len(head):
            head += client.get(path, end - len(head), {"Range": f"bytes={len(head)}-{end - 1}"})

    have(HEAD_BYTES)
    if len(head) < LENGTH.size:
        raise CorruptRecord(key, f"its body has {len(head)} bytes")
    length = LENGTH.unpack_from(head)[0]
    if length > MOST_HEADER:
        raise CorruptRecord(key, f"its header is said to have {length:,} bytes")
    start = LENGTH.size + length
    have(start)
    header = decode_header(key, head[LENGTH.size : start])
    some = min(LAYERS, len(header.lengths))
    have(start + sum(header.lengths[:some]))
    segments = []
    for length in header.lengths[:some]:
        segments.append(head[start : start + length])
        start += length
    chunk, took = StoredChunk(key, header, segments.__getitem__, tables), []
    for l in range(some):
        began = time.perf_counter()
        chunk.layer(l)
        took.append(time.perf_counter() - began)
    return min(took[1:] or took) * chunk.n_layers / max(1, chunk.n_tokens)
