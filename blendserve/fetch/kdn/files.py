"""Files of a collection over HTTP, or from whatever fsspec reads: a folder, S3, Google Cloud Storage, Azure.

A body longer than expected is not read, and a shorter one is an error. `close` cuts every connection: a thread that waits
for one gets an error. No message contains the API key, or the query of signed URLs.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any
from urllib.parse import quote
from weakref import WeakSet

import fsspec
import httpx

from blendserve.config import KdnConfig
from blendserve.store.bounded import PeerUnusable, read_file

KEY = "BLENDSERVE_COLLECTION_KEY"
MAX_CONNECTIONS = 16  # that are kept
IDLE_S = 60.0  # that a connection is kept
BLOCK_BYTES = 8 << 20  # of a file that fsspec reads at a time
# statuses; S3 answers 403 for a missing file to a client that may not list files
NO_FILE = (
    401,
    403,
    404,
    410,
)
CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


class NoFile(Exception):
    """The server lacks the file, or hides it from this API key."""


class InvalidReply(Exception):
    """The reply does not fit the request."""


CUT = (InvalidReply, ConnectionError, httpx.NetworkError, httpx.RemoteProtocolError)  # of a body


class FileBody:
    """The rest of a file, read as it arrives."""

    def __init__(self, start: int, total: int, pieces: Iterator[bytes]) -> None:
        """start: where in the file the body begins. total: bytes of the file."""
        self.start = start
        self.total = total
        self._pieces = pieces
        self._rest = memoryview(b"")

    def read(self, n_bytes: int) -> bytearray:
        """Read the next bytes. Raises InvalidReply if there are fewer, and the library's errors."""
        part = bytearray()
        while True:
            n_left = n_bytes - len(part)
            part += self._rest[:n_left]
            self._rest = self._rest[n_left:]
            if len(part) == n_bytes:
                return part
            self._rest = memoryview(next(self._pieces, b""))
            if not self._rest:
                raise InvalidReply(f"{len(part):,} bytes of {n_bytes:,} that were announced")


class HttpFiles:
    """Files of one server, by HTTP/1.1. Thread-safe."""

    def __init__(self, config: KdnConfig) -> None:
        """Raises PeerUnusable for a secret file that cannot be read."""
        file = config.secret_file
        secret = read_file(file, "secret_file").strip() if file else os.environ.get(KEY, "")
        self._url = config.url
        self._query = secret if secret.startswith("?") else ""
        headers = {"Accept-Encoding": "identity"}
        if secret and not self._query:
            headers["Authorization"] = f"Bearer {secret}"
        self._http = httpx.Client(
            headers=headers,
            verify=_authorities(os.environ.get("SSL_CERT_FILE")),
            timeout=config.deadline_s,
            limits=httpx.Limits(max_keepalive_connections=MAX_CONNECTIONS, keepalive_expiry=IDLE_S),
            follow_redirects=True,
        )
        logging.getLogger("httpx").addFilter(_without_queries)
        self._sockets = WeakSet[socket.socket]()
        self._is_closed = False

    def get(self, name: str, max_bytes: int) -> bytes:
        """Read a whole file. Raises InvalidReply if it is larger, and the errors of `open`."""
        with self.open(name, 0, max_bytes) as body:
            if body.total > max_bytes:
                raise InvalidReply(f"{body.total:,} bytes, more than the {max_bytes:,} that are allowed")
            return bytes(body.read(body.total))

    @contextmanager
    def open(self, name: str, start: int, end: int, is_part: bool = False) -> Iterator[FileBody]:
        """Open a file from `start` to `end`. is_part: the file goes on after `end`, and the rest is not requested.

        Raises NoFile, PeerUnusable, InvalidReply, and the library's errors.
        """
        if self._is_closed:
            raise ConnectionAbortedError("the client is closed")
        url = f"{self._url}/{quote(name)}{self._query}"
        headers = {"Range": f"bytes={start}-{end - 1 if is_part else ''}"} if start or is_part else {}
        extensions = {"trace": self._trace}
        with self._http.stream("GET", url, headers=headers, extensions=extensions) as reply:
            yield _body(reply)

    def close(self) -> None:
        """Cut all connections; later calls fail."""
        self._is_closed = True
        for connection in list(self._sockets):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Remember each new connection."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self._sockets.add(info["return_value"].get_extra_info("socket"))
            if self._is_closed:
                self.close()


class FsspecFiles:
    """Files of a folder or an object store. Thread-safe."""

    def __init__(self, config: KdnConfig) -> None:
        """Raises PeerUnusable without the package of such an object store."""
        try:
            self._files, self._root = fsspec.url_to_fs(config.url)
        except (ImportError, ValueError) as error:
            why = (
                f"cannot be read here ({error}): `pip install '.[cloud]'` in your checkout adds S3 and others"
            )
            raise PeerUnusable(why) from None
        self._is_closed = False

    def get(self, name: str, max_bytes: int) -> bytes:
        """Read a whole file, as HttpFiles does."""
        raw = self._read(name, 0, max_bytes + 1)
        if len(raw) > max_bytes:
            raise InvalidReply(f"more than the {max_bytes:,} bytes that are allowed")
        return raw

    @contextmanager
    def open(self, name: str, start: int, end: int, is_part: bool = False) -> Iterator[FileBody]:
        """Open a part of a file, as HttpFiles does. The file's size is not requested."""
        blocks = range(start, end, BLOCK_BYTES)
        yield FileBody(start, end, (self._read(name, at, min(end, at + BLOCK_BYTES)) for at in blocks))

    def close(self) -> None:
        """Make later reads fail; a running one ends by itself."""
        self._is_closed = True

    def _read(self, name: str, start: int, end: int) -> bytes:
        """Read these bytes; fewer at the end of the file."""
        if self._is_closed:
            raise ConnectionAbortedError("the client is closed")
        try:
            return bytes(self._files.cat_file(f"{self._root}/{name}", start=start, end=end))
        except (FileNotFoundError, PermissionError) as error:
            raise NoFile(error.strerror or str(error)) from None
        except Exception as error:  # each library has errors of its own
            raise ConnectionError(f"{type(error).__name__}: {error}") from error


Files = HttpFiles | FsspecFiles


def _body(reply: httpx.Response) -> FileBody:
    """Return the body of a reply. Raises NoFile, PeerUnusable, InvalidReply."""
    status = reply.status_code
    headers = reply.headers
    if status in NO_FILE:
        raise NoFile(f"status {status}")
    if status == 429 or status >= 500:
        raise PeerUnusable(f"refuses for now (status {status})")
    length = headers.get("Content-Length", "")
    is_plain = headers.get("Content-Encoding", "identity") == "identity"
    if status not in (200, 206) or not is_plain or not length.isdecimal() or len(length) > 18:
        raise InvalidReply(f"status {status}, or a body of another encoding, or of unknown length")
    start = 0
    total = int(length)
    if status == 206:
        match = CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
        if not match or int(match[2]) - int(match[1]) + 1 != total:
            raise InvalidReply("a partial reply without a valid Content-Range")
        start = int(match[1])
        total = int(match[3])
    return FileBody(start, total, reply.iter_raw())


def _without_queries(record: logging.LogRecord) -> bool:
    """Hide queries from the log of httpx, as those of signed URLs are secrets."""
    if isinstance(record.args, tuple):
        record.args = tuple(a.copy_with(query=None) if isinstance(a, httpx.URL) else a for a in record.args)
    return True


@cache
def _authorities(file: str | None) -> ssl.SSLContext:
    """Load the system's certificate authorities, once per value of SSL_CERT_FILE, which OpenSSL reads itself."""
    return ssl.create_default_context()
