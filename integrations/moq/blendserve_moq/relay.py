"""Collections over MoQ: a relay, and a publisher that sends each chunk to it once (docs/reference/moq.md).

    engines --fetch track--> relay --if it has none--> publisher --> the store
            <-- frames ----        <-- frames -------

"MoQ" is what the package moq-rs speaks; conformance to a draft is not claimed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import moq

from blendserve.errors import StoreError
from blendserve.fetch.kdn.manifest import encode_body
from blendserve.kdn.catalog import CollectionCatalog
from blendserve.store import KVStore, read_record
from blendserve_moq.source import GROUP, broadcast_of

MAX_TRACKS = 64  # that are kept open after their last frame
POLL_S = 5.0  # between two looks for published or unpublished collections
NOT_FOUND = 404


@asynccontextmanager
async def relay(bind: str, cache_bytes: int | None = None) -> AsyncIterator[Any]:
    """A relay, with `local_addr` and `cert_fingerprints()`. bind: HOST:PORT; port 0 for any.

    Its certificate is self-signed: engines need the fingerprint.
    """
    origin = moq.OriginProducer(cache_capacity_bytes=cache_bytes)
    async with moq.Server(bind, tls_generate=["localhost"], publish=origin, subscribe=origin) as server:
        serving = asyncio.create_task(_serve(server))
        try:
            yield server
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


class Publisher:
    """Publishes a store's collections on a relay."""

    def __init__(self, store: KVStore, url: str, fingerprint: str = "") -> None:
        """fingerprint: of the relay's certificate, in hex."""
        self._store, self._catalog = store, CollectionCatalog(store)
        self._url = url
        self._fingerprints = [fingerprint] if fingerprint else None
        self.sent = 0  # bytes of frames, to the relay
        self._tracks = deque[Any](maxlen=MAX_TRACKS)

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Publish until it is cancelled. ready: called when all collections are announced."""
        origin, serving = moq.OriginProducer(), dict[str, tuple[Any, asyncio.Task[None]]]()
        async with AsyncExitStack() as stack:
            client = moq.Client(
                self._url, tls_fingerprints=self._fingerprints, publish=origin, websocket_enabled=False
            )
            await stack.enter_async_context(client)
            try:
                while True:
                    await self._announce(origin, serving)
                    ready()
                    await asyncio.sleep(POLL_S)
            finally:
                for _, task in serving.values():
                    task.cancel()

    async def _announce(self, origin: Any, serving: dict[str, tuple[Any, asyncio.Task[None]]]) -> None:
        """Announce new collections, unannounce unpublished ones."""
        found = await asyncio.to_thread(self._catalog.collections)
        paths = {broadcast_of(collection): name for name, collection in found.items()}
        for path in serving.keys() - paths.keys():
            broadcast, task = serving.pop(path)
            task.cancel()
            broadcast.unannounce()
        for path in paths.keys() - serving.keys():
            broadcast = origin.create_broadcast(path)
            requests = broadcast.dynamic()  # before the first request can come
            serving[path] = broadcast, asyncio.create_task(self._answer(requests, paths[path]))
            broadcast.announce()

    async def _answer(self, requests: Any, name: str) -> None:
        """Send each requested track."""
        async for request in requests:
            frames = await asyncio.to_thread(self.frames, name, request.name)
            if frames is None:
                request.abort(NOT_FOUND)
                continue
            track = request.accept()
            self._tracks.append(track)
            group = track.create_group(GROUP)
            for frame in frames:
                group.write_frame(frame)
                self.sent += len(frame)
            group.finish()

    def frames(self, name: str, track: str) -> list[bytes] | None:
        """Header, then the segment of each layer; None for a chunk that the collection does not have."""
        key_hex, _, level = track.partition("@")
        with suppress(StoreError):
            collection = self._catalog.collections().get(name)
            keys = self._catalog.chunk_keys(collection, key_hex, level) if collection else None
            if keys and (record := read_record(self._store, keys[1])):
                return [bytes(part) for part in encode_body(keys[0], record)[1:]]
        return None


async def _serve(server: Any) -> None:
    """Accept every session until it ends."""
    sessions: set[asyncio.Task[None]] = set()

    async def one(request: Any) -> None:
        with suppress(Exception):  # the session has ended
            session = await request.accept()
            await session.closed()

    try:
        async for request in server:
            task = asyncio.create_task(one(request))
            sessions.add(task)
            task.add_done_callback(sessions.discard)
    finally:
        for task in sessions:
            task.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)
