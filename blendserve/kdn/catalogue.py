"""The collections that a store holds: their state is in the store itself, so that any number of services share it.

A store keeps codecs' tables as bytes under their own hash, each said to be of a codec and for a reader, the newest
current (store/blobs.py). What belongs to a collection lies there in the same way:

    description   of "codec" kdn, for the "reader" NAME        the newest is the collection; none = there is no such
    piece         of "codec" kdn, for the "reader" ""          of the index's files and of the directory

So every kind of store has them, a merge brings them along, and a copy of one is checked by its name. Publishing anew
writes the pieces, then the description, then drops what nobody names any more: a kill leaves the old or the new one. What
a publisher that was killed left behind is dropped by a later one, after an hour: another may just be writing.
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
FRESH_S = 2.0  # what another service has published is seen after so long
KEPT_DIRECTORIES = 8


class Catalogue:
    """Of one store. Safe to share between threads."""

    def __init__(
        self, store: KVStore, fresh_s: float = FRESH_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._fresh, self._now = store, fresh_s, now
        self._seen: dict[str, tuple[bytes, Collection]] = {}  # by name, with the description's hash
        self._looked = float("-inf")
        self._directories: dict[Blob, Directory] = {}
        self._lock = threading.Lock()

    def collections(self, anew: bool = False) -> Mapping[str, Collection]:
        """By name. Asks the store for what has changed at most every `fresh_s` seconds. Raises StoreError."""
        with self._lock:
            if anew or self._now() - self._looked >= self._fresh:
                self._seen = self._read()
                self._looked = self._now()
            return {name: found for name, (_, found) in sorted(self._seen.items())}

    def collection(self, name: str) -> Collection:
        """As it is in the store now. Raises NotFound, StoreError."""
        found = self.collections(anew=True).get(name)
        if found is None:
            raise NotFound(f"there is no collection {name!r}: see `blendserve kdn list`")
        return found

    def write(self, collection: Collection) -> None:
        """In place of what has this name; its blobs are there already. Raises StoreError."""
        new = self._store.blobs.put(DELIVERED, collection.name, collection.to_json())
        self._drop(lambda info: info.owner == collection.name and info.hash != new)

    def retire(self, name: str) -> None:
        """Forget a collection and its index; its chunks are not this one's to delete. Raises NotFound, StoreError."""
        self.collection(name)
        self._drop(lambda info: info.owner == name)

    def write_blob(self, raw: bytes) -> Blob:
        """Keep bytes -> what names them. Raises StoreFull, StoreUnavailable."""
        pieces = [raw[at : at + PIECE_BYTES] for at in range(0, len(raw), PIECE_BYTES)]
        hashes = [tables_hash(piece) for piece in pieces]
        there = {info.hash for info in self._store.blobs.list()}
        for hash, piece in zip(hashes, pieces, strict=True):
            if hash not in there:
                self._store.blobs.put(DELIVERED, "", piece)
        return Blob(len(raw), tuple(hash.hex() for hash in hashes))

    def piece(self, hash: str) -> bytes:
        """Raises StoreUnavailable where it is missing or damaged."""
        try:
            raw = self._store.blobs.get(bytes.fromhex(hash))
        except CorruptBlob as error:
            raise StoreUnavailable(f"a part of a collection is damaged: publish it again ({error})") from None
        if raw is None:
            raise StoreUnavailable("a part of a collection is missing: publish it again")
        return raw

    def blob(self, blob: Blob) -> bytes:
        """All of it. Raises StoreUnavailable."""
        return b"".join(map(self.piece, blob.pieces))

    def directory(self, collection: Collection) -> Directory:
        """Where its chunks are; kept, as it never changes under its name. Raises StoreUnavailable."""
        with self._lock:
            known = self._directories.get(collection.directory)
        if known is None:
            try:
                known = read_directory(self.blob(collection.directory), len(collection.levels))
            except ValueError as error:
                raise StoreUnavailable(f"collection {collection.name!r} cannot be read: {error}") from None
            with self._lock:
                while len(self._directories) >= KEPT_DIRECTORIES:
                    del self._directories[next(iter(self._directories))]
                self._directories[collection.directory] = known
        return known

    def _read(self) -> dict[str, tuple[bytes, Collection]]:
        """What is new is read, the rest is known."""
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
        """Delete these descriptions, and the pieces that they named and no other one does."""
        theirs: set[str] = set()
        for info in self._infos():
            if info.owner and old(info):
                with suppress(ValueError, StoreUnavailable):
                    theirs |= pieces_of(Collection.from_json(self.piece(info.hash.hex())))
                self._store.blobs.delete(info.hash)
        named = {hash for found in self.collections(anew=True).values() for hash in pieces_of(found)}
        for info in self._infos():
            orphaned = info.hash.hex() in theirs or time.time_ns() - info.created > ORPHANED_NS
            if not info.owner and orphaned and info.hash.hex() not in named:
                self._store.blobs.delete(info.hash)

    def _infos(self) -> Iterable[BlobInfo]:
        return [info for info in self._store.blobs.list() if info.kind == DELIVERED]


def pieces_of(collection: Collection) -> set[str]:
    """Hashes, in hex, of all that belongs to it."""
    blobs = (*collection.files.values(), collection.directory)
    return {hash for blob in blobs for hash in blob.pieces}


def _age(info: BlobInfo | None) -> tuple[int, bytes]:
    return (info.created, info.hash) if info else (-1, b"")
