"""The formats of a published collection: description, directory, and bodies of chunks.

    description   JSON: names, levels, tables, the index's files, and the hash of the directory
    directory     per chunk, in order of keys: key 28 | tokens 4 | bytes of its body by each level, 8 each   little-endian
    body          of a chunk at a level: length of the header 4 | header | segment 0 | segment 1 | ...       (record.py)
    interleaved   of several: length and header of each | segment 0 of each | segment 1 of each | ...

A GET of a chunk returns a body. The first level is stored under the chunk's own key, each further one under a key of its
own; all are delivered under the chunk's key.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter

from blendserve.errors import InputError
from blendserve.store.codecs.base import Buffer
from blendserve.store.key import DIGEST_BYTES, KEY_BYTES, TAG_BYTES, ChunkKey
from blendserve.store.record import ChunkRecord

FORMAT = 1
LENGTH = struct.Struct("<I")  # of a header, in front of it
MAX_HEADER_BYTES = 1 << 20  # bytes; a chunk of a thousand layers has 16 KB
MAX_LEVELS = 16
MAX_DIRECTORY_BYTES = 256 << 20  # millions of chunks
MAX_TABLES_BYTES = 256 << 20
MAX_INTERLEAVED = 64  # chunks
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes of a collection, in pieces that are stored under their hashes."""

    n_bytes: int
    pieces: tuple[str, ...]  # in hex

    @property
    def version(self) -> str:
        """Equal only for equal bytes."""
        return hashlib.blake2b("".join(self.pieces).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class TablesInfo:
    """Codec tables of a level."""

    hash: str  # in hex
    codec: str
    fingerprint: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Collection:
    """The description of a collection."""

    name: str
    reader: str
    reader_fingerprint: str
    namespace: str  # its tag, in hex: the first bytes of every key
    levels: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_LEVELS)]  # codecs, the finest first
    chunks: int
    tokens: int
    n_bytes: int  # of all levels, as stored
    published: str  # when, UTC
    pinned: bool
    files: Mapping[str, Blob]  # of the index
    directory: Blob
    tables: tuple[TablesInfo, ...] = ()
    format: int = FORMAT

    @property
    def pieces(self) -> set[str]:
        """Hashes, in hex, of the pieces of its index and its directory."""
        return {hash for blob in (*self.files.values(), self.directory) for hash in blob.pieces}

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Collection:
        """Raises ValueError for other JSON, and for other formats."""
        values = json.loads(raw)
        if isinstance(values, dict) and values.get("format", FORMAT) != FORMAT:
            raise ValueError(f"a collection of format {values['format']}, this blendserve reads {FORMAT}")
        return TypeAdapter(cls).validate_python(values)


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """One chunk of a directory."""

    n_tokens: int
    bodies: tuple[int, ...]  # bytes of its body by level


Directory = Mapping[ChunkKey, DirectoryEntry]


def valid_name(name: str) -> str:
    """The name of a collection, which is part of paths and URLs. Raises InputError."""
    if not re.fullmatch(NAME, name):
        raise InputError(
            f"a collection cannot be called {name!r}: take up to 64 letters, digits, dots, dashes and underscores, the "
            "first a letter or digit"
        )
    return name


def write_directory(entries: Directory) -> bytes:
    """The directory's bytes."""
    rows = sorted(entries.items())
    packer = _row(len(rows[0][1].bodies) if rows else 1)
    return b"".join(packer.pack(key, entry.n_tokens, *entry.bodies) for key, entry in rows)


def read_directory(raw: bytes, levels: int) -> dict[ChunkKey, DirectoryEntry]:
    """Parse a directory. Raises ValueError."""
    packer = _row(levels)
    if len(raw) % packer.size:
        raise ValueError(f"a directory's rows have {packer.size} bytes, and these are {len(raw)}")
    return {key: DirectoryEntry(tokens, tuple(bodies)) for key, tokens, *bodies in packer.iter_unpack(raw)}


def level_key(key: ChunkKey, word: str, levels: Iterable[str]) -> ChunkKey:
    """The key of a chunk at a level, in the same namespace."""
    if word == next(iter(levels)):
        return key
    digest = hashlib.blake2b(key + word.encode(), digest_size=DIGEST_BYTES, person=b"blendserve.lv.1")
    return key[:TAG_BYTES] + digest.digest()


def encode_body(key: ChunkKey, record: ChunkRecord) -> list[Buffer]:
    """The body of a chunk under this key: length of the header, header, segments."""
    record = record.for_key(key)
    header = record.header_bytes()
    return [LENGTH.pack(len(header)), header, *record.segments()]


def interleave(bodies: Sequence[Sequence[Buffer]]) -> list[Buffer]:
    """Interleave bodies: all headers, then layer 0 of all, then layer 1, ... Raises ValueError for unequal layers."""
    heads = [part for parts in bodies for part in parts[:2]]
    layers = zip(*(parts[2:] for parts in bodies), strict=True)
    return [*heads, *(segment for layer in layers for segment in layer)]


def _row(levels: int) -> struct.Struct:
    return struct.Struct(f"<{KEY_BYTES}sI{levels}Q")
