"""The files of a published collection, below one folder or URL that other collections may share.

    NAME.json        the description, the only file that changes: names, levels, sizes and hashes of all others
    directory/HASH   per chunk, in order of keys: key 28 | (bytes 8 | hash 16) at each level     little-endian
    pieces/HASH      files of the index in parts, and descriptions of earlier versions
    tables/HASH      codec tables
    chunks/HASH      a chunk at a level: length of the header 4 | header | segment 0 | segment 1 | ...      (record.py)

HASH is the hash of the content. So a file never changes, any cache may keep it for ever, and publishers cannot disturb
each other. A reader that has checked the description's signature need not trust the server for anything else.
"""

from __future__ import annotations

import json
import re
import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

from pydantic import Field, TypeAdapter

from blendserve.errors import InputError
from blendserve.store.codecs.base import TABLES_BYTES, Buffer
from blendserve.store.key import KEY_BYTES, ChunkKey
from blendserve.store.record import ChunkRecord

FORMAT = 2
DIRECTORY, PIECES, TABLES, CHUNKS = KINDS = ("directory", "pieces", "tables", "chunks")
PIECE_BYTES = 4 << 20
LENGTH = struct.Struct("<I")  # of a header, in front of it
MAX_HEADER_BYTES = 1 << 20  # bytes; a chunk of a thousand layers has 16 KB
MAX_LEVELS = 16
MAX_DIRECTORY_BYTES = 256 << 20  # millions of chunks
MAX_TABLES_BYTES = 256 << 20
MAX_FILE_BYTES = 4 << 30  # of an index
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"

Hash = Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * TABLES_BYTES}}}$")]  # in hex


@dataclass(frozen=True, slots=True)
class Blob:
    """A file of the index, published in pieces."""

    n_bytes: Annotated[int, Field(ge=0, le=MAX_FILE_BYTES)]
    pieces: tuple[Hash, ...]


@dataclass(frozen=True, slots=True)
class TablesInfo:
    """Codec tables of a level."""

    hash: Hash
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
    n_bytes: int  # of all levels
    published: int  # seconds since 1970
    files: Mapping[str, Blob]  # of the index
    directory: Hash
    tables: tuple[TablesInfo, ...] = ()
    earlier: Mapping[Hash, int] = field(default_factory=dict)  # descriptions, and when each was replaced
    signature: str = ""  # Ed25519, of everything else, in hex
    format: int = FORMAT

    @property
    def directory_bytes(self) -> int:
        """Return the size of the directory."""
        return self.chunks * _row(len(self.levels)).size

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Collection:
        """Raises ValueError for other JSON, and for other formats."""
        values = json.loads(raw)
        if isinstance(values, dict) and values.get("format", FORMAT) != FORMAT:
            raise ValueError(
                f"its format is {values['format']}, and this version of blendserve reads {FORMAT}"
            )
        return TypeAdapter(cls).validate_python(values)

    def files_with(self, directory: Directory) -> Iterator[tuple[str, str, int]]:
        """Yield kind, hash and size of every file that this version names."""
        yield DIRECTORY, self.directory, self.directory_bytes
        yield from ((TABLES, tables.hash, tables.n_bytes) for tables in self.tables)
        for blob in self.files.values():
            for at, hash in zip(range(0, blob.n_bytes, PIECE_BYTES), blob.pieces, strict=False):
                yield PIECES, hash, min(PIECE_BYTES, blob.n_bytes - at)
        for bodies in directory.values():
            yield from ((CHUNKS, body.hash.hex(), body.n_bytes) for body in bodies)

    @property
    def signed_bytes(self) -> bytes:
        """Return the bytes that are signed."""
        return replace(self, signature="").to_json()


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk at a level."""

    n_bytes: int
    hash: bytes


class Directory(Mapping[ChunkKey, tuple[ChunkFile, ...]]):
    """The chunks of a collection, each at all levels. A row is parsed when it is looked up, so opening is fast."""

    def __init__(self, raw: bytes, levels: int) -> None:
        """Raises ValueError for bytes that are no whole rows."""
        self._raw = raw
        self._row = _row(levels)
        if len(raw) % self._row.size:
            raise ValueError(f"a directory of {len(raw)} bytes has no whole rows of {self._row.size} bytes")

    def __getitem__(self, key: ChunkKey) -> tuple[ChunkFile, ...]:
        n = bisect_left(range(len(self)), key, key=self._key)
        if n == len(self) or self._key(n) != key:
            raise KeyError(key.hex())
        _, *values = self._row.unpack_from(self._raw, n * self._row.size)
        return tuple(map(ChunkFile, values[::2], values[1::2]))

    def __iter__(self) -> Iterator[ChunkKey]:
        return map(self._key, range(len(self)))

    def __len__(self) -> int:
        return len(self._raw) // self._row.size

    def _key(self, n: int) -> ChunkKey:
        at = n * self._row.size
        return self._raw[at : at + KEY_BYTES]


def write_directory(chunks: Mapping[ChunkKey, Sequence[ChunkFile]], levels: int) -> bytes:
    """Return the bytes of a directory."""
    row = _row(levels)
    rows = list[bytes]()
    for key, bodies in sorted(chunks.items()):
        rows.append(row.pack(key, *(value for body in bodies for value in (body.n_bytes, body.hash))))
    return b"".join(rows)


def valid_name(name: str) -> str:
    """Return the name of a collection, which is part of paths and URLs. Raises InputError for an unsafe one."""
    if not re.fullmatch(NAME, name):
        raise InputError(
            f"a collection cannot be called {name!r}: take up to 64 letters, digits, dots, dashes and underscores, the "
            "first a letter or digit"
        )
    return name


def encode_body(key: ChunkKey, record: ChunkRecord) -> list[Buffer]:
    """Return the body of a chunk under this key: length of the header, header, segments."""
    record = record.for_key(key)
    header = record.header_bytes()
    return [LENGTH.pack(len(header)), header, *record.segments()]


def _row(levels: int) -> struct.Struct:
    return struct.Struct(f"<{KEY_BYTES}s" + f"Q{TABLES_BYTES}s" * levels)
