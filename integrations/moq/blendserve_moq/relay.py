"""Collections over MoQ: a relay, and a publisher that sends each chunk to it once (docs/reference/moq.md).

    engines --fetch track--> relay --if it has none--> publisher --> the published files
            <-- frames ----        <-- frames -------

"MoQ" is what the package moq-rs speaks; conformance to a draft is not claimed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import moq

from blendserve.config import KdnConfig
from blendserve.errors import StoreError
from blendserve.fetch.kdn.client import KdnPeer
from blendserve.fetch.kdn.manifest import CHUNKS, LENGTH
from blendserve.fetch.kdn.source import KdnSource
from blendserve.store.bounded import BoundedClient
from blendserve.store.record import decode_header
from blendserve_moq.source import GROUP, broadcast_of

MAX_TRACKS = 64  # that are kept open after their last frame
POLL_S = 5.0  # between two looks at the description
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
    """Publishes a collection on a relay."""

    def __init__(self, config: KdnConfig, url: str, fingerprint: str = "") -> None:
        """config: where its files are. fingerprint: of the relay's certificate, in hex."""
        self._source, self._client = KdnSource(config), BoundedClient(KdnPeer(config))
        self._url = url
        self._fingerprints = [fingerprint] if fingerprint else None
        self.sent = 0  # bytes of frames, to the relay
        self._tracks = deque[Any](maxlen=MAX_TRACKS)

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Publish until it is cancelled. ready: called when the collection is announced. Raises StoreUnavailable."""
        origin, path = moq.OriginProducer(), ""
        async with AsyncExitStack() as stack:
            client = moq.Client(
                self._url, tls_fingerprints=self._fingerprints, publish=origin, websocket_enabled=False
            )
            await stack.enter_async_context(client)
            while True:
                collection, _ = await asyncio.to_thread(self._source.known)
                if path != broadcast_of(collection):  # of another model than before
                    path = broadcast_of(collection)
                    broadcast = origin.create_broadcast(path)
                    requests = broadcast.dynamic()  # before the first request can come
                    stack.enter_context(_running(self._answer(requests)))
                    broadcast.announce()
                ready()
                await asyncio.sleep(POLL_S)

    async def _answer(self, requests: Any) -> None:
        """Send each requested track."""
        async for request in requests:
            frames = await asyncio.to_thread(self.frames, request.name)
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

    def frames(self, track: str) -> list[bytes] | None:
        """Header, then the segment of each layer; None for a chunk that the collection does not have."""
        key_hex, _, level = track.partition("@")
        with suppress(StoreError, ValueError):
            key, (collection, directory) = bytes.fromhex(key_hex), self._source.known()
            bodies = dict(zip(collection.levels, directory.get(key, ()), strict=False))
            if body := bodies.get(level):
                raw = self._client.run(lambda client: client.get(CHUNKS, body.hash.hex(), body.n_bytes))
                at = LENGTH.size + LENGTH.unpack_from(raw)[0]
                frames = [raw[LENGTH.size : at]]
                for n_bytes in decode_header(key, frames[0]).lengths:
                    frames.append(raw[at : at + n_bytes])
                    at += n_bytes
                return frames
        return None


@contextmanager
def _running(work: Coroutine[Any, Any, None]) -> Iterator[None]:
    """A task that is cancelled at the end of the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()


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
