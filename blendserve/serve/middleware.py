"""Middleware of every server: limits of request bodies, refusal of other web sites' requests, the request log, and the
path prefix of a proxy.

A body is read completely before its route runs, except for uploads of files (uploads.py). The API key is checked first:
a request above its tenant's rate or concurrency is refused before its body is read. While its body arrives, a request
occupies only its connection and its bytes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blendserve.config import LOOPBACK, ServeConfig
from blendserve.errors import BlendserveError, BodyTooLarge, BodyTooSlow, InputError, PermissionDenied
from blendserve.serve.auth import ServiceBackend, authenticate
from blendserve.serve.engine_client import RequestHandle
from blendserve.serve.keys import Tenant
from blendserve.serve.responses import ClientDisconnected, error_response
from blendserve.serve.uploads import is_upload_of_files
from blendserve.timing import Clock

MAX_JSON_DEPTH = 32  # the API's own bodies need six levels
NO_STRUCTURE = bytes(set(range(256)) - set(b"[]{},:"))
MAX_JSON_TOKENS = 20_000  # brackets, commas and colons; a thousand passages with all fields have 7,000

MAX_SHOWN = 64  # characters of a foreign host in an error
MAX_PATH = 256  # characters of a path in the log

REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)  # of a client or proxy
# the header of W3C Trace Context
TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")

request_ids: ContextVar[dict[str, str]] = ContextVar("request_ids", default={})  # noqa: B039
"""Ids of the request that this task serves, by their name in the log; none outside of any."""

access_log = logging.getLogger("blendserve.access")


class RequestBodyMiddleware:
    """Reads bodies, so that the inner application gets each as one message. Uploads of files pass as they arrive."""

    def __init__(self, app: ASGIApp, backend: ServiceBackend, max_upload: int = 0) -> None:
        """max_upload: bytes of a form; 0 for a service that takes none."""
        self._app = app
        self._limits = backend.limits
        self._max_upload = max_upload
        self._max_bytes = backend.http.max_body
        self._timeout_s = backend.http.body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        length = headers.get("content-length", "0")
        if length == "0" and "transfer-encoding" not in headers:
            return await self._app(scope, receive, send)
        is_upload = self._max_upload > 0 and is_upload_of_files(scope)
        most, timeout_s = (
            (self._max_upload, ServeConfig.upload_s) if is_upload else (self._max_bytes, self._timeout_s)
        )
        try:
            if not (length.isascii() and length.isdigit()) or len(length) > 15 or int(length) > most:
                raise _too_large(most)
            tenant = await authenticate(HTTPConnection(scope))
            with self._limits.concurrency_slot(tenant, upload=True):
                parts = self._parts(tenant, receive, most, timeout_s)
                if is_upload:
                    return await self._app(scope, _replay(parts, receive), send)
                body = b"".join([part async for part in parts])
            check_json_complexity(body)
        except (BlendserveError, ClientDisconnected) as error:
            return await error_response(error, scope)(scope, receive, send)
        return await self._app(scope, _replay(_once(body), receive), send)

    async def _parts(
        self, tenant: Tenant, receive: Receive, most: int, timeout_s: float
    ) -> AsyncIterator[bytes]:
        """Yield the parts of a body. Raises BodyTooLarge, BodyTooSlow, ClientDisconnected."""
        clock = Clock()
        n = 0
        has_more = True
        while has_more:
            try:
                part, has_more = await asyncio.wait_for(
                    self._part(tenant, receive), timeout_s - clock.elapsed()
                )
            except asyncio.TimeoutError:
                raise BodyTooSlow(f"the body did not arrive within {timeout_s:g} s: send it faster") from None
            n += len(part)
            if n > most:
                raise _too_large(most)
            yield part

    async def _part(self, tenant: Tenant, receive: Receive) -> tuple[bytes, bool]:
        """Return the next part, and whether more follow. Raises ClientDisconnected."""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part: bytes = message.get("body", b"")
        if wait_s := self._limits.throttle(tenant, len(part)):
            await asyncio.sleep(wait_s)
        return part, message.get("more_body", False)


def _replay(parts: AsyncIterator[bytes], receive: Receive) -> Receive:
    """Return the messages of a body, then those that follow it."""
    has_more = True

    async def replay() -> Message:
        nonlocal has_more
        if not has_more:
            return await receive()
        part = await anext(parts, None)
        has_more = part is not None
        return {"type": "http.request", "body": part or b"", "more_body": has_more}

    return replay


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {most} bytes: send fewer or shorter passages, or files")


def check_json_complexity(body: bytes) -> None:
    """Raises InputError for JSON that is expensive to parse for its size: nested deeply, or of very many elements.

    The contents of strings do not count. Invalid JSON is left to the parser.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        wrong = body[error.start]
        message = f"the body is not UTF-8: byte 0x{wrong:02x} at position {error.start}: send JSON in UTF-8"
        raise InputError(message) from None
    if b"\0" in body:
        raise InputError("the body is not a JSON object in UTF-8: send one")
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    structure = b""
    too_many = unescaped.count(b'"') > 4 * MAX_JSON_TOKENS
    if not too_many:
        structure = b"".join(unescaped.split(b'"')[::2]).translate(None, NO_STRUCTURE)
        too_many = sum(map(structure.count, (b"[", b"{", b",", b":"))) > MAX_JSON_TOKENS
    if too_many:
        message = f"the body has more than {MAX_JSON_TOKENS:,} JSON elements: send fewer passages, messages or fields"
        raise InputError(message)
    depth = 0
    for token in structure:
        depth += (token in b"[{") - (token in b"]}")
        if depth < 0:
            return  # invalid JSON
        if depth > MAX_JSON_DEPTH:
            message = f"the body is nested more than {MAX_JSON_DEPTH} levels deep: send a flatter JSON object"
            raise InputError(message)


class SameSiteMiddleware:
    """Refuses requests that a web site sent by its visitor's browser. For servers without API keys.

    Such a site reaches 127.0.0.1 under a name of its own (DNS rebinding, seen in Host) or by a form (seen in Origin).
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str], origins: Sequence[str]) -> None:
        """hosts: names of the server, besides localhost. origins: that may send requests; * allows all."""
        self._app = app
        self._origins = {*origins}
        self._hosts = {*LOOPBACK, *map(str.lower, hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        try:
            if scope["type"] == "http":
                self._check(headers.get("host", ""), headers.get("origin"))
        except PermissionDenied as error:
            return await error_response(error, scope)(scope, receive, send)
        return await self._app(scope, receive, send)

    def _check(self, host: str, origin: str | None) -> None:
        """Raise PermissionDenied for a request from another site."""
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            name = None
        if name not in self._hosts:
            raise PermissionDenied(
                f"this server has no API keys and no name {host[:MAX_SHOWN]!r}: use 127.0.0.1, or set `hosts`"
            )
        is_own = origin is None or origin.partition("://")[2] == host
        if not is_own and not self._origins & {"*", origin}:
            raise PermissionDenied("pages of other origins may not use this server: set `cors_origins`")


class AccessLogMiddleware:
    """One log line and one count per request, with the id that the response carries; without texts and keys.

    The id is that of the client's or proxy's X-Request-Id, if that is one; else a new one.
    """

    def __init__(self, app: ASGIApp, backend: ServiceBackend) -> None:
        self._app = app
        self._metrics = backend.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        clock = Clock()
        ids = _ids(Headers(scope=scope))
        status = 0
        request_ids.set(ids)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).append("X-Request-Id", ids["request"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # a bug: expected errors have handlers
            response = error_response(error, scope)
            if not status:
                await response(scope, receive, send_with_id)
        finally:
            self._metrics.answered(getattr(scope.get("route"), "path", "other"), status)
            access_log.info(_line(scope, status, clock.elapsed()))


def _ids(headers: Headers) -> dict[str, str]:
    """Return the ids of a request, by their name in the log."""
    given = headers.get("x-request-id", "")
    trace = TRACE.fullmatch(headers.get("traceparent", ""))
    id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    return {"request": id, **({"trace_id": trace[1]} if trace else {})}


def _line(scope: Scope, status: int, elapsed_s: float) -> dict[str, Any]:
    """Return the log line of a request: the path as sent, without its query; model and tokens of an answer."""
    state: dict[str, Any] = scope.get("state", {})
    path = scope.get("raw_path", b"").decode("latin-1")[:MAX_PATH]
    line = {"method": scope["method"], "path": path, "status": status}
    line |= {"ms": round(elapsed_s * 1e3, 1), "tenant": state.get("tenant", "")}
    if "answered" in state:
        line |= {"model": state["model"], **usage(state["answered"])}
    return {**line, "text": state["text"]} if "text" in state else line


def usage(handles: Sequence[RequestHandle]) -> dict[str, int]:
    """Return the tokens of prompts and answers, summed over all answers to a request."""
    return dict(sum((Counter(handle.usage) for handle in handles), Counter()))


class PrefixMiddleware:
    """Serves all paths below a prefix, whether or not the proxy has removed it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            is_whole = path == self._prefix or path.startswith(f"{self._prefix}/")
            scope = {**scope, "root_path": self._prefix, "path": path if is_whole else self._prefix + path}
        await self._app(scope, receive, send)


def log_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a log record: those of a dictionary, or its message; a bug has its traceback."""
    created = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
    line = {"time": created, "level": record.levelname.lower(), **request_ids.get()}
    line |= record.msg if isinstance(record.msg, dict) else {"message": record.getMessage()}
    if record.exc_info:
        line["trace"] = logging.Formatter().formatException(record.exc_info)
    return line


class JsonFormatter(logging.Formatter):
    """Formats a log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(log_fields(record), ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """Formats a log record as one line of `name=value` pairs; values that are not plain words are JSON."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{name}={_word(value)}" for name, value in log_fields(record).items())


def _word(value: Any) -> str:
    text = str(value)
    return (
        text
        if re.fullmatch(r"[^\s\"=]+", text) and text.isprintable()
        else json.dumps(text, ensure_ascii=False)
    )


def log_to_stderr() -> None:
    """Write the log, one line per record, in place of the handlers that the command line installed.

    A terminal gets `name=value` pairs, a file or a collector JSON.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter() if sys.stderr.isatty() else JsonFormatter())
    logging.getLogger().handlers = [handler]
    access_log.setLevel(logging.INFO)
