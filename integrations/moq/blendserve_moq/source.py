"""The store kind `moq`: chunks from a MoQ relay, which the publisher sends each chunk to once (relay.py).

    moq+https://HOST/NAME?relay=https://RELAY:4443&fingerprint=SHA256     as store.remote.location

A chunk that the relay does not deliver is requested from the server of the files. After a failure the relay is not used
for some seconds. Every frame is checked like a segment of any record.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as Late
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import moq

from blendserve.config import COLLECTION, KdnConfig, StoreBackendConfig
from blendserve.errors import ConfigError, CorruptRecord, StoreUnavailable
from blendserve.fetch.incoming import IncomingChunk
from blendserve.fetch.kdn.manifest import LENGTH, MAX_HEADER_BYTES, ChunkFile, Collection
from blendserve.fetch.kdn.source import KdnSource
from blendserve.store import record
from blendserve.store.codecs.base import Buffer, tables_hash
from blendserve.store.record import Header

REST_S = 5.0
RETRY_S = (0.002, 0.02, 0.1)  # pauses before a missing track is requested again
GROUP = 0  # a chunk never changes: its track has one group
RELAY_SHARE = 0.5  # of the patience; the rest is for the server

log = logging.getLogger(__name__)


class MoqSource(KdnSource):
    """Chunks of a collection from a relay, else from the server of its files. A relay brings one chunk at a time.

    A thread of its own subscribes to the relay.
    """

    max_parallel = 1

    def __init__(self, config: KdnConfig, relay: str = "", fingerprint: str = "", **options: Any) -> None:
        """relay: its URL. fingerprint: of its certificate, SHA-256 in hex; without it, an authority has signed it."""
        super().__init__(config, **options)
        self._url = relay
        self._fingerprints = [fingerprint] if fingerprint else None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="blendserve-moq", daemon=True)
        self._thread.start()
        self._connecting = asyncio.Lock()
        self._session: tuple[AsyncExitStack, Any] | None = None
        self._rest_until = 0.0

    @classmethod
    def from_config(cls, config: StoreBackendConfig, path: Path | None, read_only: bool) -> MoqSource:
        """A server or relay that cannot be reached is logged, and no error. Raises ConfigError without a relay."""
        service, _, query = config.location.removeprefix("moq+").partition("?")
        options = {name: values[-1] for name, values in parse_qs(query).items()}
        if "relay" not in options or options.keys() - {"relay", "fingerprint"}:
            raise ConfigError(
                f"location {config.location!r} names no relay: write moq+{service}?relay=https://HOST:4443&fingerprint=F",
                setting="store.remote.location",
            )
        source = cls(config.replace("location", f"{COLLECTION}{service}").kdn, **options)
        with suppress(StoreUnavailable):  # the breaker has logged it
            source.known()
        return source

    def transfer(self, batch: Sequence[IncomingChunk]) -> None:
        for chunk in batch:
            if chunk.level is not None and time.monotonic() >= self._rest_until:
                with suppress(StoreUnavailable), self.link.transfer():
                    self._read_from_relay(chunk)
            if not chunk.is_done:
                super().transfer([chunk])

    def _read_from_relay(self, chunk: IncomingChunk) -> None:
        """Read a chunk at its level; it stays as it is if it does not come whole in a part of the patience."""
        collection, directory = self.known()
        bodies = dict(zip(collection.levels, directory.get(chunk.key, ()), strict=False))
        if (body := bodies.get(chunk.level or "")) is None:
            return
        job = asyncio.run_coroutine_threadsafe(self._read(broadcast_of(collection), chunk, body), self._loop)
        try:
            header, segments = job.result(RELAY_SHARE * min(chunk.patience_s, self.deadline_s))
        except (Exception, Late) as error:
            job.cancel()
            self._rest_until = time.monotonic() + REST_S
            why = getattr(error, "details", None) or repr(error)
            log.warning("the MoQ relay at %s is not used for %g s: %s", self._url, REST_S, why)
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            return
        chunk.begin(header)
        for segment in segments:
            chunk.add(segment)

    def close(self) -> None:
        """Idempotent."""
        super().close()
        if not self._loop.is_closed():
            with suppress(Exception, Late):
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(1.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _read(
        self, broadcast: str, chunk: IncomingChunk, body: ChunkFile
    ) -> tuple[Header, list[Buffer]]:
        """A chunk at its level. Raises what the library does, CorruptRecord, StoreVersion, ValueError."""
        key = chunk.key
        level = chunk.level or ""
        n_bytes = chunk.sizes[level]
        origin = await self._connected()
        consumer = await origin.consume().announced_broadcast(broadcast).available()
        group, first = await self._first_frame(
            consumer, f"{key.hex()}@{level}", min(MAX_HEADER_BYTES, n_bytes)
        )
        self.link.arrived(len(first))
        header = record.decode_header(key, first)
        if header.n_bytes > n_bytes:
            raise CorruptRecord(key, f"its header says {header.n_bytes:,} bytes")
        segments: list[Buffer] = []
        for l, length in enumerate(header.lengths):
            segments.append(record.check_segment(key, header, l, await _frame(group, length)))
            self.link.arrived(length)
        if tables_hash(b"".join([LENGTH.pack(len(first)), first, *segments])) != body.hash:
            raise CorruptRecord(key, "its bytes are not those that were published")
        return header, segments

    async def _first_frame(self, consumer: Any, track: str, most: int) -> tuple[Any, bytes]:
        """A chunk's group, and its first frame. A track that is published on demand exists before its group."""
        pauses_s = iter(RETRY_S)
        while True:
            try:
                group = await consumer.fetch_group(track, GROUP)
                return group, await _frame(group, most)
            except moq.Error as error:
                kind = getattr(getattr(error, "details", None), "kind", None)
                if kind != moq.ProtocolKind.NOT_FOUND or (pause_s := next(pauses_s, None)) is None:
                    raise
            await asyncio.sleep(pause_s)

    async def _connected(self) -> Any:
        """The origin with the relay's broadcasts."""
        async with self._connecting:
            if self._session is None:
                stack, origin = AsyncExitStack(), moq.OriginProducer()
                client = moq.Client(
                    self._url, tls_fingerprints=self._fingerprints, subscribe=origin, websocket_enabled=False
                )
                await stack.enter_async_context(client)
                self._session = stack, origin
            return self._session[1]

    async def _end(self) -> None:
        session, self._session = self._session, None
        if session:
            with suppress(Exception):
                await session[0].aclose()


async def _frame(group: Any, most: int) -> bytes:
    """One frame. Raises ValueError if it is missing, or too large."""
    frame = await group.read_frame()
    if frame is None or len(frame.payload) > most:
        raise ValueError("a frame is missing, or too large")
    return bytes(frame.payload)


def broadcast_of(collection: Collection) -> str:
    """The path of a collection's broadcast: reader, namespace, name."""
    return f"blendserve/{collection.reader_fingerprint[:16]}/{collection.namespace}/{collection.name}"
