"""Bytes under the hash of their content, beside the chunks: codec tables and priors.

    blob          hash of the content 16 -> the content
    description   hash                   -> created 8 | bytes 8 | kind 8 | owner, UTF-8

The hash is the checksum. A kind and owner may have many blobs, as old chunks need old tables; new chunks use the newest,
the current one. Blobs belong to no namespace, so fit tables on text whose statistics every tenant may see.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from blendserve.errors import CorruptBlob, StoreFull
from blendserve.store.codecs.base import NAME_BYTES, Buffer, tables_hash

ROOM = 512 << 20  # bytes of blobs in a store; they do not count against the cap, which is for chunks

_DESCRIPTION = struct.Struct(f"<QQ{NAME_BYTES}s")


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A blob's description."""

    hash: bytes
    kind: str  # a codec's name, or that of another use
    owner: str  # the fingerprint of the model that it is for
    n_bytes: int
    created: int  # nanoseconds since 1970; 0 = copied from another store, current only if there are no others

    def to_bytes(self) -> bytes:
        return _DESCRIPTION.pack(self.created, self.n_bytes, self.kind.encode()) + self.owner.encode()

    @classmethod
    def from_bytes(cls, hash: bytes, raw: bytes) -> BlobInfo:
        """Raises ValueError."""
        if len(raw) < _DESCRIPTION.size:
            raise ValueError(f"a blob's description has {len(raw)} bytes, the smallest {_DESCRIPTION.size}")
        created, n_bytes, kind = _DESCRIPTION.unpack_from(raw)
        return cls(hash, kind.rstrip(b"\0").decode(), raw[_DESCRIPTION.size :].decode(), n_bytes, created)


class BlobReader(Protocol):
    """Blobs that are only read. Every method raises StoreUnavailable."""

    @abstractmethod
    def get(self, hash: bytes, seconds: float | None = None) -> bytes | None:
        """None for an absent blob. seconds: to wait for another machine; its deadline if None. Raises CorruptBlob."""

    @abstractmethod
    def list(self) -> Sequence[BlobInfo]:
        """All descriptions, in order of hashes. A damaged one is left out; its blob can still be read."""


class BlobStore(BlobReader, ABC):
    """The blobs of one store."""

    @abstractmethod
    def put(self, kind: str, owner: str, raw: bytes, current: bool = True) -> bytes:
        """Store a blob -> its hash. current: False for a copy from another store. Raises StoreFull."""

    @abstractmethod
    def delete(self, hash: bytes) -> bool:
        """Whether it was stored. Chunks that need it are misses from now on."""

    def hashes(self) -> set[bytes]:
        """The hashes of all blobs and descriptions, damaged ones included."""
        return {info.hash for info in self.list()}

    def problems(self) -> tuple[tuple[str, str], ...]:
        """(hash in hex, what is wrong) of each damaged blob."""
        n_bytes = {info.hash: info.n_bytes for info in self.list()}
        found = []
        for hash in sorted(self.hashes()):
            try:
                raw = self.get(hash)
            except CorruptBlob as error:
                found.append((hash.hex(), str(error)))
                continue
            if raw is None:
                found.append((hash.hex(), "they are missing"))
            elif len(raw) != n_bytes.get(hash):
                found.append((hash.hex(), "their description is missing or damaged"))
        return tuple(found)

    def current(self, kind: str, owner: str) -> bytes | None:
        """The hash of the newest blob of this kind and owner; None if there is none."""
        infos = [info for info in self.list() if (info.kind, info.owner) == (kind, owner)]
        return max(infos, key=lambda info: (info.created, info.hash)).hash if infos else None


def check_blob(hash: bytes, raw: Buffer) -> bytes:
    """A copy of the bytes. Raises CorruptBlob unless they have this hash."""
    if tables_hash(raw) != hash:
        raise CorruptBlob(
            f"the tables {hash.hex()} are damaged: `blendserve store verify --repair` deletes them; then fit them "
            "again on the same text, or merge a store that has them"
        )
    return bytes(raw)


def check_room(infos: Iterable[BlobInfo], hash: bytes, n_bytes: int) -> None:
    """Raise StoreFull if the blobs would take more than their room."""
    others = sum(info.n_bytes for info in infos if info.hash != hash)
    if others + n_bytes > ROOM:
        raise StoreFull(
            f"a store holds at most {ROOM:,} bytes of codec tables: it has {others:,}, and "
            f"{n_bytes:,} more do not fit: precompute into a new store"
        )
