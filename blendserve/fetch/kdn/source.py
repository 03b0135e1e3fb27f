"""Chunks of a published collection, at the level that the fetcher chooses.

Description and directory of the collection are read at the start, and again when they are FRESH_S old. So a chunk that
the collection lacks costs no request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from blendserve.config import KdnConfig, StoreBackendConfig
from blendserve.errors import CorruptRecord, StoreError, StoreUnavailable, StoreVersion
from blendserve.fetch.incoming import ChunkRequest, IncomingChunk
from blendserve.fetch.kdn.client import CollectionClient, KdnPeer
from blendserve.fetch.kdn.files import MAX_CONNECTIONS, InvalidReply, NoFile
from blendserve.fetch.kdn.manifest import CHUNKS, MAX_TABLES_BYTES, TABLES, ChunkFile, Collection, Directory
from blendserve.fetch.link import LinkEstimator
from blendserve.store.base import Miss, ReadTime
from blendserve.store.blobs import BlobInfo, BlobReader
from blendserve.store.bounded import BoundedClient
from blendserve.store.clock import TimeSource
from blendserve.store.codecs.base import UNREACHABLE, Undecodable
from blendserve.store.key import ChunkKey
from blendserve.store.view import RecordView

AUTO = "auto"
FRESH_S = 10.0  # for which a description is used
PROBE_S = 0.02  # least seconds of transfer, without the round trip, that tell a rate
ROUND_TRIPS = 3  # the shortest counts, as a server may read the file from its disk first
WORKERS = 2  # transfers at a time: with more, less is left to plan again, to compute, and to decode ahead
SAMPLED = 256  # chunks, of which the one of median size is probed
DECODED_LAYERS = 5  # that decoding is measured on; the first, which is coded differently, does not count
BUSY = 1.2  # factor on the time of decoding alone, as a request keeps all cores busy (research/decisions.md)


class KdnSource:
    """A RemoteSource of one collection. It opens even if the server does not answer."""

    persistent = needs_folder = False
    batch_bytes = 0
    max_parallel = MAX_CONNECTIONS

    def __init__(
        self,
        config: KdnConfig,
        workers: int = WORKERS,
        link: LinkEstimator | None = None,
        clock: TimeSource = time,
    ) -> None:
        """link: an estimator that knows the link already. clock: of pauses, the deadline and the link's rate."""
        self.config = config
        self.workers = workers
        self.name = config.server
        self.deadline_s = config.deadline_s
        self.wanted_s = config.ttft_ms / 1e3
        self.in_flight_bytes = config.in_flight_mb * 1_000_000
        self.link = link or LinkEstimator(clock)
        self._clock = clock
        self.blobs: BlobReader = DeliveredBlobs(self)
        self._client = BoundedClient(KdnPeer(config), workers, clock)
        self._pool = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="blendserve-kdn")
        self._last: tuple[Collection, Directory] | None = None
        self._looked_s = float("-inf")
        self._looking = threading.Lock()

    @classmethod
    def from_config(cls, config: StoreBackendConfig, path: Path | None, read_only: bool) -> KdnSource:
        """Open a source. If the server cannot be reached, that is logged, and chunks are misses until it answers."""
        source = cls(config.kdn)
        with suppress(StoreUnavailable):  # the breaker has logged it
            source.known()
        return source

    # The collection

    def known(self) -> tuple[Collection, Directory]:
        """Return description and directory, without a request while they are fresh. Raises StoreUnavailable."""
        return self._fresh() or self._client.ask(self._look)

    def _fresh(self) -> tuple[Collection, Directory] | None:
        return self._last if self._clock.monotonic() - self._looked_s < FRESH_S else None

    def _look(self, client: CollectionClient) -> tuple[Collection, Directory]:
        """Return description and directory, read again unless fresh. Raises the client's errors."""
        with self._looking:
            if known := self._fresh():
                return known
            collection = client.description()
            last = self._last
            is_same = last is not None and last[0].directory == collection.directory
            directory = last[1] if last and is_same else client.directory(collection)
            self._last = collection, directory
            self._looked_s = self._clock.monotonic()
            return self._last

    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Return the chunks that the directory lists."""
        directory = self.known()[1]
        return {key for key in keys if key in directory}

    def sizes(self, requests: Sequence[ChunkRequest]) -> Mapping[ChunkKey, Mapping[str, int]]:
        """Return the sizes that the directory lists, at the levels that the settings allow. Raises StoreUnavailable."""
        collection, directory = self.known()
        allowed = [n for n, level in enumerate(collection.levels) if self.config.level in (AUTO, level)]
        if not allowed:
            raise StoreUnavailable(
                f"collection {collection.name!r} has no level {self.config.level!r}: set store.level to auto or "
                f"one of {', '.join(collection.levels)}"
            )
        found = {r.key: bodies for r in requests if (bodies := directory.get(r.key))}
        return {
            key: {collection.levels[n]: bodies[n].n_bytes for n in allowed} for key, bodies in found.items()
        }

    # Transfers

    def transfer(self, batch: Sequence[IncomingChunk]) -> None:
        """Read these chunks concurrently, each on its own connection, so that their layers arrive together."""
        start = self._clock.monotonic()
        sizes = {chunk: chunk.sizes[chunk.level] for chunk in batch if chunk.level is not None}
        if len(sizes) == 1:
            self._transfer_one(*sizes)
        else:
            list(self._pool.map(self._transfer_one, sizes))
        if sizes and all(chunk.is_whole for chunk in sizes):
            self.link.last_rate = sum(sizes.values()) / max(1e-9, self._clock.monotonic() - start)

    def _transfer_one(self, chunk: IncomingChunk) -> None:
        try:
            self._client.run(partial(self._read_chunk, chunk=chunk), reading=True)
        except StoreError as error:
            chunk.end(Miss(UNREACHABLE, error.public_message))

    def _read_chunk(self, client: CollectionClient, chunk: IncomingChunk) -> None:
        """Read one chunk. Errors of this chunk alone end the chunk; others of the client are raised."""
        if (level := chunk.level) is None:
            return
        if chunk.sizes[level] > self.in_flight_bytes:
            chunk.end(Miss(UNREACHABLE, "it is larger than one transfer may be"))
            return
        collection, directory = self._last or self._look(client)
        at_level = dict(zip(collection.levels, directory.get(chunk.key, ()), strict=False))
        body = at_level.get(level)
        if not body or body.n_bytes != chunk.sizes[level]:
            chunk.end(Miss(UNREACHABLE, "the collection was published anew meanwhile"))
            return
        try:
            client.read_chunk(chunk, body, self.link)
        except (CorruptRecord, StoreVersion) as error:
            chunk.end(Miss("corrupt", error.what if isinstance(error, CorruptRecord) else str(error)))
        except (NoFile, InvalidReply) as error:
            chunk.end(Miss("corrupt", f"its file cannot be read ({error})"))

    def interrupt(self, late: bool) -> str:
        return self._client.interrupt(late, reading=True).public_message

    def _read_blob(self, client: CollectionClient, hash: bytes) -> bytes | None:
        """Read codec tables; None for unknown ones. Raises the client's errors."""
        sizes = {tables.hash: tables.n_bytes for tables in self._look(client)[0].tables}
        if (name := hash.hex()) not in sizes:
            return None
        return client.get(TABLES, name, min(sizes[name], MAX_TABLES_BYTES))

    def close(self) -> None:
        self._client.close()
        self._pool.shutdown(wait=False)

    # Probes

    def probe(self, keys: Sequence[ChunkKey], n_bytes: int) -> ReadTime | None:
        """Time a typical chunk; None if the collection has none of these. The first probe measures decoding as well."""
        return self._client.ask(partial(self._probe, keys=keys, n_bytes=n_bytes))

    def _probe(self, client: CollectionClient, keys: Sequence[ChunkKey], n_bytes: int) -> ReadTime | None:
        """Time the chunk of median size. Raises the client's errors."""
        collection, directory = self._look(client)
        if not directory:
            return None
        few = sorted(islice(directory, SAMPLED), key=lambda key: directory[key][0].n_bytes)
        key = few[len(few) // 2]
        sample = self._time_link(client, directory[key][0], n_bytes)
        if self.config.level == AUTO:
            for level, body in [*zip(collection.levels, directory[key], strict=True)][1:]:
                with suppress(CorruptRecord, StoreVersion, Undecodable):  # raised again by a request
                    self._time_decoding(client, key, level, body)
        return sample if not keys or any(key in directory for key in keys) else None

    def _time_link(self, client: CollectionClient, body: ChunkFile, n_bytes: int) -> ReadTime:
        """Time at least this many bytes of a body, and more if they arrive too quickly to tell a rate."""

        def seconds_of(n_bytes: int) -> float:
            start = self._clock.monotonic()
            with client.files.open(f"{CHUNKS}/{body.hash.hex()}", 0, n_bytes, is_part=True) as file:
                file.read(n_bytes)
            return self._clock.monotonic() - start

        round_trip_s = min(seconds_of(1) for _ in range(ROUND_TRIPS))
        while True:
            n_bytes = max(1, min(n_bytes, body.n_bytes))
            seconds = seconds_of(n_bytes)
            if seconds - round_trip_s >= PROBE_S or n_bytes == body.n_bytes:
                return ReadTime(round_trip_s, seconds, n_bytes)
            n_bytes *= 2

    def _time_decoding(self, client: CollectionClient, key: ChunkKey, level: str, body: ChunkFile) -> None:
        """Time decoding the first layers of a chunk at a level, once per level, so that no request has to try it.

        Raises CorruptRecord, StoreVersion, Undecodable, and the client's errors.
        """
        if self.link.decode_s(level) or body.n_bytes > self.in_flight_bytes:
            return
        chunk = IncomingChunk(key, {level: body.n_bytes}, threading.Condition())
        chunk.start(level, on_layer=_stop)
        client.read_chunk(chunk, body, LinkEstimator())
        if (header := chunk.header) is None or header.shape.n_bytes > self.in_flight_bytes:
            return
        times_s = []
        for _ in range(2):  # the first time, the codec makes what each layer of its tables needs
            view = RecordView(chunk.record(), partial(self._read_blob, client))
            for l in range(len(chunk.segments)):
                start = self._clock.monotonic()
                view.layer(l)
                if l or len(chunk.segments) == 1:
                    times_s.append(self._clock.monotonic() - start)
        seconds = min(times_s) * header.shape.n_layers / torch.get_num_threads()
        self.link.record_decoding(level, BUSY * seconds, header.shape.n_tokens)


class DeliveredBlobs(BlobReader):
    """The tables of a collection."""

    def __init__(self, source: KdnSource) -> None:
        self._source = source

    def get(self, hash: bytes, seconds: float | None = None) -> bytes | None:
        return self._source._client.ask(partial(self._source._read_blob, hash=hash), seconds)

    def list(self) -> Sequence[BlobInfo]:
        tables = self._source.known()[0].tables
        return [BlobInfo(bytes.fromhex(t.hash), t.codec, t.fingerprint, t.n_bytes, 0) for t in tables]


def _stop(chunk: IncomingChunk) -> None:
    """Stop after the first layers."""
    if len(chunk.segments) >= DECODED_LAYERS:
        chunk.level = None
