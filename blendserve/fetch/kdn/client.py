"""Reads one collection: its description, files by hash, and chunks layer by layer; explains errors."""

from __future__ import annotations

from collections.abc import Generator

import httpx

from blendserve.config import KdnConfig
from blendserve.errors import CorruptRecord, StoreError, StoreUnavailable
from blendserve.fetch.incoming import IncomingChunk
from blendserve.fetch.kdn.files import CUT, KEY, Files, FsspecFiles, HttpFiles, InvalidReply, NoFile
from blendserve.fetch.kdn.manifest import (
    CHUNKS,
    DIRECTORY,
    LENGTH,
    MAX_DIRECTORY_BYTES,
    MAX_HEADER_BYTES,
    ChunkFile,
    Collection,
    Directory,
)
from blendserve.fetch.kdn.signature import NotSigned, is_signed
from blendserve.fetch.link import LinkEstimator
from blendserve.store.bounded import HINT, PeerUnusable, read_file
from blendserve.store.codecs.base import tables_hash, tables_hasher
from blendserve.store.record import check_segment, decode_header

MAX_DESCRIPTION = 16 << 20  # bytes


class CollectionClient:
    """The files of a collection, checked. Thread-safe. Its errors are those of files.py, and NotSigned."""

    def __init__(self, config: KdnConfig) -> None:
        """Raises PeerUnusable for settings that cannot be used."""
        self.files: Files = HttpFiles(config) if config.is_http else FsspecFiles(config)
        self._config = config
        self._name = config.collection
        self._trust = read_file(config.trust, "trust").encode() if config.trust else None

    def description(self) -> Collection:
        """Read the present description."""
        collection = Collection.from_json(self.files.get(f"{self._name}.json", MAX_DESCRIPTION))
        if collection.name != self._name:
            raise InvalidReply(f"{self._name}.json describes {collection.name!r}")
        if self._trust and not is_signed(collection.signed_bytes, collection.signature, self._trust):
            raise NotSigned(
                f"has a description that the key in {self._config.trust} did not sign: ask its publisher, or correct "
                f"trust {HINT}"
            )
        return collection

    def directory(self, collection: Collection) -> Directory:
        """Read the directory of this version."""
        n_bytes = min(collection.directory_bytes, MAX_DIRECTORY_BYTES)
        return Directory(self.get(DIRECTORY, collection.directory, n_bytes), len(collection.levels))

    def get(self, kind: str, hash: str, max_bytes: int) -> bytes:
        """Read a file that is named by its hash, and check it."""
        raw = self.files.get(f"{kind}/{hash}", max_bytes)
        if tables_hash(raw).hex() != hash:
            raise InvalidReply(f"{kind}/{hash} is damaged")
        return raw

    def read_chunk(self, chunk: IncomingChunk, body: ChunkFile, link: LinkEstimator) -> None:
        """Read a chunk until it is whole or its level changes.

        The cost of a malicious server is bounded: no more is read than the directory says, and the first wrong segment
        ends a transfer. After a lost connection the transfer resumes on a new one, as long as that brings more bytes.
        Also raises CorruptRecord, StoreVersion.
        """
        level = chunk.level
        name = f"{CHUNKS}/{body.hash.hex()}"
        at = 0  # bytes that were read and found right
        is_resumed = False
        parser = _parse(chunk, body, is_hashed=self._trust is not None)
        wanted = next(parser)
        while wanted is not None:
            begun_at = at
            try:
                with link.transfer(), self.files.open(name, at, body.n_bytes) as file:
                    if file.total != body.n_bytes:
                        raise CorruptRecord(chunk.key, f"it has {file.total:,} bytes, not {body.n_bytes:,}")
                    if file.start > at:
                        raise InvalidReply(f"the part from {file.start}, not from {at}")
                    file.read(at - file.start)  # of a server that does not support ranges
                    while wanted is not None:
                        piece = file.read(wanted)
                        link.arrived(wanted)
                        at += wanted
                        wanted = parser.send(piece)
            except CUT:
                chunk.on_layer(chunk)
                if chunk.level != level:
                    return
                if is_resumed and at <= begun_at:
                    raise
                is_resumed = True

    def close(self) -> None:
        """Cut all connections; later calls fail."""
        self.files.close()


def _parse(chunk: IncomingChunk, body: ChunkFile, is_hashed: bool) -> Generator[int | None, bytearray, None]:
    """The pieces of a body in order: yields the bytes of the next one, is sent it, checks it; None at the end.

    length, header -> is it this chunk's, and as long as the directory says?
    segment        -> its checksum; go on, unless the level has changed

    is_hashed: the last segment counts only if the whole has the hash of the directory. A prompt needs every segment, so
    none rests on forged ones. Raises CorruptRecord, StoreVersion.
    """
    level = chunk.level
    hasher = tables_hasher()
    prefix = yield LENGTH.size
    length = LENGTH.unpack(prefix)[0]
    if length > min(MAX_HEADER_BYTES, body.n_bytes):
        raise CorruptRecord(chunk.key, f"its header is said to have {length:,} bytes")
    raw = yield length
    header = decode_header(chunk.key, raw)
    expected = LENGTH.size + length + header.n_bytes
    if expected != body.n_bytes:
        raise CorruptRecord(chunk.key, f"its header says {expected:,} bytes in all, not {body.n_bytes:,}")
    hasher.update(prefix + raw)
    chunk.begin(header)
    for l, n_bytes in enumerate(header.lengths):
        segment = check_segment(chunk.key, header, l, (yield n_bytes))
        if is_hashed:
            hasher.update(segment)
            if l == header.shape.n_layers - 1 and hasher.digest() != body.hash:
                raise CorruptRecord(chunk.key, "its bytes are not those that were published")
        chunk.add(segment)
        if chunk.level != level:
            break
    yield None


class KdnPeer:
    """The server of a collection, as a Peer of store/bounded.py."""

    def __init__(self, config: KdnConfig) -> None:
        self._config = config
        self.where = config.where
        self.server = config.server
        self.deadline_s = config.deadline_s

    def connect(self) -> CollectionClient:
        return CollectionClient(self._config)

    def disconnect(self, client: CollectionClient) -> None:
        client.close()

    def explain(self, error: Exception) -> StoreError | str:
        match error:
            case NotSigned():
                return StoreUnavailable(f"{self.server} {error}")
            case PeerUnusable():
                return str(error)
            case NoFile():
                return StoreUnavailable(
                    f"{self.server} lacks a file, or hides it from this API key ({error}): correct its location, or set "
                    f"the key in {KEY} or secret_file {HINT}"
                )
            case TimeoutError() | httpx.TimeoutException():
                return self.timeout_reason()
            case OSError() | httpx.NetworkError():
                return f"cannot be reached ({error}): start it, or correct its location or SSL_CERT_FILE"
        return f"sends an invalid reply ({type(error).__name__}: {error})"

    def timeout_reason(self) -> str:
        return f"does not answer within {self.deadline_s:g} s: see whether it is well, or raise deadline_s {HINT}"

    def is_stale(self, error: Exception) -> bool:
        return isinstance(error, ConnectionError | httpx.NetworkError | httpx.RemoteProtocolError)
