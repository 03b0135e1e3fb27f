"""The published collections of a store. They are blobs of that store (store/blobs.py), so services can share them.

    description   blob of kind "kdn" and owner NAME        the newest one is the collection
    piece         blob of kind "kdn" and owner ""          of the index's files and of the directory

Every kind of store supports blobs, `store merge` copies them, and their names are their checksums. Publishing writes the
pieces, then the description, then deletes pieces that no collection refers to. So a kill leaves the old or the new
collection. A later publication deletes the pieces of a killed one after an hour, as another publisher may still write.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from blendserve.errors import CorruptBlob, NotFound, StoreUnavailable
from blendserve.fetch.kdn.manifest import Blob, Collection, Directory, read_directory
from blendserve.registry import DELIVERED
from blendserve.store import KVStore
from blendserve.store.blobs import BlobInfo
from blendserve.store.codecs.base import tables_hash

PIECE_BYTES = 4 << 20
ORPHANED_NS = 3600 * 10**9
FRESH_S = 2.0  # until a publication of another process is seen
MAX_DIRECTORIES = 8


class Catalogue:
    """The collections of one store. Thread-safe."""

    def __init__(
        self, store: KVStore, fresh_s: float = FRESH_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._fresh, self._now = store, fresh_s, now
        self._seen: dict[str, tuple[bytes, Collection]] = {}  # by name, with the description's hash
        self._looked = float("-inf")
        self._directories: dict[Blob, Directory] = {}
        self._lock = threading.Lock()

    def collections(self, anew: bool = False) -> Mapping[str, Collection]:
        """By name. Reads changes from the store at most every `fresh_s` seconds. Raises StoreError."""
        with self._lock:
            if anew or self._now() - self._looked >= self._fresh:
                self._seen = self._read()
                self._looked = self._now()
            return {name: found for name, (_, found) in sorted(self._seen.items())}

    def collection(self, name: str) -> Collection:
        """The collection as stored now. Raises NotFound, StoreError."""
        found = self.collections(anew=True).get(name)
        if found is None:
            raise NotFound(f"there is no collection {name!r}: see `blendserve kdn list`")
        return found

    def write(self, collection: Collection) -> None:
        """Store a description, replacing the one of that name. Its blobs are stored before. Raises StoreError."""
        new = self._store.blobs.put(DELIVERED, collection.name, collection.to_json())
        self._drop(lambda info: info.owner == collection.name and info.hash != new)

    def retire(self, name: str) -> None:
        """Delete a collection and its index, but no chunks. Raises NotFound, StoreError."""
        self.collection(name)
        self._drop(lambda info: info.owner == name)

    def write_blob(self, raw: bytes) -> Blob:
        """Store bytes in pieces -> their reference. Raises StoreFull, StoreUnavailable."""
        pieces = [raw[at : at + PIECE_BYTES] for at in range(0, len(raw), PIECE_BYTES)]
        hashes = [tables_hash(piece) for piece in pieces]
        there = {info.hash for info in self._store.blobs.list()}
        for hash, piece in zip(hashes, pieces, strict=True):
            if hash not in there:
                self._store.blobs.put(DELIVERED, "", piece)
        return Blob(len(raw), tuple(hash.hex() for hash in hashes))

    def piece(self, hash: str) -> bytes:
        """One piece. Raises StoreUnavailable if it is missing or damaged."""
        try:
            raw = self._store.blobs.get(bytes.fromhex(hash))
        except CorruptBlob as error:
            raise StoreUnavailable(f"a part of a collection is damaged: publish it again ({error})") from None
        if raw is None:
            raise StoreUnavailable("a part of a collection is missing: publish it again")
        return raw

    def blob(self, blob: Blob) -> bytes:
        """All pieces together. Raises StoreUnavailable."""
        return b"".join(map(self.piece, blob.pieces))

    def directory(self, collection: Collection) -> Directory:
        """The directory of its chunks, cached. Raises StoreUnavailable."""
        with self._lock:
            known = self._directories.get(collection.directory)
        if known is None:
            try:
                known = read_directory(self.blob(collection.directory), len(collection.levels))
            except ValueError as error:
                raise StoreUnavailable(f"collection {collection.name!r} cannot be read: {error}") from None
            with self._lock:
                while len(self._directories) >= MAX_DIRECTORIES:
                    del self._directories[next(iter(self._directories))]
                self._directories[collection.directory] = known
        return known

    def _read(self) -> dict[str, tuple[bytes, Collection]]:
        """Read the descriptions that are new."""
        newest: dict[str, BlobInfo] = {}
        for info in self._infos():
            if info.owner and (info.created, info.hash) >= _age(newest.get(info.owner)):
                newest[info.owner] = info
        found: dict[str, tuple[bytes, Collection]] = {}
        for name, info in newest.items():
            known = self._seen.get(name)
            if known is None or known[0] != info.hash:
                try:
                    known = info.hash, Collection.from_json(self.piece(info.hash.hex()))
                except ValueError:
                    continue  # of a newer blendserve
            found[name] = known
        return found

    def _drop(self, old: Callable[[BlobInfo], bool]) -> None:
        """Delete descriptions, and the pieces that no other one refers to."""
        dropped: set[str] = set()
        for info in self._infos():
            if info.owner and old(info):
                with suppress(ValueError, StoreUnavailable):
                    dropped |= pieces_of(Collection.from_json(self.piece(info.hash.hex())))
                self._store.blobs.delete(info.hash)
        named = {hash for found in self.collections(anew=True).values() for hash in pieces_of(found)}
        for info in self._infos():
            orphaned = info.hash.hex() in dropped or time.time_ns() - info.created > ORPHANED_NS
            if not info.owner and orphaned and info.hash.hex() not in named:
                self._store.blobs.delete(info.hash)

    def _infos(self) -> Iterable[BlobInfo]:
        return [info for info in self._store.blobs.list() if info.kind == DELIVERED]


def pieces_of(collection: Collection) -> set[str]:
    """Hashes, in hex, of all its pieces."""
    blobs = (*collection.files.values(), collection.directory)
    return {hash for blob in blobs for hash in blob.pieces}


def _age(info: BlobInfo | None) -> tuple[int, bytes]:
    return (info.created, info.hash) if info else (-1, b"")
