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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from blendserve.errors import CorruptBlob, NotFound, StoreUnavailable
from blendserve.fetch.kdn.manifest import Blob, Collection, Directory, level_key, read_directory
from blendserve.registry import DELIVERED
from blendserve.store import ChunkKey, KVStore
from blendserve.store.blobs import BlobInfo
from blendserve.store.codecs.base import tables_hash

PIECE_BYTES = 4 << 20
ORPHANED_NS = 3600 * 10**9
FRESH_S = 2.0  # until a publication of another process is seen
MAX_DIRECTORIES, MAX_DESCRIPTIONS = 8, 256  # parsed ones in memory


def summary(collection: Collection) -> dict[str, Any]:
    """A description without the fields that only `collection pull` and engines need."""
    return {k: v for k, v in asdict(collection).items() if k not in ("files", "directory", "tables")}


class CollectionCatalog:
    """The collections of one store. Thread-safe."""

    def __init__(self, store: KVStore, now: Callable[[], float] = time.monotonic) -> None:
        self.store, self._now = store, now
        self._collections: Mapping[str, Collection] = {}
        self._read_at = float("-inf")
        self._lock = threading.Lock()
        self._description = lru_cache(MAX_DESCRIPTIONS)(lambda hash: Collection.from_json(self.piece(hash)))
        self._directory = lru_cache(MAX_DIRECTORIES)(lambda blob, n: read_directory(self.blob(blob), n))

    def collections(self, anew: bool = False) -> Mapping[str, Collection]:
        """The collections by name, in order. Reads changes at most every FRESH_S seconds. Raises StoreError."""
        with self._lock:
            if anew or self._now() - self._read_at >= FRESH_S:
                self._collections, self._read_at = self._read(), self._now()
            return self._collections

    def collection(self, name: str) -> Collection:
        """The collection as stored now. Raises NotFound, StoreError."""
        found = self.collections(anew=True).get(name)
        if found is None:
            raise NotFound(f"there is no collection {name!r}: see `blendserve collection list`")
        return found

    def write(self, collection: Collection) -> None:
        """Store a description, replacing the one of that name. Its blobs are stored before. Raises StoreError."""
        new = self.store.blobs.put(DELIVERED, collection.name, collection.to_json())
        self._delete(lambda info: info.owner == collection.name and info.hash != new)

    def delete(self, name: str) -> None:
        """Delete a collection and its index, but no chunks. Raises NotFound, StoreError."""
        self.collection(name)
        self._delete(lambda info: info.owner == name)

    def write_blob(self, raw: bytes) -> Blob:
        """Store bytes in pieces -> their reference. Raises StoreFull, StoreUnavailable."""
        pieces = [raw[at : at + PIECE_BYTES] for at in range(0, len(raw), PIECE_BYTES)]
        hashes = [tables_hash(piece) for piece in pieces]
        stored = {info.hash for info in self.store.blobs.list()}
        for hash, piece in zip(hashes, pieces, strict=True):
            if hash not in stored:
                self.store.blobs.put(DELIVERED, "", piece)
        return Blob(len(raw), tuple(hash.hex() for hash in hashes))

    def piece(self, hash: str) -> bytes:
        """One piece. Raises StoreUnavailable if it is missing or damaged."""
        try:
            raw = self.store.blobs.get(bytes.fromhex(hash))
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
        try:
            return self._directory(collection.directory, len(collection.levels))
        except ValueError as error:
            raise StoreUnavailable(f"collection {collection.name!r} cannot be read: {error}") from None

    def chunk_keys(
        self, collection: Collection, key_hex: str, level: str
    ) -> tuple[ChunkKey, ChunkKey] | None:
        """The key of a chunk, and the one that it is stored under at a level; None if the collection does not have it.

        Raises StoreUnavailable.
        """
        with suppress(ValueError):
            key = bytes.fromhex(key_hex)
            if level in collection.levels and key in self.directory(collection):
                return key, level_key(key, level, collection.levels)
        return None

    def _read(self) -> dict[str, Collection]:
        in_time = sorted(self._infos(), key=lambda info: (info.created, info.hash))
        newest = {info.owner: info for info in in_time if info.owner}
        found = {}
        for name, info in sorted(newest.items()):
            with suppress(ValueError):  # of a newer blendserve
                found[name] = self._description(info.hash.hex())
        return found

    def _delete(self, is_old: Callable[[BlobInfo], bool]) -> None:
        """Delete descriptions, and the pieces that no other one refers to."""
        dropped: set[str] = set()
        for info in self._infos():
            if info.owner and is_old(info):
                with suppress(ValueError, StoreUnavailable):
                    dropped |= self._description(info.hash.hex()).pieces
                self.store.blobs.delete(info.hash)
        used = {hash for found in self.collections(anew=True).values() for hash in found.pieces}
        for info in self._infos():
            is_orphaned = info.hash.hex() in dropped or time.time_ns() - info.created > ORPHANED_NS
            if not info.owner and is_orphaned and info.hash.hex() not in used:
                self.store.blobs.delete(info.hash)

    def _infos(self) -> list[BlobInfo]:
        return [info for info in self.store.blobs.list() if info.kind == DELIVERED]
