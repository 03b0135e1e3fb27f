"""Chunks of a published collection from a delivery service over HTTP, at the level that the fetcher chooses.

The description and the directory of the collection are read when it opens and now and then anew. So a chunk that the
collection lacks costs no request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from blendserve.config import KdnConfig, StoreBackendConfig
from blendserve.errors import CorruptRecord, StoreError, StoreUnavailable, StoreVersion
from blendserve.fetch.incoming import ChunkRequest, IncomingChunk
from blendserve.fetch.kdn.client import CUT, DeliveryClient, InvalidReply, KdnPeer, NotFoundReply, read_chunks
from blendserve.fetch.kdn.manifest import (
    MAX_DIRECTORY_BYTES,
    MAX_INTERLEAVED,
    MAX_TABLES_BYTES,
    Collection,
    Directory,
    read_directory,
)
from blendserve.fetch.link import LinkEstimator
from blendserve.store.base import Miss, ReadTime
from blendserve.store.blobs import BlobInfo, BlobReader, check_blob
from blendserve.store.bounded import BoundedClient
from blendserve.store.clock import TimeSource
from blendserve.store.codecs.base import UNREACHABLE, Undecodable
from blendserve.store.key import ChunkKey
from blendserve.store.view import RecordView

AUTO = "auto"
FRESH_S = 10.0  # a description is used for this time
MAX_DESCRIPTION = 16 << 20  # bytes
PROBE_S = 0.02  # of transfer, beside the round trip, that tell a rate
ROUND_TRIPS = 3  # the shortest counts: a service may have to read what it is asked for first
WORKERS = 2  # transfers at a time: with more, less is left to plan again, to compute, and to decode ahead
DECODED_LAYERS = 5  # that decoding is measured on; the first one, which is coded otherwise, is not counted
BUSY = 1.2  # times what decoding takes alone: a request keeps all cores busy (research/decisions.md)


class KdnSource:
    """A RemoteSource of one collection; it opens whether the service answers or not."""

    persistent = needs_folder = False
    batch_bytes, max_interleaved = 0, MAX_INTERLEAVED

    def __init__(
        self,
        config: KdnConfig,
        workers: int = WORKERS,
        link: LinkEstimator | None = None,
        clock: TimeSource = time,
    ) -> None:
        """link: what is known of the link already. clock: of pauses, of the deadline and of the link's rate."""
        self.config, self.workers = config, workers
        self.name, self.deadline_s, self.wanted_s = config.server, config.deadline_s, config.ttft_ms / 1e3
        self.in_flight_bytes = config.in_flight_mb * 1_000_000
        self.link = link or LinkEstimator(clock)
        self._clock = clock
        self.blobs: BlobReader = DeliveredBlobs(self)
        self._client = BoundedClient(KdnPeer(config), workers, clock)
        self._last: tuple[Collection, Directory] | None = None
        self._looked_s = float("-inf")
        self._looking = threading.Lock()

    @classmethod
    def from_config(cls, config: StoreBackendConfig, path: Path | None, read_only: bool) -> KdnSource:
        """A service that cannot be reached is logged, and no error: chunks count as missing until it answers."""
        source = cls(config.kdn)
        with suppress(StoreUnavailable):  # the breaker has logged it
            source.known()
        return source

    # The collection

    def known(self) -> tuple[Collection, Directory]:
        """Description and directory, without a call while they are fresh. Raises StoreUnavailable."""
        return self._fresh() or self._client.ask(self._look)

    def _fresh(self) -> tuple[Collection, Directory] | None:
        return self._last if self._clock.monotonic() - self._looked_s < FRESH_S else None

    def _look(self, client: DeliveryClient) -> tuple[Collection, Directory]:
        """Read anew unless fresh. Raises what the client does."""
        with self._looking:
            known = self._fresh()
            if known is None:
                known = self._last = _read(client, self._last)
                self._looked_s = self._clock.monotonic()
            return known

    def contains(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Return the chunks that the directory lists."""
        return set(keys) & self.known()[1].keys()

    def sizes(self, requests: Sequence[ChunkRequest]) -> Mapping[ChunkKey, Mapping[str, int]]:
        """Return the sizes that the directory lists, at the levels that the settings allow. Raises StoreUnavailable."""
        collection, directory = self.known()
        allowed = [n for n, level in enumerate(collection.levels) if self.config.level in (AUTO, level)]
        if not allowed:
            raise StoreUnavailable(
                f"collection {collection.name!r} has no level {self.config.level!r}: set store.level to auto or "
                f"one of {', '.join(collection.levels)}"
            )
        found = {r.key: entry.bodies for r in requests if (entry := directory.get(r.key))}
        return {key: {collection.levels[n]: bodies[n] for n in allowed} for key, bodies in found.items()}

    # Transfers

    def transfer(self, batch: Sequence[IncomingChunk]) -> None:
        batch = [chunk for chunk in batch if chunk.level is not None]
        try:
            if batch:
                self._client.run(partial(self._transfer, batch=batch), reading=True)
        except StoreError as error:
            for chunk in batch:
                chunk.end(Miss(UNREACHABLE, error.public_message))

    def _transfer(self, client: DeliveryClient, batch: Sequence[IncomingChunk]) -> None:
        """Raises what the client does."""
        start = self._clock.monotonic()
        n_bytes = sum(chunk.sizes[chunk.level or ""] for chunk in batch)
        if n_bytes > self.in_flight_bytes:
            for chunk in batch:
                chunk.end(Miss(UNREACHABLE, "it is larger than one transfer may be"))
            return
        try:
            read_chunks(client, batch, self.link, self.deadline_s)
        except (CorruptRecord, StoreVersion, NotFoundReply, *CUT) as error:
            if len(batch) > 1:
                return  # each is asked for alone, which tells what is wrong with it
            if not isinstance(error, StoreError):
                raise
            batch[0].end(Miss("corrupt", error.what if isinstance(error, CorruptRecord) else str(error)))
        if all(chunk.is_whole for chunk in batch):
            self.link.last_rate = n_bytes / max(1e-9, self._clock.monotonic() - start)

    def interrupt(self, late: bool) -> str:
        return self._client.interrupt(late, reading=True).public_message

    def _read_blob(self, client: DeliveryClient, hash: bytes) -> bytes | None:
        """Raises CorruptBlob, and what the client does."""
        sizes = {tables.hash: tables.n_bytes for tables in self._look(client)[0].tables}
        if (name := hash.hex()) not in sizes:
            return None
        return check_blob(hash, client.get(client.path("tables", name), min(sizes[name], MAX_TABLES_BYTES)))

    def close(self) -> None:
        self._client.close()

    # Probes

    def probe(self, keys: Sequence[ChunkKey], n_bytes: int) -> ReadTime | None:
        """Time a typical chunk; None if the collection has none of these. The first probe measures decoding as well."""
        return self._client.ask(partial(self._probe, keys=keys, n_bytes=n_bytes))

    def _probe(self, client: DeliveryClient, keys: Sequence[ChunkKey], n_bytes: int) -> ReadTime | None:
        """Raises what the client does."""
        collection, directory = self._look(client)
        if not directory:
            return None
        key = sorted(directory, key=lambda key: directory[key].n_tokens)[len(directory) // 2]
        sample = self._time_link(client.path("chunks", key.hex()), client, directory[key].bodies[0], n_bytes)
        if self.config.level == AUTO:
            for level, body in [*zip(collection.levels, directory[key].bodies, strict=True)][1:]:
                with suppress(CorruptRecord, StoreVersion, Undecodable):  # raised again by a request
                    self._time_decoding(client, key, level, body)
        return sample if not keys or any(key in directory for key in keys) else None

    def _time_link(self, path: str, client: DeliveryClient, body: int, n_bytes: int) -> ReadTime:
        """Time at least this number of bytes of a body, and more if they come too quickly to tell a rate."""
        now, round_trips_s = self._clock.monotonic, []
        for _ in range(ROUND_TRIPS):
            start = now()
            client.get(path, body, {"Range": "bytes=0-0"})
            round_trips_s.append(now() - start)
        while True:
            n_bytes = max(1, min(n_bytes, body))
            start = now()
            with client.request(path, {"Range": f"bytes=0-{n_bytes - 1}"}) as reply:
                reply.read(n_bytes)
            seconds = now() - start
            if seconds - min(round_trips_s) >= PROBE_S or n_bytes == body:
                return ReadTime(min(round_trips_s), seconds, n_bytes)
            n_bytes *= 2

    def _time_decoding(self, client: DeliveryClient, key: ChunkKey, level: str, n_bytes: int) -> None:
        """Decode the first layers of a chunk at a level, unless that was measured: no request has to try levels.

        Raises CorruptRecord, StoreVersion, Undecodable, and what the client does.
        """
        if self.link.decode_s(level) or n_bytes > self.in_flight_bytes:
            return
        chunk = IncomingChunk(key, {level: n_bytes}, threading.Condition(), on_layer=_stop)
        chunk.start(level)
        read_chunks(client, [chunk], LinkEstimator(), self.deadline_s)
        if (header := chunk.header) is None or header.shape.n_bytes > self.in_flight_bytes:
            return
        times_s = []
        for _ in range(2):  # the first time, the codec makes what each layer of its tables needs
            view = RecordView(chunk.record(), partial(self._read_blob, client))
            for l in range(len(chunk.segments)):
                start = self._clock.monotonic()
                view.layer(l)
                times_s += [self._clock.monotonic() - start] if l or len(chunk.segments) == 1 else []
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
    """Read the first layers alone."""
    if len(chunk.segments) >= DECODED_LAYERS:
        chunk.level = None


def _read(client: DeliveryClient, known: tuple[Collection, Directory] | None) -> tuple[Collection, Directory]:
    """The description, and the directory if it has changed. Raises what the client does."""
    try:
        collection = Collection.from_json(client.get(client.path(), MAX_DESCRIPTION))
        if known and known[0].directory == collection.directory:
            return collection, known[1]
        raw = client.get(client.path("directory"), min(collection.directory.n_bytes, MAX_DIRECTORY_BYTES))
        return collection, read_directory(raw, len(collection.levels))
    except (NotFoundReply, OSError):  # one of TLS is a ValueError as well
        raise
    except ValueError as error:
        raise InvalidReply(str(error)) from error
