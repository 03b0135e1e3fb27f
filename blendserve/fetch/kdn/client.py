"""HTTP client of a delivery service: a connection pool, bounded replies, and messages for errors.

The API key is read from the environment or a file for each client, and no message contains it. A reply that is larger
than expected is not read; a reply that is late is cut off.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote, urlsplit

from blendserve.config import KdnConfig
from blendserve.errors import StoreError, StoreUnavailable
from blendserve.store.bounded import HINT, PeerUnusable, read_file

KEY = "BLENDSERVE_KDN_KEY"
API = "/v1/kdn/collections"


class NotFoundReply(Exception):
    """The service has no such resource, or not for this API key."""


class InvalidReply(Exception):
    """The reply does not fit the request."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A response whose body is still to be read."""

    response: http.client.HTTPResponse
    length: int  # bytes of the body
    start: int  # where in the whole it begins
    total: int  # bytes of the whole
    etag: str

    def read_into(self, view: memoryview) -> int:
        """Read available bytes -> their number; 0: the connection has ended. Raises OSError."""
        return self.response.readinto(view)


class Client:
    """Connections to one service. Thread-safe."""

    def __init__(self, config: KdnConfig) -> None:
        parts = urlsplit(config.url)
        where = parts.hostname or "", parts.port
        self._config = config
        self._make: Callable[[], http.client.HTTPConnection] = partial(http.client.HTTPConnection, *where)
        if parts.scheme == "https":
            self._make = partial(http.client.HTTPSConnection, *where, context=_context(config))
        self._headers = _headers(config)
        self._idle: list[http.client.HTTPConnection] = []
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    def path(self, *parts: str) -> str:
        """The path of the settings' collection, or of a resource in it."""
        return "/".join((API, *(quote(part, safe="") for part in (self._config.collection, *parts))))

    def get(self, path: str, max_bytes: int, headers: dict[str, str] | None = None) -> bytes:
        """A whole body. Raises InvalidReply if it is larger than `max_bytes`, and what `request` does."""
        with self.request(path, headers) as reply:
            if reply.length > max_bytes:
                raise InvalidReply(f"{reply.length:,} bytes where at most {max_bytes:,} may be")
            body = bytearray(reply.length)
            read_full(reply, memoryview(body))
            return bytes(body)

    @contextmanager
    def request(
        self,
        path: str,
        headers: dict[str, str] | None = None,
        silence_s: float | None = None,
        is_new: bool = False,
    ) -> Iterator[Reply]:
        """A response; its connection returns to the pool if the body is read to the end.

        silence_s: timeout of each read. is_new: use a new connection, as one of the pool may have ended. Raises
        NotFoundReply, InvalidReply, PeerUnusable, OSError, HTTPException.
        """
        connection = self._connection(is_new)
        is_reusable = False
        try:
            connection.timeout = silence_s or self._config.deadline_s
            if connection.sock:
                connection.sock.settimeout(connection.timeout)
            connection.request("GET", path, headers={**self._headers, **(headers or {})})
            response = connection.getresponse()
            yield _reply(response)
            is_reusable = response.isclosed() and not response.will_close
        finally:
            self._release(connection, is_reusable)

    def close(self) -> None:
        """Shut down every connection: a thread that waits for one gets an error."""
        with self._lock:
            ended, self._idle = [*self._open, *self._idle], []
        for connection in ended:
            if connection.sock:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _connection(self, is_new: bool) -> http.client.HTTPConnection:
        with self._lock:
            connection = self._idle.pop() if self._idle and not is_new else self._make()
            self._open.add(connection)
        return connection

    def _release(self, connection: http.client.HTTPConnection, is_reusable: bool) -> None:
        with self._lock:
            self._open.discard(connection)
            if is_reusable:
                self._idle.append(connection)
        if not is_reusable:
            connection.close()


class KdnPeer:
    """The service, as a Peer of store/bounded.py."""

    def __init__(self, config: KdnConfig) -> None:
        self._config = config
        self.where, self.server, self.deadline_s = config.where, config.server, config.deadline_s

    def connect(self) -> Client:
        return Client(self._config)

    def disconnect(self, client: Client) -> None:
        client.close()

    def explain(self, error: Exception) -> StoreError | str:
        match error:
            case StoreError():
                return error
            case PeerUnusable():
                return str(error)
            case NotFoundReply():
                return StoreUnavailable(
                    f"{self.server} has no collection {self._config.collection!r}, or not for this API key: correct "
                    f"collection {HINT}, or set the key in {KEY} or secret_file"
                )
            case TimeoutError():
                return self.timeout_reason()
            case ssl.SSLCertVerificationError():
                return (
                    f"has a certificate that no authority known here vouches for ({error.verify_message}): name the "
                    f"file with that authority's certificate in ca_file {HINT}"
                )
            case OSError():
                why = error.strerror or type(error).__name__
                return f"cannot be reached ({why}): start it, or correct its location in the settings"
        return f"sends an invalid reply ({type(error).__name__}: {error})"

    def timeout_reason(self) -> str:
        return f"does not answer within {self.deadline_s:g} s: see whether it is well, or raise deadline_s {HINT}"

    def is_stale(self, error: Exception) -> bool:
        return isinstance(error, ConnectionError | http.client.RemoteDisconnected)


def read_full(reply: Reply, view: memoryview) -> None:
    """Fill the view. Raises InvalidReply if the body ends before, OSError."""
    got = 0
    while got < len(view):
        n = reply.read_into(view[got:])
        if not n:
            raise InvalidReply(f"{got:,} bytes where {len(view):,} were announced")
        got += n


def _reply(response: http.client.HTTPResponse) -> Reply:
    """Raises NotFoundReply, PeerUnusable, InvalidReply."""
    if response.status in (404, 410):
        raise NotFoundReply
    if response.status in (401, 403):
        raise PeerUnusable(
            f"does not accept the API key: set one that may read the collection in {KEY} or secret_file {HINT}"
        )
    if response.status == 429 or response.status >= 500:
        raise PeerUnusable(f"refuses for now (status {response.status})")
    length = response.length  # None for a body of unknown length
    if response.status not in (200, 206) or length is None:
        raise InvalidReply(f"status {response.status} with {'no' if length is None else 'a'} length")
    start, total = 0, length
    if response.status == 206:
        start, total = _range(response.headers.get("Content-Range", ""), length)
    return Reply(response, length, start, total, response.headers.get("ETag", ""))


def _range(text: str, length: int) -> tuple[int, int]:
    """Content-Range -> start of the part, and bytes of the whole. Raises InvalidReply."""
    match = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", text)
    first, last, total = map(int, match.groups()) if match else (0, -1, 0)
    if not match or last - first + 1 != length:
        raise InvalidReply("a partial reply without a valid Content-Range")
    return first, total


def _headers(config: KdnConfig) -> dict[str, str]:
    """Raises PeerUnusable for a file that cannot be read."""
    secret = config.secret_file
    key = read_file(secret, "secret_file").strip() if secret else os.environ.get(KEY, "")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _context(config: KdnConfig) -> ssl.SSLContext:
    """Raises PeerUnusable for a CA file that cannot be read."""
    try:
        return ssl.create_default_context(cafile=str(config.ca_file) if config.ca_file else None)
    except OSError as error:
        raise PeerUnusable(
            f"cannot be asked, as the file {config.ca_file} cannot be read ({error.strerror}): correct ca_file {HINT}"
        ) from None
