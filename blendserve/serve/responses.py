"""HTTP responses: complete or streamed; errors in OpenAI's or Anthropic's format; clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Protocol, TypeVar, get_args

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from blendserve import errors
from blendserve.answer import Answer
from blendserve.config import Method
from blendserve.errors import InputError
from blendserve.serve.auth import TenantDep
from blendserve.serve.engine_client import ClientDep, QueryRequest, RequestHandle

T = TypeVar("T")
StreamEvent = dict[str, Any] | str
"""The data of a server-sent event: JSON, or text such as [DONE]."""

# error -> status, OpenAI's type and code; the first match counts
ERRORS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (errors.NotAuthenticated, 401, "authentication_error", "invalid_api_key"),
    (errors.PermissionDenied, 403, "permission_error", None),
    (errors.NotFound, 404, "not_found_error", "not_found"),
    (errors.BodyTooSlow, 408, "invalid_request_error", "body_too_slow"),
    (errors.BodyTooLarge, 413, "invalid_request_error", "body_too_large"),
    (errors.RateLimited, 429, "rate_limit_error", "rate_limit_exceeded"),
    (errors.ShuttingDown, 503, "server_error", "shutting_down"),
    (errors.StoreError, 503, "server_error", "store_unavailable"),
    (errors.ClusterUnavailable, 503, "server_error", "replicas_unavailable"),
    (errors.VectorIndexError, 503, "server_error", "index_unavailable"),
    (errors.BlendserveError, 400, "invalid_request_error", None),
)
ANTHROPIC = "/v1/messages"  # beginning of the paths whose errors have Anthropic's format
# OpenAI's type or code -> type
ANTHROPIC_TYPES = {
    "server_error": "api_error",
    "body_too_large": "request_too_large",
}
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a closed connection; only the log and the metrics show it
MATCHED, QUALITY = "X-Blendserve-Matched", "X-Blendserve-Quality"
MAX_SCOPE = 512  # characters
PING = ": ping\n\n"  # a comment: clients of server-sent events skip it
RETRY_S = 5  # after which a client of a server that cannot answer now should ask again

log = logging.getLogger(__name__)


class ClientDisconnected(Exception):
    """The client closed the connection."""


class ResponseFormat(Protocol):
    """How a route presents an answer."""

    model: str  # name of the model that answers, for the log

    async def complete(self, handles: Sequence[RequestHandle], answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of a complete response."""

    def events(self, handles: Sequence[RequestHandle]) -> AsyncIterator[StreamEvent]:
        """The events of a streamed response."""


@dataclass(frozen=True)
class Context:
    """A request for an answer, with its tenant and the engine."""

    request: Request
    client: ClientDep
    tenant: TenantDep

    async def respond(self, form: ResponseFormat, stream: bool | None, *queries: QueryRequest) -> Response:
        """Run queries and respond with a body, or with events. Raises BlendserveErrors and ClientDisconnected.

        Events begin as soon as the queries are queued: passages are sent before the prefill ends.
        """
        request = self.request
        client = self.client
        with ExitStack() as stack:
            stack.enter_context(client.limits.concurrency_slot(self.tenant))
            if client.http.log_text:
                request.state.text = queries[0].question

            async def submit() -> list[RequestHandle]:
                """Submit the queries. Requests that are submitted already are cancelled when this task is."""
                submitted = list[RequestHandle]()
                for query in map(self._by_headers, queries):
                    for handle in await client.submit(query, self.tenant):
                        stack.callback(handle.cancel)
                        submitted.append(handle)
                return submitted

            handles = await until_disconnect(request, submit())
            request.state.model = form.model
            request.state.answered = handles
            headers = _headers(handles[0])
            if stream:
                response = EventStream(form.events(handles), client.http.ping_s, headers)
                response.on_close = stack.pop_all().close  # after all that may raise
                return response
            answers = await until_disconnect(request, _gathered(handles))
            body = await until_disconnect(request, form.complete(handles, answers))
            return JSONResponse(body, headers=headers)

    def _by_headers(self, query: QueryRequest) -> QueryRequest:
        """Return the query with the options of its HTTP headers; options of the body win. Raises InputError."""
        headers = self.request.headers
        scope = next(filter(None, map(headers.get, self.client.http.scope_headers)), "")
        learns = "no-store" not in headers.get("cache-control", "").lower()
        if len(scope) > MAX_SCOPE:
            raise InputError(
                f"the header that names the user has {len(scope)} characters: send at most {MAX_SCOPE}"
            )
        query = replace(query, scope=query.scope or scope, learns=learns)
        method = headers.get("x-blendserve-method")
        if method is None or query.blend.get("method"):
            return query
        if method not in (methods := get_args(Method)):
            raise InputError(f"header X-Blendserve-Method: {method!r} is none of {', '.join(methods)}")
        return replace(query, blend={**query.blend, "method": method})


async def _gathered(handles: Sequence[RequestHandle]) -> list[Answer]:
    return list(await asyncio.gather(*(handle.answer() for handle in handles)))


ContextDep = Annotated[Context, Depends()]


def _headers(handle: RequestHandle) -> dict[str, str]:
    """Return the headers with the cached passages found in a plain prompt, and with the state of the quality target."""
    headers = {}
    if handle.runs:
        n_tokens = sum(len(run.span) for run in handle.runs)
        headers[MATCHED] = f"spans={len(handle.runs)}; tokens={n_tokens}"
    if handle.quality:
        headers[QUALITY] = handle.quality.summary
    return headers


def figures(answer: Answer) -> dict[str, Any]:
    """Return the report, timings and citations of an answer, for `x_blendserve`."""
    cited = {"citations": [asdict(each) for each in answer.citations]} if answer.citations else {}
    return {"report": answer.report.to_dict(), "timings": answer.timings.to_dict(), **cited}


class ErrorDetails(BaseModel):
    """The `error` of a response, in OpenAI's format or in Anthropic's."""

    type: str
    message: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of every response with a status of 400 or more."""

    error: ErrorDetails


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def public_message(error: Exception) -> str:
    """Return the message for the client. If it leaves anything out, the whole message is logged."""
    message = error.public_message if isinstance(error, errors.BlendserveError) else str(error)
    if message != str(error):
        log.warning("a request failed: %s", error)
    return message


def error_details(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error. An unexpected one is a bug: only the log shows its traceback."""
    for error_class, status, kind, code in ERRORS:
        if isinstance(error, error_class):
            return status, error_body(public_message(error), kind, code=code)
    log.error("a request failed", exc_info=error)
    return 500, error_body("internal server error: see the server's log", "server_error")


def anthropic_error(body: Mapping[str, Any]) -> dict[str, Any]:
    """An error in Anthropic's format. body: in OpenAI's."""
    error = body["error"]
    kind = ANTHROPIC_TYPES.get(error["code"]) or ANTHROPIC_TYPES.get(error["type"], error["type"])
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}


def error_json(
    body: dict[str, Any], status: int, scope: Scope, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error in the format of the request's path. body: the error in OpenAI's format."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return JSONResponse(anthropic_error(body) if path.startswith(ANTHROPIC) else body, status, headers)


def error_response(error: Exception, scope: Scope) -> Response:
    """The response to a request that failed before its first token."""
    if isinstance(error, ClientDisconnected):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    status, body = error_details(error)
    headers = {}
    if status in (429, 503):
        headers["Retry-After"] = str(getattr(error, "retry_after", RETRY_S))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 408:
        headers["Connection"] = "close"  # else the server would wait for the rest of the body
    return error_json(body, status, scope, headers)


class EventStream(StreamingResponse):
    """Server-sent events. After `ping_s` seconds without one, a comment is sent, so that no proxy closes the stream.

    An event with a field `type`, as Anthropic's have, is named by it. `on_close` is always called, even if the client
    disconnects before the first event. The header X-Accel-Buffering keeps nginx from buffering the stream.
    """

    def __init__(
        self,
        events: AsyncIterator[StreamEvent],
        ping_s: float,
        headers: Mapping[str, str],
    ) -> None:
        headers = {**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_sse_lines(events, ping_s), media_type="text/event-stream", headers=headers)
        self.on_close: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.on_close()


async def _sse_lines(events: AsyncIterator[StreamEvent], ping_s: float) -> AsyncIterator[str]:
    """Events and pings as text; an error is the last event."""
    upcoming: asyncio.Future[StreamEvent | None] | None = None
    try:
        while True:
            upcoming = asyncio.ensure_future(anext(events, None))
            while not (await asyncio.wait({upcoming}, timeout=ping_s))[0]:
                yield PING
            if (event := upcoming.result()) is None:
                return
            name = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
            data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
            yield f"{name}data: {data}\n\n"
    except Exception as error:
        yield f"data: {json.dumps(error_details(error)[1])}\n\n"
    finally:
        if upcoming:  # asyncio would log an error that nothing reads
            upcoming.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            upcoming.cancel()


async def until_disconnect(request: Request, job: Coroutine[Any, Any, T]) -> T:
    """Await `job`. Raises ClientDisconnected if the client disconnects first."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(job)
    watch = asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for unfinished in (task, watch):
            unfinished.cancel()
