"""Bytes under the hash of their content, beside the chunks: codec tables, priors, published collections.

    blob          hash of the content 16 -> the content
    description   hash                   -> created 8 | bytes 8 | kind 8 | owner, UTF-8

The hash is the checksum. A kind and owner may have many blobs, as old chunks need old tables; new chunks use the newest,
the current one. Blobs belong to no namespace, so tables are to be fitted on text whose statistics every tenant may see.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blendserve.errors import CorruptBlob, StoreFull
from blendserve.store.codecs.base import NAME_BYTES, Buffer, tables_hash

ROOM = 512 << 20  # bytes of blobs in a store; they do not count against the cap, which is for chunks

_DESCRIPTION = struct.Struct(f"<QQ{NAME_BYTES}s")


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A blob's description."""

    hash: bytes
    kind: str  # a codec's name, or another user's of blobs
    owner: str  # the fingerprint of the model that it is for, or a collection's name
    n_bytes: int
    created: (
        int  # nanoseconds since 1970; 0 = copied from another store: current only where there are no others
    )

    def to_bytes(self) -> bytes:
        return _DESCRIPTION.pack(self.created, self.n_bytes, self.kind.encode()) + self.owner.encode()

    @classmethod
    def from_bytes(cls, hash: bytes, raw: bytes) -> BlobInfo:
        """Raises ValueError."""
        if len(raw) < _DESCRIPTION.size:
            raise ValueError(f"a blob's description has {len(raw)} bytes, the smallest {_DESCRIPTION.size}")
        created, n_bytes, kind = _DESCRIPTION.unpack_from(raw)
        return cls(hash, kind.rstrip(b"\0").decode(), raw[_DESCRIPTION.size :].decode(), n_bytes, created)


class BlobStore(ABC):
    """The blobs of one store. Every method raises StoreUnavailable."""

    @abstractmethod
    def put(self, kind: str, owner: str, raw: bytes, current: bool = True) -> bytes:
        """Keep a blob -> its hash. current: False for a copy from another store. Raises StoreFull."""

    @abstractmethod
    def get(self, hash: bytes) -> bytes | None:
        """None where it is not here. Raises CorruptBlob."""

    @abstractmethod
    def list(self) -> Sequence[BlobInfo]:
        """All descriptions, by hash. A damaged one is left out; its blob can still be read."""

    @abstractmethod
    def delete(self, hash: bytes) -> bool:
        """False when it was not there. Chunks that need it are misses then."""

    def current(self, kind: str, owner: str) -> bytes | None:
        """The hash of the newest blob of this kind and owner, None where there is none."""
        infos = [info for info in self.list() if (info.kind, info.owner) == (kind, owner)]
        return max(infos, key=lambda info: (info.created, info.hash)).hash if infos else None


def check_blob(hash: bytes, raw: Buffer) -> bytes:
    """A copy of these bytes, if they have this hash. Raises CorruptBlob."""
    if tables_hash(raw) != hash:
        raise CorruptBlob(
            f"the tables {hash.hex()} are damaged: `blendserve store verify --repair` drops them, then fit them again on "
            "the same text, or merge a store that has them whole"
        )
    return bytes(raw)


def check_room(infos: Iterable[BlobInfo], hash: bytes, n_bytes: int) -> None:
    """Raise StoreFull where blobs would take more than their room."""
    others = sum(info.n_bytes for info in infos if info.hash != hash)
    if others + n_bytes > ROOM:
        raise StoreFull(
            f"a store holds at most {ROOM:,} bytes of codec tables and collections, and these {n_bytes:,} come on top "
            f"of {others:,}: precompute into a new store"
        )
