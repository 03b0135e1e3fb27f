"""What is known of link and decoding: what a choice of levels rests on, of a store, over its requests.

The link's rate leaves out the round trip, in which nothing can come: a small body that took mostly the way there and
back would say little of how fast a large one comes.

Decoding is measured before the first request, on the first layers of one chunk at every level, as a first request that
had to try levels out would be the worse for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from blendserve.store.clock import Clock
from blendserve.store.codecs.base import Tables
from blendserve.store.kdn.adapt import Meter
from blendserve.store.kdn.client import Client
from blendserve.store.kdn.download import beginning
from blendserve.store.key import ChunkKey
from blendserve.store.record import ChunkRecord
from blendserve.store.view import RecordView

LAYERS = 5  # that decoding is measured on; the first one, which is coded otherwise, is not counted
BESIDE = 1.2  # times what it takes alone: decoding beside a request that keeps all cores busy (research/decisions.md)


class Pace:
    """Safe to share between threads."""

    def __init__(self, clock: Clock = time) -> None:
        self.clock = clock
        self.last_bytes_per_s: float | None = None  # of the last chunk that came whole
        self.round_trip = 0.0  # seconds
        self._decoding: dict[str, float] = {}  # seconds a token, by level
        self._meter = Meter()
        self.n_bytes = 0  # that have arrived
        self._lock = threading.Lock()

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """From the question for a body on, to its end."""
        with self._lock:
            self._meter.begin(self.clock.monotonic(), self.round_trip)
        try:
            yield
        finally:
            with self._lock:
                self._meter.end(self.clock.monotonic())

    def arrived(self, n_bytes: int) -> None:
        with self._lock:
            self.n_bytes += n_bytes
            self._meter.arrived(n_bytes, self.clock.monotonic())

    def silence(self) -> None:
        """The link stood still: whatever was known of it is so no more."""
        with self._lock:
            self._meter.forget(self.clock.monotonic())

    def bytes_per_s(self) -> float | None:
        """Of the link, None while nothing is known of it."""
        with self._lock:
            return self._meter.bytes_per_s(self.clock.monotonic())

    def decoding(self, word: str) -> float:
        """Seconds a token; 0 where it was not measured."""
        return self._decoding.get(word, 0.0)

    def learn_decoding(
        self,
        client: Client,
        key: ChunkKey,
        sizes: Mapping[str, int],
        most: float,
        silence_s: float,
        tables: Tables,
    ) -> None:
        """By this chunk, at the levels that are not known yet. sizes: bytes of its body by each. most: bytes, coded or
        decoded; what is said to have more is not looked at.

        Raises CorruptRecord, StoreVersion, Undecodable, and what the client does.
        """
        for word, n_bytes in sizes.items():
            if word in self._decoding or n_bytes > most:
                continue
            header, segments = beginning(client, key, word, n_bytes, LAYERS, silence_s)
            if header.shape.n_bytes <= most:
                # twice, as what each layer of a codec's tables needs is made by its first chunk
                chunks = [
                    RecordView(ChunkRecord(key, header, segments.__getitem__, trusted=True), tables)
                    for _ in range(2)
                ]
                seconds = min(_seconds(chunk, len(segments), self.clock) for chunk in chunks)
                alone = seconds / max(1, header.shape.n_tokens)
                self._decoding[word] = BESIDE * alone / torch.get_num_threads()  # all cores have work


def _seconds(chunk: RecordView, layers: int, clock: Clock) -> float:
    """Of decoding all of it: the least that one of these layers took, times all layers."""
    elapsed_s = []
    for l in range(layers):
        began = clock.monotonic()
        chunk.layer(l)
        elapsed_s.append(clock.monotonic() - began)
    return min(elapsed_s[1:] or elapsed_s) * chunk.n_layers
