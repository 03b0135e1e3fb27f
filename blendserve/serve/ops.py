"""GET /health, /ready and /metrics: for the operator of a server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from blendserve.errors import PermissionDenied
from blendserve.serve.auth import BackendDep, TenantDep

router = APIRouter(tags=["operations"])


@router.get("/health")
async def health() -> dict[str, Any]:
    """The process is running."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(backend: BackendDep) -> JSONResponse:
    """The server accepts requests; 503 while it shuts down."""
    alive = backend.is_alive
    return JSONResponse({"status": "ready" if alive else "stopping"}, 200 if alive else 503)


@router.get("/metrics")
def metrics(backend: BackendDep, tenant: TenantDep) -> Response:
    """Metrics of all tenants for Prometheus. A server with keys requires an admin's.

    Not a coroutine: it reads the store, so FastAPI runs it on a thread.
    """
    if not tenant.admin:
        raise PermissionDenied("the metrics cover all tenants: use an admin's key")
    return Response(backend.metrics.text(), media_type=CONTENT_TYPE_LATEST)
