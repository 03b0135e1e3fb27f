"""HTTP client of a delivery service: a connection pool, bounded replies, chunks layer by layer, messages for errors.

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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote, urlsplit

from blendserve.config import KdnConfig
from blendserve.errors import CorruptRecord, StoreError, StoreUnavailable
from blendserve.fetch.incoming import IncomingChunk
from blendserve.fetch.kdn.manifest import LENGTH, MAX_HEADER_BYTES
from blendserve.fetch.link import LinkEstimator
from blendserve.store.bounded import HINT, PeerUnusable, read_file
from blendserve.store.record import Header, check_segment, decode_header

KEY = "BLENDSERVE_COLLECTION_KEY"
API = "/v1/collections"
CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


class NotFoundReply(Exception):
    """The service has no such resource, or not for this API key."""


class InvalidReply(Exception):
    """The reply does not fit the request."""


CUT = (InvalidReply, ConnectionError, http.client.HTTPException)  # of a body
BLOCK_BYTES = 16 << 20  # of memory that is taken before its bytes have come


@dataclass(frozen=True, slots=True)
class Reply:
    """A response whose body is still to be read."""

    response: http.client.HTTPResponse
    length: int  # bytes of the body
    start: int  # where in the whole it begins
    total: int  # bytes of the whole
    etag: str

    def read(self, n_bytes: int) -> bytearray:
        """The next `n_bytes` of the body. Raises InvalidReply if the body ends before, OSError."""
        part, got = bytearray(min(n_bytes, BLOCK_BYTES)), 0
        while got < n_bytes:
            if got == len(part):
                part += bytes(min(n_bytes - got, BLOCK_BYTES))
            with memoryview(part) as view:
                n = self.response.readinto(view[got:])
            if not n:
                raise InvalidReply(f"{got:,} bytes where {n_bytes:,} were announced")
            got += n
        return part


class DeliveryClient:
    """Connections to one service. Thread-safe."""

    def __init__(self, config: KdnConfig) -> None:
        """Raises PeerUnusable for a secret or CA file that cannot be read."""
        parts = urlsplit(config.url)
        where = parts.hostname or "", parts.port
        self._config = config
        self._make: Callable[[], http.client.HTTPConnection] = partial(http.client.HTTPConnection, *where)
        if parts.scheme == "https":
            self._make = partial(http.client.HTTPSConnection, *where, context=ssl.create_default_context())
        secret = config.secret_file
        key = read_file(secret, "secret_file").strip() if secret else os.environ.get(KEY, "")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._idle: list[http.client.HTTPConnection] = []
        self._open: set[http.client.HTTPConnection] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    def path(self, *parts: str) -> str:
        """The path of the settings' collection, or of a resource in it."""
        return "/".join((API, *(quote(part, safe="") for part in (self._config.collection, *parts))))

    def get(self, path: str, max_bytes: int, headers: dict[str, str] | None = None) -> bytes:
        """A whole body. Raises InvalidReply if it is larger than `max_bytes`, and what `request` does."""
        with self.request(path, headers) as reply:
            if reply.length > max_bytes:
                raise InvalidReply(f"{reply.length:,} bytes where at most {max_bytes:,} may be")
            return bytes(reply.read(reply.length))

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
        with self._lock:
            connection = self._idle.pop() if self._idle and not is_new else self._make()
            self._open.add(connection)
        is_reusable = False
        try:
            connection.timeout = silence_s or self._config.deadline_s
            if connection.sock:
                connection.sock.settimeout(connection.timeout)
            connection.request("GET", path, headers={**self._headers, **(headers or {})})
            if self._is_closed:
                raise ConnectionAbortedError("the client is closed")
            response = connection.getresponse()
            yield _reply(response)
            is_reusable = response.isclosed() and not response.will_close
        finally:
            with self._lock:
                self._open.discard(connection)
                self._idle += [connection] if is_reusable else []
            if not is_reusable:
                connection.close()

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """All requests of the block end within this time, however slowly bytes come. Raises PeerUnusable."""
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self.close()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception as error:
            if is_late.is_set():
                raise PeerUnusable(
                    f"is too slow: its answers took more than {seconds:.0f} s in all"
                ) from error
            raise
        finally:
            timer.cancel()

    def close(self) -> None:
        """Shut down every connection: a thread that waits for one gets an error, and so do later requests."""
        self._is_closed = True
        with self._lock:
            ended, self._idle = [*self._open, *self._idle], []
        for connection in ended:
            if connection.sock:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)


def read_chunks(
    client: DeliveryClient, batch: Sequence[IncomingChunk], link: LinkEstimator, silence_s: float
) -> None:
    """Read one chunk, or several interleaved ones, until all are whole or the level of one changes.

    The cost of a lying peer is bounded: nothing longer than the directory says is read, and the first wrong segment ends
    a transfer. A connection that is cut is resumed on a new one, as long as that brings more. silence_s: of the
    connection, after which the service counts as dead. Raises CorruptRecord, StoreVersion, and what the client does.
    """
    levels = [chunk.level or "" for chunk in batch]
    n_bytes = sum(chunk.sizes[level] for chunk, level in zip(batch, levels, strict=True))
    path, etag, is_resumed = _path(client, batch, levels), "", False
    at, parser = 0, _parse(batch, levels)  # at: bytes that were read and found right
    wanted = next(parser)
    while wanted is not None:
        begun_at = at
        part = {"Range": f"bytes={at}-", "If-Range": etag} if at else None
        try:
            with link.transfer(), client.request(path, part, silence_s, is_resumed) as reply:
                if reply.total != n_bytes:
                    why = f"its body has {reply.total:,} bytes, not {n_bytes:,}"
                    raise CorruptRecord(batch[0].key, why)
                if reply.start not in (0, at):
                    raise InvalidReply(f"the part from {reply.start}, not from {at}")
                if reply.start != at:  # it has changed
                    at, parser = 0, _parse(batch, levels)
                    wanted = next(parser)
                etag = reply.etag
                while wanted is not None:
                    piece = reply.read(wanted)
                    link.arrived(wanted)
                    at, wanted = at + wanted, parser.send(piece)
        except CUT:
            for chunk in batch:
                chunk.replan()
            if _has_changed(batch, levels):
                return
            if is_resumed and at <= begun_at:
                raise
            is_resumed = True


def _parse(batch: Sequence[IncomingChunk], levels: Sequence[str]) -> Generator[int | None, bytearray, None]:
    """The pieces of a body in order: yields the bytes of the next one, is sent it, checks it; None at the end.

    length, header -> is it this chunk's, and as long as the directory says?   of each chunk, then for every layer
    segment        -> its checksum                                             of each; go on, unless a level has changed

    Raises CorruptRecord, StoreVersion.
    """
    headers = list[Header]()
    for chunk, level in zip(batch, levels, strict=True):
        length, size = LENGTH.unpack((yield LENGTH.size))[0], chunk.sizes[level]
        if length > min(MAX_HEADER_BYTES, size):
            raise CorruptRecord(chunk.key, f"its header is said to have {length:,} bytes")
        header = decode_header(chunk.key, (yield length))
        expected = LENGTH.size + length + header.n_bytes
        if expected != size:
            raise CorruptRecord(chunk.key, f"its header says {expected:,} bytes in all, not {size:,}")
        headers.append(header)
        if header.shape.n_layers != headers[0].shape.n_layers:
            raise CorruptRecord(chunk.key, "it has not as many layers as the chunks that come with it")
        chunk.begin(header)
    for l in range(headers[0].shape.n_layers):
        for chunk, header in zip(batch, headers, strict=True):
            chunk.add(check_segment(chunk.key, header, l, (yield header.lengths[l])))
        if _has_changed(batch, levels):
            break
    yield None


def _has_changed(batch: Sequence[IncomingChunk], levels: Sequence[str]) -> bool:
    return any(chunk.level != level for chunk, level in zip(batch, levels, strict=True))


def _path(client: DeliveryClient, batch: Sequence[IncomingChunk], levels: Sequence[str]) -> str:
    if len(batch) > 1:
        chunks = (f"{chunk.key.hex()}:{quote(level)}" for chunk, level in zip(batch, levels, strict=True))
        return f"{client.path('layers')}?chunks={','.join(chunks)}"
    query = f"?level={levels[0]}" if levels[0] else ""
    return client.path("chunks", batch[0].key.hex()) + query


class KdnPeer:
    """The service, as a Peer of store/bounded.py."""

    def __init__(self, config: KdnConfig) -> None:
        self._config = config
        self.where, self.server, self.deadline_s = config.where, config.server, config.deadline_s

    def connect(self) -> DeliveryClient:
        return DeliveryClient(self._config)

    def disconnect(self, client: DeliveryClient) -> None:
        client.close()

    def explain(self, error: Exception) -> StoreError | str:
        match error:
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
                    "file with that authority's certificate in the environment variable SSL_CERT_FILE"
                )
            case OSError():
                why = error.strerror or type(error).__name__
                return f"cannot be reached ({why}): start it, or correct its location in the settings"
        return f"sends an invalid reply ({type(error).__name__}: {error})"

    def timeout_reason(self) -> str:
        return f"does not answer within {self.deadline_s:g} s: see whether it is well, or raise deadline_s {HINT}"

    def is_stale(self, error: Exception) -> bool:
        return isinstance(error, ConnectionError | http.client.RemoteDisconnected)


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
        match = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        start, last, total = map(int, match.groups()) if match else (0, -1, 0)
        if last - start + 1 != length or not match:
            raise InvalidReply("a partial reply without a valid Content-Range")
    return Reply(response, length, start, total, response.headers.get("ETag", ""))
