"""GET /v1/kdn/...: the index of a collection and the KV of its chunks.

Bodies of chunks, tables and parts of an index never change under their names. Each has an ETag and supports Range
requests, so that a client can resume a transfer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from blendserve.errors import NotAllowed
from blendserve.serve.access import TenantArg
from blendserve.serve.kdn.ranges import PartialBody
from blendserve.serve.kdn.service import DeliveryService, Sendable
from blendserve.serve.keys import Tenant

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
