"""Blobs on the server; store/blobs.py has the bytes of both records."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blendserve.errors import CorruptBlob
from blendserve.store.blobs import BlobInfo, BlobStore, check_blob, check_room
from blendserve.store.codecs.base import tables_hash
from blendserve.store.network.connection import Connection
from blendserve.store.usage import UsageLog
from blendserve.store.valkey.client import Client
from blendserve.store.valkey.names import TABLES, tables_name


class ServerBlobs(BlobStore):
    """Every method raises StoreUnavailable."""

    def __init__(self, connection: Connection, usage: UsageLog, check: Callable[[bool], None]) -> None:
        """check: of the store's state, before a call that writes or not. Raises StoreUnavailable."""
        self._connection, self._usage, self._check = connection, usage, check

    def list(self) -> Sequence[BlobInfo]:
        self._check(False)
        found: dict[bytes, bytes] = self._connection.ask(lambda client: client.hgetall(TABLES))
        infos = []
        for hash, raw in sorted(found.items()):
            try:
                infos.append(BlobInfo.from_bytes(hash, raw))
            except ValueError:
                continue
        return infos

    def get(self, hash: bytes) -> bytes | None:
        return self.read(hash)

    def read(self, hash: bytes, seconds: float | None = None) -> bytes | None:
        """Within so many seconds, by default the deadline. Raises CorruptBlob."""
        self._check(False)
        raw: bytes | None = self._connection.ask(lambda client: client.get(tables_name(hash)), seconds)
        return None if raw is None else check_blob(hash, raw)

    def put(self, kind: str, owner: str, raw: bytes, current: bool = True) -> bytes:
        self._check(True)
        hash = tables_hash(raw)
        check_room(self.list(), hash, len(raw))
        info = BlobInfo(hash, kind, owner, len(raw), self._usage.now() if current else 0)

        def job(client: Client) -> None:
            client.set(tables_name(hash), raw)
            client.hset(TABLES, hash, info.to_bytes())

        self._connection.ask(job)
        return hash

    def delete(self, hash: bytes) -> bool:
        self._check(True)

        def job(client: Client) -> bool:
            return bool(client.unlink(tables_name(hash)) + client.hdel(TABLES, hash))

        return self._connection.ask(job)

    def problems(self) -> tuple[tuple[str, str], ...]:
        """(hash in hex, what is wrong) of blobs with which something is."""
        hashes: Sequence[bytes] = self._connection.ask(lambda client: client.hkeys(TABLES))
        found = ((hash.hex(), self._problem(hash)) for hash in sorted(hashes))
        return tuple((hash, problem) for hash, problem in found if problem)

    def _problem(self, hash: bytes) -> str:
        if hash not in {info.hash for info in self.list()}:
            return "what they are for is damaged"
        try:
            return "they are missing" if self.read(hash) is None else ""
        except CorruptBlob as error:
            return str(error)
