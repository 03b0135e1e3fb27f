"""`blendserve kdn serve`: GET /v1/kdn/... delivers the index of a collection and the KV of its chunks.

The service has no state but what it may lose: any number of services on one store deliver the same. Bodies of chunks,
tables and parts of an index never change under their names. Each has an ETag and supports Range requests, so that a
client can resume a transfer.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from blendserve.config import Config, DeliverConfig, check_binding
from blendserve.engine.fair_executor import FairExecutor
from blendserve.errors import Busy, InputError, NotAllowed, NotFound
from blendserve.kdn.catalogue import Catalogue, pieces_of
from blendserve.kdn.publish import retire as retire_collection
from blendserve.kdn.publish import set_pins
from blendserve.serve.access import TenantArg
from blendserve.serve.app import app_behind
from blendserve.serve.front import Front
from blendserve.serve.keys import Tenant
from blendserve.serve.metrics import HttpMetrics
from blendserve.serve.ranges import PartialBody
from blendserve.serve.running import HttpServer
from blendserve.store import ChunkKey, KVStore, open_store, read_record
from blendserve.store.clock import Clock as StoreClock
from blendserve.store.codecs.base import Buffer
from blendserve.store.kdn.collection import MOST_IN_STEP, Collection, body, in_step, level_key
from blendserve.timing import Clock

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sendable:
    """A body, and what names it."""

    parts: list[Buffer]
    etag: str

    @property
    def n_bytes(self) -> int:
        return sum(map(len, self.parts))


class DeliveryMetrics(HttpMetrics):
    """What is delivered."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks = self.count("delivered_chunks", "Chunks asked for, by where they came from", "source")
        self.bytes = self.count("delivered_bytes", "Bytes of bodies, as they are sent")


class DeliveryService(Front):
    """What a store's collections are delivered by. The store is its opener's to close."""

    def __init__(self, store: KVStore, config: DeliverConfig, clock: StoreClock = time) -> None:
        """clock: of how long the catalogue is believed."""
        self.delivered = DeliveryMetrics()
        super().__init__(config, self.delivered)
        self.store, self.config, self.catalogue = store, config, Catalogue(store, now=clock.monotonic)
        self._storage = FairExecutor("delivery", config.queue)  # the one that reads the store
        self._recent: OrderedDict[tuple[ChunkKey, ChunkKey], Sendable] = OrderedDict()
        self._recent_bytes = 0
        self._sent: dict[str, tuple[float, Clock]] = {}  # MB that count as not sent yet, and since when

    def close(self) -> None:
        self._storage.stop()

    async def collections(self, tenant: Tenant) -> list[Collection]:
        """The collections that a tenant may use. Raises StoreError, Busy."""
        found = await self._run(tenant, self.catalogue.collections)
        return [collection for name, collection in found.items() if tenant.may_use(name)]

    async def collection(self, tenant: Tenant, name: str) -> Collection:
        """Raises NotFound: with one message, after the same work, whether there is none or it is not for this key."""
        return await self._run(tenant, self._collection, tenant, name)

    async def directory(self, tenant: Tenant, name: str) -> Sendable:
        def job() -> Sendable:
            blob = self._collection(tenant, name).directory
            return Sendable([self.catalogue.piece(hash) for hash in blob.pieces], f'"{blob.version}"')

        return await self._run(tenant, job)

    async def piece(self, tenant: Tenant, name: str, hash: str) -> Sendable:
        """A part of the index, or tables, that belong to this collection."""

        def job() -> Sendable:
            found = self._collection(tenant, name)
            if hash not in pieces_of(found) | {tables.hash for tables in found.tables}:
                raise _not_found()
            return Sendable([self.catalogue.piece(hash)], f'"{hash}"')

        return await self._run(tenant, job)

    async def chunk(self, tenant: Tenant, name: str, key: str, level: str) -> Sendable:
        """A chunk's body at a level, "" for the first. Raises NotFound, CorruptRecord and other StoreErrors."""
        return await self._run(tenant, self._chunk, tenant, name, key, level)

    async def layers(self, tenant: Tenant, name: str, chunks: Sequence[str]) -> Sendable:
        """Several chunks in step, KEY:LEVEL each. Raises InputError for too many, NotFound, StoreErrors."""
        if not 0 < len(chunks) <= MOST_IN_STEP:
            raise InputError(f"a request returns 1 to {MOST_IN_STEP} chunks, not {len(chunks)}")
        return await self._run(tenant, self._layers, tenant, name, chunks)

    async def set_pins(self, tenant: Tenant, name: str, pinned: bool) -> int:
        """For admins. Raises NotAllowed, NotFound, StoreError."""
        return await self._administer(
            tenant, name, partial(set_pins, self.store, self.catalogue, name, pinned)
        )

    async def retire(self, tenant: Tenant, name: str, delete: bool) -> int:
        """For admins. Raises NotAllowed, NotFound, StoreError."""
        return await self._administer(
            tenant, name, partial(retire_collection, self.store, self.catalogue, name, delete)
        )

    def pay(self, tenant: Tenant, n_bytes: int) -> None:
        """Count bytes that are to be sent. Raises Busy where a tenant has had as many as they may."""
        self.delivered.bytes.inc(n_bytes)
        if not (most := self.config.mb_per_minute):
            return
        owed, since = self._sent.pop(tenant.name, (0.0, Clock()))
        owed = max(0.0, owed - since.elapsed() * most / 60)
        self._sent[tenant.name] = owed, Clock()
        if owed >= most:
            raise Busy(f"transfer limit of {most:g} MB per minute", max(1, round((owed - most) * 60 / most)))
        self._sent[tenant.name] = owed + n_bytes / 1e6, Clock()

    async def _run(self, tenant: Tenant, call: Callable[..., T], *args: object) -> T:
        return await asyncio.wrap_future(self._storage.submit(tenant.name, partial(call, *args)))

    async def _administer(self, tenant: Tenant, name: str, call: Callable[[], int]) -> int:
        await self.collection(tenant, name)
        tenant.require_writing()
        if not tenant.admin:
            raise NotAllowed("pinning and retiring collections requires an admin's key")
        return await self._run(tenant, call)

    def _collection(self, tenant: Tenant, name: str) -> Collection:
        found, allowed = self.catalogue.collections().get(name), tenant.may_use(name)
        if found is None or not allowed:
            raise _not_found()
        return found

    def _chunk(self, tenant: Tenant, name: str, key_hex: str, level: str) -> Sendable:
        collection = self._collection(tenant, name)
        try:
            key = bytes.fromhex(key_hex)
        except ValueError:
            raise _not_found() from None
        word = level or collection.levels[0]
        if word not in collection.levels or key not in self.catalogue.directory(collection):
            raise _not_found()
        lies = level_key(key, word, collection.levels)
        if (recent := self._recent.get((lies, key))) is not None:
            self._recent.move_to_end((lies, key))
            self.delivered.chunks.labels("memory").inc()
            return recent
        record = read_record(self.store, lies)
        self.delivered.chunks.labels("store" if record else "missing").inc()
        if record is None:
            raise _not_found()
        parts = body(key, record)
        # The header ends with its own checksum, which covers key, coding, and every segment's length and checksum.
        return self._remember((lies, key), Sendable(parts, f'"{bytes(parts[1][-8:]).hex()}"'))

    def _layers(self, tenant: Tenant, name: str, chunks: Sequence[str]) -> Sendable:
        found = [self._chunk(tenant, name, *asked.partition(":")[::2]) for asked in chunks]
        etag = blake2b("".join(each.etag for each in found).encode(), digest_size=8).hexdigest()
        return Sendable(in_step([each.parts for each in found]), f'"{etag}"')

    def _remember(self, name: tuple[ChunkKey, ChunkKey], made: Sendable) -> Sendable:
        cap = self.config.memory_mb * 1e6
        if made.n_bytes <= cap:
            self._recent[name] = made
            self._recent_bytes += made.n_bytes
        while self._recent_bytes > cap:
            self._recent_bytes -= self._recent.popitem(last=False)[1].n_bytes
        return made


def _not_found() -> NotFound:
    return NotFound("not found, or not accessible with this API key")


# Routes


router = APIRouter(prefix="/v1/kdn", tags=["delivery"])
operations = APIRouter(tags=["operations"])


def service(request: Request) -> DeliveryService:
    """The server's parts."""
    found: DeliveryService = request.app.state.service
    return found


ServiceArg = Annotated[DeliveryService, Depends(service)]
GET = ["GET", "HEAD"]


@router.get("/collections")
async def collections(service: ServiceArg, tenant: TenantArg) -> dict[str, Any]:
    """The collections that this key may read."""
    return {"data": [_summary(asdict(found)) for found in await service.collections(tenant)]}


@router.get("/collections/{name}")
async def collection(name: str, service: ServiceArg, tenant: TenantArg) -> dict[str, Any]:
    """A collection's description."""
    return asdict(await service.collection(tenant, name))


@router.api_route("/collections/{name}/directory", methods=GET)
async def directory(name: str, request: Request, service: ServiceArg, tenant: TenantArg) -> Response:
    """Its chunks: for each its key, tokens, and the bytes of its body at each level."""
    return await _sent(request, service, tenant, lambda: service.directory(tenant, name))


@router.api_route("/collections/{name}/pieces/{hash}", methods=GET)
@router.api_route("/collections/{name}/tables/{hash}", methods=GET)
async def piece(name: str, hash: str, request: Request, service: ServiceArg, tenant: TenantArg) -> Response:
    """A part of its index, or a codec's tables, whose hash this is."""
    return await _sent(request, service, tenant, lambda: service.piece(tenant, name, hash))


@router.api_route("/collections/{name}/chunks/{key}", methods=GET)
async def chunk(
    name: str,
    key: str,
    request: Request,
    service: ServiceArg,
    tenant: TenantArg,
    level: Annotated[
        str, Query(max_length=32, description="One of the collection's levels. [default: the first]")
    ] = "",
) -> Response:
    """A chunk's KV: length of the header (4 bytes), header, and a segment for each layer, in order."""
    return await _sent(request, service, tenant, lambda: service.chunk(tenant, name, key, level))


@router.api_route("/collections/{name}/layers", methods=GET)
async def layers(
    name: str,
    request: Request,
    service: ServiceArg,
    tenant: TenantArg,
    chunks: Annotated[
        str, Query(max_length=1 << 13, description="KEY:LEVEL of each chunk, separated by commas.")
    ],
) -> Response:
    """Several chunks in step: length of the header and header of each, then layer by layer a segment of each."""
    return await _sent(request, service, tenant, lambda: service.layers(tenant, name, chunks.split(",")))


@router.post("/collections/{name}/pin")
async def pin(name: str, service: ServiceArg, tenant: TenantArg) -> dict[str, Any]:
    """Pin its chunks: they are not evicted. For admins."""
    return {"collection": name, "pinned": await service.set_pins(tenant, name, True)}


@router.post("/collections/{name}/unpin")
async def unpin(name: str, service: ServiceArg, tenant: TenantArg) -> dict[str, Any]:
    """Unpin its chunks, except the ones of another pinned collection. For admins."""
    return {"collection": name, "unpinned": await service.set_pins(tenant, name, False)}


@router.delete("/collections/{name}")
async def retire(
    name: str,
    service: ServiceArg,
    tenant: TenantArg,
    chunks: Annotated[
        bool, Query(description="Whether to delete the chunks that no other collection has.")
    ] = False,
) -> dict[str, Any]:
    """Withdraw it. For admins."""
    return {"collection": name, "retired": True, "chunks": await service.retire(tenant, name, chunks)}


@operations.get("/health")
async def health() -> dict[str, Any]:
    """The process is running."""
    return {"status": "ok"}


@operations.get("/metrics")
async def metrics(service: ServiceArg, tenant: TenantArg) -> Response:
    """Metrics of all tenants for Prometheus. A server with keys requires an admin's."""
    if not tenant.admin:
        raise NotAllowed("the metrics cover all tenants: use an admin's key")
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def _sent(
    request: Request, service: DeliveryService, tenant: Tenant, find: Callable[[], Awaitable[Sendable]]
) -> Response:
    """What is found, or the part of it that is asked for, while it counts among the tenant's requests."""
    with ExitStack() as stack:
        stack.enter_context(service.limits.one(tenant))
        found = await find()
        if found.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers={"ETag": found.etag})
        asked = request.headers.get("range")
        if request.headers.get("if-range", found.etag) != found.etag:
            asked = None
        response = PartialBody(found.parts, found.etag, asked, service.config.send_s)
        service.pay(tenant, response.n_bytes if request.method == "GET" else 0)
        response.at_end = stack.pop_all().close
        return response


def _summary(values: dict[str, Any]) -> dict[str, Any]:
    """Without what only a client's program wants."""
    return {k: v for k, v in values.items() if k not in ("files", "directory", "tables")}


# From settings to a running service


def make_app(service: DeliveryService) -> FastAPI:
    """The application over a service, which it closes."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    return app_behind(service, life, [router, operations])


def serve(settings: Config) -> None:
    """Deliver the collections of a store until told to stop. Raises ConfigError, StoreError."""
    check_binding(settings.deliver)
    with open_store(settings.store, None, persistent=True) as store:
        service = DeliveryService(store, settings.deliver)
        try:
            HttpServer(make_app(service), settings.deliver, lambda: None).run()
        finally:
            service.close()  # a forced end skips the application's own
