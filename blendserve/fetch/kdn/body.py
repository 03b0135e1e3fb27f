"""The body of one chunk, or of several interleaved ones, read from a delivery service layer by layer.

    header -> is it this chunk's, and as long as the directory says?   then, for every layer
    segment -> its checksum                                            go on, or stop: its level has changed

Several chunks come interleaved over one connection: their headers, then the first layer of all, then the second, ...

The cost of a lying peer is bounded: nothing longer than the directory says is read, and the first wrong segment ends a
transfer. A connection that is cut is resumed on a new one, as long as that brings another layer.
"""

from __future__ import annotations

import http.client
from collections.abc import Sequence

from blendserve.errors import CorruptRecord
from blendserve.fetch.incoming import IncomingChunk
from blendserve.fetch.kdn.client import Client, InvalidReply, Reply, read_full
from blendserve.fetch.kdn.manifest import LENGTH, MAX_HEADER_BYTES, interleaved_query
from blendserve.fetch.link import LinkEstimator
from blendserve.store.record import Header, check_segment, decode_header

CUT = (InvalidReply, ConnectionError, http.client.HTTPException)


class Body:
    """The body of one chunk, or of several interleaved ones, each at its level of the moment."""

    def __init__(
        self, client: Client, batch: Sequence[IncomingChunk], link: LinkEstimator, silence_s: float
    ) -> None:
        """silence_s: of the connection, after which the service counts as dead."""
        self._client, self._batch, self._link, self._silence_s = client, batch, link, silence_s
        self._levels = [chunk.level or "" for chunk in batch]
        self._n_bytes = sum(chunk.sizes[level] for chunk, level in zip(batch, self._levels, strict=True))
        self._etag = ""
        self._restart()

    def read(self) -> None:
        """Until all are whole, or the level of one has changed.

        Raises CorruptRecord, StoreVersion, and what the client does.
        """
        again = False
        while True:
            before = self._at
            try:
                self._read_on(again)
                return
            except CUT:
                for chunk in self._batch:
                    chunk.replan()
                if self._is_stale():
                    return
                if again and self._at <= before:
                    raise
                again = True

    def _restart(self) -> None:
        self._at = 0  # bytes that were read and found right
        self._headers: list[Header] = []
        self._n_segments = 0  # of all chunks

    def _is_stale(self) -> bool:
        return any(chunk.level != level for chunk, level in zip(self._batch, self._levels, strict=True))

    def _read_on(self, again: bool) -> None:
        """From where the last connection was cut."""
        headers = {"Range": f"bytes={self._at}-", "If-Range": self._etag} if self._at else None
        asked = self._client.request(self._path(), headers, self._silence_s, again)
        n = len(self._batch)
        with self._link.transfer(), asked as reply:
            self._check(reply)
            for chunk in self._batch[len(self._headers) :]:
                self._read_header(reply, chunk)
            for at in range(self._n_segments, n * self._headers[0].shape.n_layers):
                self._read_segment(reply, *divmod(at, n))
                if at % n == n - 1 and self._is_stale():
                    return

    def _path(self) -> str:
        if len(self._batch) > 1:
            keys = [chunk.key for chunk in self._batch]
            return f"{self._client.path('layers')}?{interleaved_query(zip(keys, self._levels, strict=True))}"
        query = f"?level={self._levels[0]}" if self._levels[0] else ""
        return self._client.path("chunks", self._batch[0].key.hex()) + query

    def _check(self, reply: Reply) -> None:
        """Raises CorruptRecord for a body of another length than it has to have, InvalidReply for another part of it."""
        if reply.total != self._n_bytes:
            raise CorruptRecord(
                self._batch[0].key, f"its body has {reply.total:,} bytes, not {self._n_bytes:,}"
            )
        if reply.start != self._at:
            if reply.start:
                raise InvalidReply(f"the part from {reply.start}, not from {self._at}")
            self._restart()  # it has changed
        self._etag = reply.etag

    def _read_header(self, reply: Reply, chunk: IncomingChunk) -> None:
        size = chunk.sizes[self._levels[len(self._headers)]]
        length = LENGTH.unpack(self._read(reply, LENGTH.size))[0]
        if length > min(MAX_HEADER_BYTES, size):
            raise CorruptRecord(chunk.key, f"its header is said to have {length:,} bytes")
        header = decode_header(chunk.key, self._read(reply, length))
        expected = LENGTH.size + length + header.n_bytes
        if expected != size:
            raise CorruptRecord(chunk.key, f"its header says {expected:,} bytes in all, not {size:,}")
        if self._headers and header.shape.n_layers != self._headers[0].shape.n_layers:
            raise CorruptRecord(chunk.key, "it has not as many layers as the chunks that come with it")
        self._headers.append(header)
        self._at += LENGTH.size + length
        chunk.begin(header)

    def _read_segment(self, reply: Reply, l: int, n: int) -> None:
        chunk, header = self._batch[n], self._headers[n]
        segment = check_segment(chunk.key, header, l, self._read(reply, header.lengths[l]))
        self._at += len(segment)
        self._n_segments += 1
        chunk.add(segment)

    def _read(self, reply: Reply, n_bytes: int) -> bytearray:
        part = bytearray(n_bytes)
        read_full(reply, memoryview(part))
        self._link.arrived(n_bytes)
        return part
