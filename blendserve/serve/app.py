"""The HTTP application of both servers: routes, the page, errors and CORS."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.staticfiles import StaticFiles

import blendserve
from blendserve.errors import BlendserveError, NotFound, PermissionDenied
from blendserve.serve import cache, documents, embeddings, messages, openai, openai_responses, rag, tokens
from blendserve.serve.auth import BackendDep, ServiceBackend, TenantDep
from blendserve.serve.engine_client import EngineClient, LocalEngineClient
from blendserve.serve.middleware import (
    AccessLogMiddleware,
    PrefixMiddleware,
    RequestBodyMiddleware,
    SameSiteMiddleware,
)
from blendserve.serve.responses import (
    MATCHED,
    QUALITY,
    RETRY_S,
    ClientDisconnected,
    ErrorResponse,
    error_body,
    error_json,
    error_response,
)

PAGE = Path(__file__).with_name("page")
PAGE_HEADERS = {
    # nothing from elsewhere, no inline scripts or styles, no frames
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # the browser revalidates by ETag, so that a new version shows at once
}

# In place of FastAPI's 422, which no request gets.
DESCRIBED_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is wrong: what, and what to do", "model": ErrorResponse},
    "5XX": {"description": "The server cannot answer now: why", "model": ErrorResponse},
}

operations = APIRouter(tags=["operations"])
page = APIRouter(include_in_schema=False)
_files = StaticFiles(directory=PAGE)


@operations.head("/health", include_in_schema=False)
@operations.get("/health")
async def health() -> dict[str, Any]:
    """Answer as long as the process runs."""
    return {"status": "ok"}


@operations.head("/ready", include_in_schema=False)
@operations.get("/ready")
async def ready(backend: BackendDep) -> JSONResponse:
    """Answer whether the server accepts requests; 503 while it shuts down."""
    if backend.is_alive:
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": "stopping"}, 503, {"Retry-After": str(RETRY_S)})


@operations.get("/metrics")
def metrics(backend: BackendDep, tenant: TenantDep) -> Response:
    """Return metrics of all tenants for Prometheus. A server with keys requires an admin's key.

    Not a coroutine: it reads the store, so FastAPI runs it on a thread.
    """
    if not tenant.admin:
        raise PermissionDenied("the metrics cover all tenants: use an admin's key")
    return Response(backend.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@page.get("/")
async def page_index(request: Request) -> Response:
    """Return the web page. Its figures come from the API; its files need no API key."""
    return await page_file(request, "index.html")


@page.get("/page/{name}")
async def page_file(request: Request, name: str) -> Response:
    """Return a style, script or picture of the page. Raises NotFound."""
    try:
        response = await _files.get_response(name, request.scope)
    except HTTPException:
        raise NotFound(f"the page has no file {name!r}") from None
    response.headers.update(PAGE_HEADERS)
    return response


def create_engine_app(client: EngineClient) -> FastAPI:
    """Make the application of an engine, which it starts and closes.

    A cluster has no page, and no routes for documents and cache, as each replica has a store of its own.
    """
    local = (documents.router, cache.router, page) if isinstance(client, LocalEngineClient) else ()
    routers = (
        openai.router,
        openai_responses.router,
        messages.router,
        rag.router,
        embeddings.router,
        tokens.router,
        *local,
    )
    max_upload = client.http.max_upload_mb * 1_000_000 if local else 0
    app = create_app(client, routers, client.http.cors_origins, max_upload)
    if client.http.cors_origins:  # the outermost middleware, so that errors have its headers, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=client.http.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", MATCHED, QUALITY],
        )
    app.openapi = partial(_openapi, app, client.model_names)  # type: ignore[method-assign]
    return app


def create_app(
    backend: ServiceBackend, routers: Sequence[APIRouter], origins: Sequence[str] = (), max_upload: int = 0
) -> FastAPI:
    """Make the application of a server: routes, body limits, error responses and the request log.

    origins: whose pages may send requests to a server without API keys. max_upload: bytes of a form of files.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        backend.start()
        yield
        await backend.finish()
        backend.close()

    # FastAPI's pages of documentation would load scripts from elsewhere into the origin that holds the API key.
    app = FastAPI(
        title="blendserve",
        version=blendserve.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=DESCRIBED_ERRORS,
    )
    app.state.backend = backend
    for router in (*routers, operations):
        app.include_router(router)
    app.add_exception_handler(BlendserveError, _error)
    app.add_exception_handler(ClientDisconnected, _error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(RequestBodyMiddleware, backend=backend, max_upload=max_upload)
    if not backend.keys.are_needed:
        app.add_middleware(SameSiteMiddleware, hosts=backend.http.hosts, origins=origins)
    app.add_middleware(AccessLogMiddleware, backend=backend)
    if backend.http.root_path:
        app.add_middleware(PrefixMiddleware, prefix=backend.http.root_path)
    return app


def _openapi(app: FastAPI, models: tuple[str, ...]) -> dict[str, Any]:
    """Return the OpenAPI schema with the served model's names, so that generated requests name a known model."""
    if app.openapi_schema is None:
        app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for schema in app.openapi_schema["components"]["schemas"].values():
            names = schema.get("properties", {}).keys()
            if "model" in names and names & {"messages", "prompt", "input"}:
                is_optional = "model" not in schema.get("required", ())
                schema["properties"]["model"]["enum"] = [*models, *([None] if is_optional else [])]
    return app.openapi_schema


async def _error(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope)


async def _validation_error(request: Request, error: Exception) -> Response:
    """Respond with the first validation error of a request, without the invalid value."""
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    where = problem["loc"]
    kind = problem["type"]
    why = problem["msg"].removeprefix("Value error, ")
    # Pydantic's location also names the branch of a union, such as `list[TextPart]`: not a field.
    field = ".".join(str(part) for part in where[1:] if "[" not in str(part))
    if kind == "json_invalid":
        reason = problem["ctx"]["error"]
        field = ""
        message = f"the body is not JSON: {reason[0].lower()}{reason[1:]} at position {where[1]}"
    elif where == ("body",) and kind != "value_error":
        message = "the body is not a JSON object: send one, with `Content-Type: application/json`"
    else:
        message = f"{field or where[0]}: {why[0].lower()}{why[1:]}"
    body = error_body(message, "invalid_request_error", field or None, kind)
    return error_json(body, 400, request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    """Respond to an error of the framework: an unknown route or a wrong method."""
    assert isinstance(error, HTTPException)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return error_json(error_body(str(error.detail), kind), error.status_code, request.scope, error.headers)
