"""Limits of connections: a client that sends or reads nothing is disconnected, and open files never run out.

uvicorn has no timeout but for idle keep-alive connections. A request's body has its own (middleware.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

HEAD_S = 15.0  # for the head of a request, and for the rest of a body that was not read
READ_S = 30.0  # in which a client must take a part of what was sent
LOG_S = 60.0  # between two lines about connections that cannot be accepted
MAX_FILES = 8192  # open files of the process, as far as its hard limit allows

log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise the soft limit of open files up to MAX_FILES -> the number of files that the process may open."""
    if resource is None:
        return MAX_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MAX_FILES:
        return MAX_FILES
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


class Connections(ServerState):
    """The connections of a server. Above `most`, the one that has waited longest without a request is closed."""

    def __init__(self, n_files: int) -> None:
        """n_files: that the process may open; half of them are for stores, models and logs."""
        super().__init__()
        self.most = n_files // 2
        self.backlog = max(1, n_files // 16)  # accepted at once, before any is closed
        self.waiting: dict[Connection, None] = {}  # without a running request, the oldest first

    def evict(self) -> None:
        """Close one connection if there are too many."""
        if len(self.connections) > self.most:
            oldest = next(iter(self.waiting))
            del self.waiting[oldest]
            oldest.transport.abort()


class Connection(H11Protocol):
    """A connection that is closed when its client makes no progress."""

    server_state: Connections
    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.server_state.waiting[self] = None
        self._head_timer = self.loop.call_later(HEAD_S, transport.abort)
        self.server_state.evict()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # else the client may go on sending a refused body
        is_read = self.conn.their_state is not h11.SEND_BODY
        self._watch_head(is_idle=is_read)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.server_state.waiting.pop(self, None)
        self._stop_head_timer()
        self._stop_read_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_read_timer()

    def _watch_head(self, is_idle: bool = False) -> None:
        """Time the head that is arriving. is_idle: nothing of it has come; uvicorn's keep-alive timeout runs."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.server_state.waiting.pop(self, None)
            self._stop_head_timer()
        elif not self.transport.is_closing():
            self.server_state.waiting.setdefault(self)
            if self._head_timer is None and not is_idle:
                self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _watch_reader(self, n_unread: int) -> None:
        """Close the connection unless fewer than `n_unread` bytes are left at the next look."""

        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left < n_unread:
                self._watch_reader(left)
            else:
                self.transport.abort()

        self._read_timer = self.loop.call_later(READ_S, look)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None


class AcceptErrors:
    """An exception handler of an event loop that logs failures to accept a connection once in LOG_S."""

    def __init__(self) -> None:
        self._logged = -LOG_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and "accept" in context["message"]):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._logged >= LOG_S:
            self._logged = time.monotonic()
            log.error(
                "cannot accept connections: %s; raise the limit of open files (ulimit -n)", error.strerror
            )
