"""The HTTP application: routes, errors, CORS, and one log line per request."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import ModuleType
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

import blendserve
from blendserve.errors import BlendserveError
from blendserve.serve import library_api, listing_api, openai_api, rag_api, status_api
from blendserve.serve.asking import Asking
from blendserve.serve.bodies import Bodies
from blendserve.serve.front import Front
from blendserve.serve.logs import REQUEST, access
from blendserve.serve.page import routes as page
from blendserve.serve.replies import GONE, ClientGone, error_body, refused
from blendserve.serve.service import Service
from blendserve.timing import Clock


def make_app(service: Service) -> FastAPI:
    """The application over a service, which it starts and closes."""
    return _app(service, openai_api, rag_api, library_api, listing_api, status_api, page)


def make_cluster_app(service: Asking) -> FastAPI:
    """The same for a cluster's ingress: without documents and cache, as every replica has a store of its own."""
    return _app(service, openai_api, rag_api, status_api)


def _app(service: Asking, *apis: ModuleType) -> FastAPI:
    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.stopping()
        service.close()

    app = app_behind(service, life, [api.router for api in apis])
    if service.serve.cors_origins:  # outermost, so that errors have its headers, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.serve.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.openapi = partial(_described, app, service.model_names)  # type: ignore[method-assign]
    return app


def app_behind(front: Front, life: Lifespan[FastAPI], routers: Sequence[APIRouter]) -> FastAPI:
    """Routes with what every server has: body limits, error responses, and the request log."""
    app = FastAPI(title="blendserve", version=blendserve.__version__, lifespan=life)
    app.state.service = front
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(BlendserveError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientGone, _gone)
    app.add_middleware(Bodies, service=front)
    app.add_middleware(AccessLog, service=front)
    return app


def _described(app: FastAPI, models: tuple[str, ...]) -> dict[str, Any]:
    """The OpenAPI schema, with the names of the served model: tools that generate requests from it get answers."""
    if app.openapi_schema is None:
        app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for schema in app.openapi_schema["components"]["schemas"].values():
            if "messages" in schema.get("properties", {}) or "prompt" in schema.get("properties", {}):
                schema["properties"]["model"]["enum"] = list(models)
    return app.openapi_schema


async def _refused(_: Request, error: Exception) -> Response:
    return refused(error)


async def _gone(_: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


async def _invalid(_: Request, error: Exception) -> Response:
    """The first validation error of a body, without its value."""
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"][1:] if isinstance(part, str | int))
    if problem["type"] == "json_invalid" or problem["loc"] == ("body",):
        where, message = "", "the body is not a JSON object: send one, with `Content-Type: application/json`"
    else:
        why = problem["msg"].removeprefix("Value error, ")
        message = f"{where or problem['loc'][0]}: {why[0].lower()}{why[1:]}"
    return JSONResponse(error_body(message, "invalid_request_error", where or None, problem["type"]), 400)


async def _http(_: Request, error: Exception) -> Response:
    """An error of the framework: an unknown route, a wrong method, a body that is not JSON."""
    assert isinstance(error, HTTPException)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return JSONResponse(error_body(str(error.detail), kind), error.status_code, error.headers)


class AccessLog:
    """One log line per request, with the id that the response carries; without texts and keys."""

    def __init__(self, app: ASGIApp, service: Front) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        clock, request_id, status = Clock(), uuid.uuid4().hex, 0
        REQUEST.set(request_id)

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).append("X-Request-Id", request_id)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:  # a bug: expected errors have handlers
            response = refused(error)
            if not status:
                await response(scope, receive, noted)
        finally:
            self._write(scope, status, clock.elapsed())

    def _write(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._service.metrics.answered(route, status)
        state = scope.get("state", {})
        line = {
            "route": f"{scope['method']} {route}",
            "status": status,
            "ms": round(seconds * 1e3, 1),
            "tenant": state.get("tenant", ""),
        }
        if "text" in state:
            line["text"] = state["text"]
        access.info(line)
