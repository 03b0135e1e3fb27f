"""Tables of codecs, kept beside the chunks that need them: bytes under their own hash.

    tables   hash of the content 16 -> the content
    about    hash                   -> made 8 | bytes 8 | codec 8 | fingerprint of the reader, UTF-8

The hash is the checksum: what does not have it is no such tables. Any number of tables may be kept for a codec and a
reader, as old chunks need the old ones; the latest made are current, and what is written uses them. They belong to no
namespace, so they are to be fitted on text that every tenant may see the statistics of.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from blendserve.errors import StoreFull
from blendserve.store.codecs.base import NAME_BYTES, Buffer, Undecodable, tables_hash

ROOM = 512 << 20  # bytes of tables in a store; they do not count against the cap, which is for chunks

_ABOUT = struct.Struct(f"<QQ{NAME_BYTES}s")


@dataclass(frozen=True, slots=True)
class TablesInfo:
    """What is known of tables without parsing them."""

    hash: bytes
    codec: str
    fingerprint: str  # of the reader that they are for
    n_bytes: int
    made: int  # nanoseconds since 1970; 0 = copied from another store: current only where there are no others

    def to_bytes(self) -> bytes:
        """The record about them."""
        return _ABOUT.pack(self.made, self.n_bytes, self.codec.encode()) + self.fingerprint.encode()

    @classmethod
    def from_bytes(cls, hash: bytes, raw: bytes) -> TablesInfo:
        """Raises ValueError."""
        if len(raw) < _ABOUT.size:
            raise ValueError(f"a record about tables has {len(raw)} bytes, the smallest {_ABOUT.size}")
        made, n_bytes, codec = _ABOUT.unpack_from(raw)
        return cls(hash, codec.rstrip(b"\0").decode(), raw[_ABOUT.size :].decode(), n_bytes, made)


def newest(infos: Iterable[TablesInfo], codec: str, fingerprint: str) -> bytes | None:
    """The hash of the tables that are used for writing, None where there are none."""
    mine = [info for info in infos if (info.codec, info.fingerprint) == (codec, fingerprint)]
    return max(mine, key=lambda info: (info.made, info.hash)).hash if mine else None


def checked(hash: bytes, raw: Buffer) -> bytes:
    """The tables, if that is what these bytes are. Raises Undecodable."""
    if tables_hash(raw) != hash:
        raise Undecodable(
            f"the tables {hash.hex()} are damaged: `blendserve store verify --repair` drops them, then fit them again on "
            "the same text, or merge a store that has them whole"
        )
    return bytes(raw)


def check_room(infos: Iterable[TablesInfo], hash: bytes, n_bytes: int) -> None:
    """Raise StoreFull where tables would take more than their room."""
    others = sum(info.n_bytes for info in infos if info.hash != hash)
    if others + n_bytes > ROOM:
        raise StoreFull(
            f"a store holds at most {ROOM:,} bytes of codecs' tables, and these {n_bytes:,} come on top of {others:,}: "
            "precompute into a new store"
        )
