"""Request bodies: read completely before a route runs, within limits of size, time and JSON complexity.

The API key is checked first: a request above its tenant's rate or concurrency is refused before its body is read. While
its body arrives, a request occupies its connection and its bytes, nothing else.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blendserve.errors import BlendserveError, BodyTooLarge, BodyTooSlow, InputError
from blendserve.serve.access import admit
from blendserve.serve.front import Front
from blendserve.serve.keys import Tenant
from blendserve.serve.replies import GONE, ClientGone, refused

MAX_DEPTH = 32  # of JSON; the API's own bodies need six
MAX_MARKS = (
    20_000  # brackets, commas and colons of JSON; a thousand passages with all their fields have 7,000
)


class Bodies:
    """Middleware that reads bodies; the inner application receives each as one message."""

    def __init__(self, app: ASGIApp, service: Front) -> None:
        self._app, self._service = app, service
        self._max = service.http.max_body_kb * 1024

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _announced(scope):
            return await self._app(scope, receive, send)
        try:
            body = await self._body(scope, receive)
        except BlendserveError as error:
            return await refused(error)(scope, receive, send)
        except ClientGone:
            return await Response(status_code=GONE)(scope, receive, send)
        return await self._app(scope, _replayed(body, receive), send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. Raises NotAuthenticated, Busy, BodyTooLarge, BodyTooSlow, InputError and ClientGone."""
        length = Headers(scope=scope).get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or len(length) > 15 or int(length) > self._max:
            raise self._too_large()
        tenant = admit(HTTPConnection(scope), self._service)
        patience = self._service.http.body_s
        with self._service.limits.reading(tenant):
            try:
                body = await asyncio.wait_for(self._read(tenant, receive), patience)
            except asyncio.TimeoutError:
                raise BodyTooSlow(f"the body did not arrive within {patience:g} s: send it faster") from None
        check_shape(body)
        return body

    async def _read(self, tenant: Tenant, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            if len(body) + len(part) > self._max:
                raise self._too_large()
            body += part
            if wait := self._service.limits.wait_for_bytes(tenant, len(part)):
                await asyncio.sleep(wait)
            if not message.get("more_body"):
                return bytes(body)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {self._max} bytes: send fewer or shorter passages")


def check_shape(body: bytes) -> None:
    """Raises InputError for JSON that is expensive to parse for its size: nested deeply, or of very many elements.

    The contents of strings do not count. Invalid JSON is left to the parser.
    """
    if b"\0" in body:
        raise InputError("the body is not a JSON object in UTF-8: send one")
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if bare.count(b'"') > 4 * MAX_MARKS:
        raise _too_many()
    frame = b"".join(bare.split(b'"')[::2])
    if sum(map(frame.count, (b"[", b"{", b",", b":"))) > MAX_MARKS:
        raise _too_many()
    depth = 0
    for mark in frame:
        depth += (mark in b"[{") - (mark in b"]}")
        if depth > MAX_DEPTH:
            raise InputError(
                f"the body is nested more than {MAX_DEPTH} levels deep: send a flatter JSON object"
            )


def _too_many() -> InputError:
    return InputError(
        f"the body has more than {MAX_MARKS:,} JSON elements: send fewer passages, messages or fields"
    )


def _announced(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then the messages after it."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return left.pop() if left else await receive()

    return replay
