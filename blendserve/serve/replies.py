"""Responses: complete or streamed, errors in OpenAI's format, and requests whose client disconnected."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from blendserve.core import Answer
from blendserve.engine.prompt import Turn
from blendserve.errors import (
    BlendserveError,
    BodyTooLarge,
    BodyTooSlow,
    Busy,
    ClusterUnavailable,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    Stopping,
    StoreError,
    VectorIndexError,
)
from blendserve.serve.asking import Answering, Ask, Asking
from blendserve.serve.keys import Tenant
from blendserve.serve.schema import Extras, Question

T = TypeVar("T")
Whole = Callable[[Answering, Answer], dict[str, Any]]
Events = Callable[[Answering], AsyncIterator["dict[str, Any] | str"]]

# error -> status, OpenAI's type and code; the first match counts
STATUS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (NotAuthenticated, 401, "authentication_error", "invalid_api_key"),
    (NotAllowed, 403, "permission_error", None),
    (NotFound, 404, "not_found_error", "not_found"),
    (BodyTooSlow, 408, "invalid_request_error", "body_too_slow"),
    (BodyTooLarge, 413, "invalid_request_error", "body_too_large"),
    (Busy, 429, "rate_limit_error", "rate_limit_exceeded"),
    (Stopping, 503, "server_error", "shutting_down"),
    (StoreError, 503, "server_error", "store_unavailable"),
    (ClusterUnavailable, 503, "server_error", "replicas_unavailable"),
    (VectorIndexError, 503, "server_error", "index_unavailable"),
    (BlendserveError, 400, "invalid_request_error", None),
)
GONE = 499  # nginx's status for a closed connection; only the log and the metrics show it
PING = ": ping\n\n"  # a comment: clients of server-sent events skip it

log = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client closed the connection."""


def make_ask(
    service: Asking, question: str, body: Question, extras: Extras, turns: tuple[Turn, ...] = ()
) -> Ask:
    """A body as a request to the engine, its question cut at the separator. Raises InputError."""
    ask = Ask(
        question=question,
        turns=turns,
        passages=body.passages_of(extras),
        collections=None if extras.collections is None else tuple(extras.collections),
        top_k=extras.top_k,
        blend=body.blend(extras),
        decode=body.decode(),
    )
    return ask.split(service.config.prompt.separator)


async def reply(
    request: Request, service: Asking, tenant: Tenant, ask: Ask, whole: Whole, events: Events | None
) -> Response:
    """Run a request and respond with `whole`, or with `events` if given. Raises BlendserveErrors and ClientGone.

    Events begin as soon as the request is queued: its passages are sent before its prefill ends.
    """
    with ExitStack() as stack:
        stack.enter_context(service.limits.one(tenant))
        if service.serve.log_text:
            request.state.text = ask.question
        answering = await while_connected(request, service.ask(tenant, ask))
        stack.callback(answering.cancel)
        if events is None:
            return JSONResponse(whole(answering, await while_connected(request, answering.answer())))
        return EventStream(events(answering), stack.pop_all().close, service.serve.ping_s)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def described(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of an error. An unexpected error is a bug: the log has its traceback, the client does not."""
    for kind, status, name, code in STATUS:
        if isinstance(error, kind):
            return status, error_body(str(error), name, code=code)
    log.error("a request failed", exc_info=error)
    return 500, error_body("internal server error: see the server's log", "server_error")


def refused(error: Exception) -> JSONResponse:
    """The response to a request that failed before its first token."""
    status, body = described(error)
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, Busy) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 408:
        headers["Connection"] = "close"  # else the server would wait for the rest of the body
    return JSONResponse(body, status, headers)


class EventStream(StreamingResponse):
    """Server-sent events, and a comment every `ping_s` seconds without one, so that no proxy ends a silent stream.

    `at_end` is called in any case, even if the client disconnects before the first event.
    """

    def __init__(
        self, events: AsyncIterator[dict[str, Any] | str], at_end: Callable[[], None], ping_s: float
    ) -> None:
        super().__init__(
            _lines(events, ping_s), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._at_end()


async def _lines(events: AsyncIterator[dict[str, Any] | str], ping_s: float) -> AsyncIterator[str]:
    """Events and pings as text; an error is the last event."""
    following: asyncio.Future[dict[str, Any] | str | None] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(events, None))
            while not (await asyncio.wait({following}, timeout=ping_s))[0]:
                yield PING
            if (event := following.result()) is None:
                return
            data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
            yield f"data: {data}\n\n"
    except Exception as error:
        yield f"data: {json.dumps(described(error)[1])}\n\n"
    finally:
        if following:
            following.add_done_callback(
                lambda ended: ended.cancelled() or ended.exception()
            )  # counts as handled
            following.cancel()


async def while_connected(request: Request, job: Coroutine[Any, Any, T]) -> T:
    """Await `job`. Raises ClientGone if the client disconnects first."""
    task, watch = asyncio.ensure_future(job), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for unfinished in (task, watch):
            unfinished.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
