"""`blendserve collection serve`: GET /v1/collections/... delivers the index of a collection and the KV of its chunks.

All state is in the store: any number of services on one store deliver the same. Bodies of chunks, tables and parts of
an index never change under their names. Each has an ETag and supports Range requests (RFC 9110, section 14), so that
a client can resume a transfer.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from blendserve.config import Config, DeliverConfig
from blendserve.engine.fair_executor import FairExecutor
from blendserve.errors import BodyTooSlow, InputError, NotFound, PermissionDenied, RateLimited
from blendserve.fetch import open_store
from blendserve.fetch.kdn.manifest import MAX_INTERLEAVED, Collection, encode_body, interleave
from blendserve.kdn.catalog import CollectionCatalog, summary
from blendserve.kdn.publish import set_pins, unpublish
from blendserve.machine import fit
from blendserve.serve.app import create_app
from blendserve.serve.auth import ServiceBackend, TenantDep, backend_of
from blendserve.serve.keys import Tenant, TokenBucket
from blendserve.serve.metrics import HttpMetrics
from blendserve.serve.server import check_http, listen
from blendserve.store import ChunkKey, KVStore, read_record
from blendserve.store.clock import TimeSource
from blendserve.store.codecs.base import Buffer

SEND_BYTES = 1 << 18  # sent at a time
MEMORY = 256_000_000  # bytes of bodies that were sent
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


@dataclass(frozen=True, slots=True)
class CachedBody:
    """A body in memory, and its version."""

    parts: list[Buffer]
    etag: str

    @property
    def n_bytes(self) -> int:
        return sum(map(len, self.parts))


Handler = TypeVar("Handler", bound=Callable[..., Any])


class DeliveryMetrics(HttpMetrics):
    """The metrics of a delivery service."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks = self.counter("delivered_chunks", "Requested chunks, by source", "source")
        self.bytes = self.counter("delivered_bytes", "Size of sent bodies")


class DeliveryBackend(ServiceBackend):
    """The collections of a store, as the routes read them. Methods that read the store are for its executor's thread.

    The store is its opener's to close.
    """

    http: DeliverConfig
    metrics: DeliveryMetrics

    def __init__(self, store: KVStore, config: DeliverConfig, clock: TimeSource = time) -> None:
        """clock: of how long the catalog's entries are fresh."""
        super().__init__(config, DeliveryMetrics())
        self.catalog = CollectionCatalog(store, now=clock.monotonic)
        self.executor = FairExecutor("delivery", config.max_concurrent)
        self._sent_mb = TokenBucket()
        self._memory_bytes = fit(MEMORY)
        self._bodies = OrderedDict[tuple[ChunkKey, ChunkKey], CachedBody]()  # least recently used first
        self._cached_bytes = 0

    def close(self) -> None:
        """End the thread."""
        self.executor.stop()

    def collections(self, tenant: Tenant) -> list[Collection]:
        """The collections that a tenant may use. Raises StoreError."""
        return [
            c
            for name, c in self.catalog.collections().items()
            if tenant.may_use(name) and tenant.tags is None
        ]

    def collection(self, tenant: Tenant, name: str) -> Collection:
        """Raises NotFound: the same error after the same work, whether it is missing or hidden from this key."""
        found, allowed = self.catalog.collections().get(name), tenant.may_use(name) and tenant.tags is None
        if found is None or not allowed:
            raise not_found()
        return found

    def directory(self, tenant: Tenant, name: str) -> CachedBody:
        """The table of a collection's chunks."""
        blob = self.collection(tenant, name).directory
        return CachedBody([self.catalog.piece(hash) for hash in blob.pieces], f'"{blob.version}"')

    def piece(self, tenant: Tenant, name: str, hash: str) -> CachedBody:
        """A part of the index, or codec tables, that belong to this collection."""
        found = self.collection(tenant, name)
        if hash not in found.pieces | {tables.hash for tables in found.tables}:
            raise not_found()
        return CachedBody([self.catalog.piece(hash)], f'"{hash}"')

    def chunk(self, tenant: Tenant, name: str, key_hex: str, level: str) -> CachedBody:
        """A chunk's body at a level, "" for the first. Raises NotFound, CorruptRecord and other StoreErrors."""
        collection = self.collection(tenant, name)
        keys = self.catalog.chunk_keys(collection, key_hex, level or collection.levels[0])
        if keys is None:
            raise not_found()
        key, stored_key = keys
        body = self._bodies.pop(keys, None)
        record = None if body else read_record(self.catalog.store, stored_key)
        self.metrics.chunks.labels("memory" if body else "store" if record else "missing").inc()
        if record:
            parts = encode_body(key, record)
            # The header ends with its own checksum, which covers key, coding, and every segment's length and checksum.
            body = CachedBody(parts, f'"{bytes(parts[1][-8:]).hex()}"')
        if body is None:
            raise not_found()
        self._bodies[keys] = body  # now the last one to be evicted
        self._cached_bytes += body.n_bytes if record else 0
        while self._cached_bytes > self._memory_bytes:
            self._cached_bytes -= self._bodies.popitem(last=False)[1].n_bytes
        return body

    def layers(self, tenant: Tenant, name: str, chunks: str) -> CachedBody:
        """Chunks, KEY:LEVEL each, interleaved by layer. Raises InputError for too many, NotFound, StoreErrors."""
        names = chunks.split(",")
        if len(names) > MAX_INTERLEAVED:
            raise InputError(f"a request returns 1 to {MAX_INTERLEAVED} chunks, not {len(names)}")
        bodies = [self.chunk(tenant, name, *one.partition(":")[::2]) for one in names]
        etag = blake2b("".join(one.etag for one in bodies).encode(), digest_size=8).hexdigest()
        return CachedBody(interleave([one.parts for one in bodies]), f'"{etag}"')

    def take_bytes(self, tenant: Tenant, n_bytes: int) -> None:
        """Count bytes to send. Raises RateLimited if the tenant's quota is used up; the last body may exceed it."""
        self.metrics.bytes.inc(n_bytes)
        if limit := self.http.mb_per_minute:
            if wait_s := self._sent_mb.wait_s(tenant.name, limit, limit / 60):
                raise RateLimited(f"transfer limit of {limit:g} MB per minute", math.ceil(wait_s))
            self._sent_mb.use(tenant.name, n_bytes / 1e6, limit / 60)


def not_found() -> NotFound:
    """One error for everything that is missing or hidden from a key."""
    return NotFound("not found, or not accessible with this API key")


# Routes

router = APIRouter(prefix="/v1", tags=["delivery"])
BackendDep = Annotated[DeliveryBackend, Depends(backend_of)]
LevelArg = Annotated[
    str, Query(max_length=32, description="One of the collection's levels. [default: the first]")
]
ChunksArg = Annotated[
    str, Query(max_length=1 << 13, description="KEY:LEVEL of each chunk, separated by commas.")
]
DeleteArg = Annotated[bool, Query(description="Whether to delete the chunks that no other collection has.")]


def get_and_head(path: str) -> Callable[[Handler], Handler]:
    """Routes of both methods; each has its own operation id in the OpenAPI schema."""
    return lambda handler: router.head(path)(router.get(path)(handler))


@router.get("/collections")
async def list_collections(backend: BackendDep, tenant: TenantDep) -> dict[str, Any]:
    """The collections that this key may read."""
    return {"data": list(map(summary, await backend.executor.run(tenant.name, backend.collections, tenant)))}


@router.get("/collections/{name}")
async def get_collection(name: str, backend: BackendDep, tenant: TenantDep) -> dict[str, Any]:
    """A collection's description."""
    return asdict(await backend.executor.run(tenant.name, backend.collection, tenant, name))


@get_and_head("/collections/{name}/directory")
async def directory(name: str, request: Request, backend: BackendDep, tenant: TenantDep) -> Response:
    """Return the chunk table: each chunk's key, tokens, and the bytes of its body at each level."""
    return await _send(request, backend, tenant, backend.directory, name)


@get_and_head("/collections/{name}/pieces/{hash}")
@get_and_head("/collections/{name}/tables/{hash}")
async def piece(name: str, hash: str, request: Request, backend: BackendDep, tenant: TenantDep) -> Response:
    """A part of its index, or a codec's tables, whose hash this is."""
    return await _send(request, backend, tenant, backend.piece, name, hash)


@get_and_head("/collections/{name}/chunks/{key}")
async def chunk(
    name: str, key: str, request: Request, backend: BackendDep, tenant: TenantDep, level: LevelArg = ""
) -> Response:
    """A chunk's KV: length of the header (4 bytes), header, and a segment for each layer, in order."""
    return await _send(request, backend, tenant, backend.chunk, name, key, level)


@get_and_head("/collections/{name}/layers")
async def layers(
    name: str, request: Request, backend: BackendDep, tenant: TenantDep, chunks: ChunksArg
) -> Response:
    """Several chunks: length of the header and header of each, then layer by layer a segment of each."""
    return await _send(request, backend, tenant, backend.layers, name, chunks)


@router.post("/collections/{name}/pin")
async def pin(name: str, backend: BackendDep, tenant: TenantDep) -> dict[str, Any]:
    """Pin its chunks: they are not evicted. For admins."""
    return {"collection": name, "pinned": await _administer(backend, tenant, name, set_pins, True)}


@router.post("/collections/{name}/unpin")
async def unpin(name: str, backend: BackendDep, tenant: TenantDep) -> dict[str, Any]:
    """Unpin its chunks, except the ones of another pinned collection. For admins."""
    return {"collection": name, "unpinned": await _administer(backend, tenant, name, set_pins, False)}


@router.delete("/collections/{name}")
async def unpublish_collection(
    name: str, backend: BackendDep, tenant: TenantDep, chunks: DeleteArg = False
) -> dict[str, Any]:
    """Unpublish it. For admins."""
    n = await _administer(backend, tenant, name, unpublish, chunks)
    return {"collection": name, "chunks": n}


async def _administer(
    backend: DeliveryBackend,
    tenant: Tenant,
    name: str,
    call: Callable[[CollectionCatalog, str, bool], int],
    flag: bool,
) -> int:
    """Raises NotFound, PermissionDenied, StoreError."""
    await backend.executor.run(tenant.name, backend.collection, tenant, name)
    tenant.require_write_access()
    if not tenant.admin:
        raise PermissionDenied("pinning and unpublishing collections requires an admin's key")
    return await backend.executor.run(tenant.name, call, backend.catalog, name, flag)


async def _send(
    request: Request, backend: DeliveryBackend, tenant: Tenant, read: Callable[..., CachedBody], *names: str
) -> Response:
    """The body that `read` finds, or the requested range of it. It counts as a concurrent request until it is sent."""
    with ExitStack() as stack:
        stack.enter_context(backend.limits.concurrency_slot(tenant))
        found = await backend.executor.run(tenant.name, read, tenant, *names)
        if found.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers={"ETag": found.etag})
        is_current = request.headers.get("if-range", found.etag) == found.etag
        span = parse_range(request.headers.get("range") if is_current else None, found.n_bytes)
        backend.take_bytes(tenant, span[1] - span[0] if span and request.method == "GET" else 0)
        return RangeResponse(found, span, backend.http.send_s, stack.pop_all().close)


def parse_range(header: str | None, total: int) -> tuple[int, int] | None:
    """First byte and end of the requested range; all bytes without a valid range, None if no byte is in the range."""
    match = _RANGE.fullmatch((header or "").strip())
    first, last = match.groups() if match else ("", "")
    if not first and not last:
        return 0, total
    if not first:  # the last bytes
        begin, end = max(0, total - int(last)), total
    elif last and int(last) < int(first):
        return 0, total
    else:
        begin = int(first)
        end = min(total, int(last) + 1) if last else total
    return (begin, end) if begin < end else None


class RangeResponse(Response):
    """A range of a body in memory. Raises BodyTooSlow if the client stops reading. `on_close` is called in any case."""

    def __init__(
        self, whole: CachedBody, span: tuple[int, int] | None, timeout_s: float, on_close: Callable[[], None]
    ) -> None:
        """timeout_s: of each part that is sent."""
        self._parts = [memoryview(part).cast("B") for part in whole.parts]
        self._begin, self._end = span or (0, 0)
        self._timeout_s, self._on_close = timeout_s, on_close
        total, n_bytes, status = whole.n_bytes, self._end - self._begin, 200
        headers = {"ETag": whole.etag, "Accept-Ranges": "bytes", "Cache-Control": "private, no-cache"}
        headers["Content-Length"] = str(n_bytes)
        if span is None:
            status, headers["Content-Range"] = 416, f"bytes */{total}"
        elif n_bytes < total:
            status, headers["Content-Range"] = 206, f"bytes {self._begin}-{self._end - 1}/{total}"
        super().__init__(None, status, headers, "application/octet-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            for block in self._blocks() if scope["method"] != "HEAD" else ():
                try:
                    message = {"type": "http.response.body", "body": block, "more_body": True}
                    await asyncio.wait_for(send(message), self._timeout_s)
                except asyncio.TimeoutError:
                    raise BodyTooSlow(f"the client received nothing for {self._timeout_s:g} s") from None
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._on_close()

    def _blocks(self) -> Iterator[Buffer]:
        """The range in blocks of at most SEND_BYTES; small parts are joined, because each call has a cost."""
        at, small = 0, bytearray()
        for part in self._parts:
            begin, end = max(0, self._begin - at), min(len(part), self._end - at)
            at += len(part)
            if 0 < end - begin < SEND_BYTES - len(small):
                small += part[begin:end]
                continue
            if begin < end and small:
                yield bytes(small)
                small.clear()
            for start in range(begin, end, SEND_BYTES):
                yield part[start : min(start + SEND_BYTES, end)]
        if small:
            yield bytes(small)


def serve(settings: Config) -> None:
    """Deliver the collections of a store until told to stop. Raises ConfigError, StoreError."""
    check_http(settings.deliver)
    with open_store(settings.store, None, persistent=True) as store:
        backend = DeliveryBackend(store, settings.deliver)
        listen(create_app(backend, [router]), backend)
