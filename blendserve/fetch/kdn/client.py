"""Plain HTTP to the delivery service that the settings name: kept connections, bounded replies, and what errors mean.

The API key comes from the environment or a file each time a connection is made, and is in no message. Nothing of a reply
is taken on trust: what is larger than was expected is not read, and what is late is cut.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from blendserve.config import KdnConfig
from blendserve.errors import StoreError, StoreUnavailable

KEY = "BLENDSERVE_KDN_KEY"
BESIDE = "beside its url in the settings"
API = "/v1/kdn/collections"


class Unfit(Exception):
    """The service cannot be used as things are; the words follow its name."""


class NotThere(Exception):
    """It has no such thing, or not for this key."""


class WrongReply(Exception):
    """What it sends is no answer to what it was asked."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A response whose body is still to be read."""

    response: http.client.HTTPResponse
    length: int  # bytes of the body
    start: int  # where in the whole it begins
    total: int  # bytes of the whole
    etag: str

    def read_into(self, view: memoryview) -> int:
        """Fill the view as far as anything comes at once; 0 = the connection has ended. Raises OSError."""
        return self.response.readinto(view)


class Client:
    """Connections to one service. Safe to share between threads."""

    def __init__(self, config: KdnConfig) -> None:
        parts = urlsplit(config.url)
        self._host, self._tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._config = config
        self._headers = _headers(config)
        self._context = _context(config) if self._tls else None
        self._idle: list[http.client.HTTPConnection] = []
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    def path(self, *parts: str) -> str:
        """Of the collection that the settings name, and below it."""
        return "/".join((API, *(quote(part, safe="") for part in (self._config.collection, *parts))))

    def get(self, path: str, most: int, headers: dict[str, str] | None = None) -> bytes:
        """A whole body. Raises NotThere, WrongReply (more than `most` bytes, too), Unfit, OSError, HTTPException."""
        with self.asked(path, headers) as reply:
            if reply.length > most:
                raise WrongReply(f"{reply.length:,} bytes where at most {most:,} may be")
            body = bytearray(reply.length)
            fill(reply, memoryview(body))
            return bytes(body)

    @contextmanager
    def asked(
        self,
        path: str,
        headers: dict[str, str] | None = None,
        seconds: float | None = None,
        fresh: bool = False,
    ) -> Iterator[Reply]:
        """A response, on a connection that is kept if its body is read to the end.

        seconds: of silence after which it is given up. fresh: not on one that was kept, and may have ended. Raises
        NotThere, WrongReply, Unfit, OSError, HTTPException.
        """
        connection = self._connection(fresh)
        kept = False
        try:
            connection.timeout = seconds or self._config.deadline_s
            if connection.sock:
                connection.sock.settimeout(connection.timeout)
            connection.request("GET", path, headers={**self._headers, **(headers or {})})
            response = connection.getresponse()
            yield _reply(response)
            kept = response.isclosed() and not response.will_close
        finally:
            self._back(connection, kept)

    def cut(self) -> None:
        """End every connection, those in use too: a thread that waits for one gets an error."""
        with self._lock:
            ended, self._idle = [*self._open, *self._idle], []
        for connection in ended:
            if connection.sock:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _connection(self, fresh: bool) -> http.client.HTTPConnection:
        with self._lock:
            if self._idle and not fresh:
                connection = self._idle.pop()
            elif self._context:
                connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._config.deadline_s, context=self._context
                )
            else:
                connection = http.client.HTTPConnection(
                    self._host, self._port, timeout=self._config.deadline_s
                )
            self._open.add(connection)
        return connection

    def _back(self, connection: http.client.HTTPConnection, keep: bool) -> None:
        with self._lock:
            self._open.discard(connection)
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()


class KdnPeer:
    """The service, as network/connection.py asks it."""

    def __init__(self, config: KdnConfig) -> None:
        self._config = config
        self.where, self.server, self.deadline_s = config.where, config.server, config.deadline_s

    def connect(self) -> Client:
        return Client(self._config)

    def disconnect(self, client: Client) -> None:
        client.cut()

    def explained(self, error: Exception) -> StoreError | str:
        if isinstance(error, StoreError):
            return error
        if isinstance(error, Unfit):
            return str(error)
        if isinstance(error, NotThere):
            return StoreUnavailable(
                f"{self.server} has no collection {self._config.collection!r}, or not for this API key: correct "
                f"collection {BESIDE}, or set the key in {KEY} or secret_file"
            )
        if isinstance(error, TimeoutError):
            return self.late()
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"has a certificate that no authority known here vouches for ({error.verify_message}): name the file "
                f"with that authority's certificate in ca_file {BESIDE}"
            )
        if isinstance(error, OSError):
            why = error.strerror or type(error).__name__
            return f"cannot be reached ({why}): start it, or correct its url in the settings"
        return f"sends what is no answer ({type(error).__name__}: {error})"

    def late(self) -> str:
        return f"does not answer within {self.deadline_s:g} s: see whether it is well, or raise deadline_s {BESIDE}"

    def stale(self, error: Exception) -> bool:
        return isinstance(error, ConnectionError | http.client.RemoteDisconnected)


def fill(reply: Reply, view: memoryview) -> None:
    """Read until the view is full. Raises WrongReply where less comes, OSError."""
    got = 0
    while got < len(view):
        n = reply.read_into(view[got:])
        if not n:
            raise WrongReply(f"{got:,} bytes where {len(view):,} were announced")
        got += n


def _reply(response: http.client.HTTPResponse) -> Reply:
    """Raises NotThere, Unfit, WrongReply."""
    if response.status in (404, 410):
        raise NotThere
    if response.status in (401, 403):
        raise Unfit(
            f"does not accept the API key: set one that may read the collection in {KEY} or secret_file {BESIDE}"
        )
    if response.status == 429 or response.status >= 500:
        raise Unfit(f"refuses for now (status {response.status})")
    length = response.length  # None where it is not announced, as of what never ends
    if response.status not in (200, 206) or length is None:
        raise WrongReply(f"status {response.status} with {'no' if length is None else 'a'} length")
    start, total = 0, length
    if response.status == 206:
        start, total = _range(response.headers.get("Content-Range", ""), length)
    return Reply(response, length, start, total, response.headers.get("ETag", ""))


def _range(text: str, length: int) -> tuple[int, int]:
    """Where a part begins, and the bytes of the whole. Raises WrongReply."""
    try:
        unit, _, rest = text.partition(" ")
        span, _, total = rest.partition("/")
        first, _, last = span.partition("-")
        if unit == "bytes" and int(first) >= 0 and int(last) - int(first) + 1 == length:
            return int(first), int(total)
    except ValueError:
        pass
    raise WrongReply("a part that does not say which")


def _headers(config: KdnConfig) -> dict[str, str]:
    """Raises Unfit for a key file that cannot be read."""
    if config.secret_file is None:
        key = os.environ.get(KEY, "")
    else:
        try:
            key = config.secret_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise Unfit(
                f"cannot be asked, as the file {config.secret_file} cannot be read ({why}): correct secret_file {BESIDE}"
            ) from None
    return {"Authorization": f"Bearer {key}"} if key else {}


def _context(config: KdnConfig) -> ssl.SSLContext:
    """Raises Unfit for a file of authorities that cannot be read."""
    try:
        return ssl.create_default_context(cafile=str(config.ca_file) if config.ca_file else None)
    except OSError as error:
        raise Unfit(
            f"cannot be asked, as the file {config.ca_file} cannot be read ({error.strerror}): correct ca_file {BESIDE}"
        ) from None
