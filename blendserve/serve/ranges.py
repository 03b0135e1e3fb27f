"""Parts of bodies: what a client asks for by Range (RFC 9110, section 14), and a response that sends it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from blendserve.errors import BodyTooSlow
from blendserve.store.codecs.base import Buffer

PIECE = 1 << 18  # bytes sent at a time
_ONE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


def asked_range(header: str | None, total: int) -> tuple[int, int] | None:
    """Begin and end of what is asked for; all of it where no range, or none that is understood, is.

    None = there is nothing of it.
    """
    match = _ONE.fullmatch((header or "").strip())
    if match is None or match.groups() == ("", ""):
        return 0, total
    first, last = match.groups()
    if not first:
        begin, end = max(0, total - int(last)), total
    else:
        begin, end = int(first), min(total, int(last) + 1) if last else total
    if last and first and int(last) < int(first):
        return 0, total  # that is no range at all
    return (begin, end) if begin < end else None


class PartialBody(Response):
    """Some of a body that lies in memory, for who takes it in time. `at_end` is called in any case."""

    at_end: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        parts: Sequence[Buffer],
        etag: str,
        asked: str | None,
        patience: float,
    ) -> None:
        """parts: the whole. asked: the header Range. patience: seconds for a piece."""
        self._parts = [memoryview(part).cast("B") for part in parts]
        self._total, self._patience = sum(map(len, self._parts)), patience
        found = asked_range(asked, self._total)
        self._begin, self._end = found or (0, 0)
        headers = {"ETag": etag, "Accept-Ranges": "bytes", "Cache-Control": "private, no-cache"}
        headers["Content-Length"] = str(self._end - self._begin)
        status = 200
        if found is None:
            status, headers["Content-Range"] = 416, f"bytes */{self._total}"
        elif self._end - self._begin < self._total:
            status = 206
            headers["Content-Range"] = f"bytes {self._begin}-{self._end - 1}/{self._total}"
        super().__init__(None, status, headers, "application/octet-stream")

    @property
    def n_bytes(self) -> int:
        """That will be sent."""
        return self._end - self._begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            for piece in self._pieces() if scope["method"] != "HEAD" else ():
                try:
                    message = {"type": "http.response.body", "body": piece, "more_body": True}
                    await asyncio.wait_for(send(message), self._patience)
                except asyncio.TimeoutError:
                    raise BodyTooSlow(f"the client received nothing for {self._patience:g} s") from None
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.at_end()

    def _pieces(self) -> Iterator[Buffer]:
        """Small parts together, as each piece has its price."""
        at, small = 0, bytearray()
        for part in self._parts:
            begin, end = max(0, self._begin - at), min(len(part), self._end - at)
            at += len(part)
            if 0 < end - begin < PIECE - len(small):
                small += part[begin:end]
                continue
            if begin < end and small:
                yield bytes(small)
                small.clear()
            for start in range(begin, end, PIECE):
                yield part[start : min(start + PIECE, end)]
        if small:
            yield bytes(small)
