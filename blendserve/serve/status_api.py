"""GET /health, /ready and /metrics: for the operator of the server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from blendserve.errors import NotAllowed
from blendserve.serve.access import AskingArg, TenantArg

router = APIRouter(tags=["operations"])


@router.get("/health")
async def health() -> dict[str, Any]:
    """The process is running."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(service: AskingArg) -> JSONResponse:
    """The server accepts questions; 503 while it shuts down."""
    alive = service.alive
    return JSONResponse({"status": "ready" if alive else "stopping"}, 200 if alive else 503)


@router.get("/metrics")
async def metrics(service: AskingArg, tenant: TenantArg) -> Response:
    """Metrics of all tenants for Prometheus. A server with keys requires an admin's."""
    if not tenant.admin:
        raise NotAllowed("the metrics cover all tenants: use an admin's key")
    return Response(await service.on_storage(tenant, service.metrics.text), media_type=CONTENT_TYPE_LATEST)
