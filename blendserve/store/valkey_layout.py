"""The names on a Valkey or Redis server.

    blendserve:chunk:KEY         hash     a chunk: "h" -> header, "0", "1", ... -> segment of each layer (record.py)
    blendserve:lease:{CHUNK}     string   owner of the lease on the chunk of that name, in its slot
    blendserve:TAG:entries       hash     a namespace's chunks: key -> bytes, raw bytes, tokens, layers; for statistics
    blendserve:TAG:counts        hash     of look-ups (ledger.py)
    blendserve:namespaces        set      of TAGs
    blendserve:tables            hash     hash of a blob -> its description (blobs.py)
    blendserve:tables:HASH       string   the blob

KEY, TAG and HASH are in hex; TAG stands in braces, which choose the slot in a cluster. An unpinned chunk expires, a
pinned one does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from blendserve.errors import CorruptRecord
from blendserve.store.key import KEY_BYTES, ChunkKey
from blendserve.store.record import ChunkRecord, check_segment, decode_header
from blendserve.store.valkey_client import Client

PREFIX = b"blendserve:"
CHUNK, NAMESPACES, BLOBS = PREFIX + b"chunk:", PREFIX + b"namespaces", PREFIX + b"tables"
HEADER = b"h"
KEY_NAME = re.compile(rb"[0-9a-f]{%d}" % (2 * KEY_BYTES))
ENTRY = re.compile(rb"\d{1,18}( \d{1,18}){3}")
BATCH = 1000  # keys in one round trip

Fields: TypeAlias = "Mapping[bytes, bytes]"
Command: TypeAlias = "Callable[[Client, ChunkKey], object]"


def chunk_name(key: ChunkKey) -> bytes:
    return CHUNK + key.hex().encode()


def segment_name(l: int) -> bytes:
    return b"%d" % l


def namespace_name(tag: bytes, what: str) -> bytes:
    return PREFIX + b"{%s}:%s" % (tag.hex().encode(), what.encode())


def lease_name(key: ChunkKey) -> bytes:
    return PREFIX + b"lease:{%s}" % chunk_name(key)


def blob_name(hash: bytes) -> bytes:
    return BLOBS + b":" + hash.hex().encode()


def entry_of(record: ChunkRecord) -> bytes:
    """A chunk's entry in its namespace."""
    return b"%d %d %d %d" % (record.n_bytes, record.raw_bytes, record.n_tokens, record.n_layers)


def on_chunk(command: str, *args: Any) -> Command:
    """A command on the hash of each chunk."""
    return lambda client, key: getattr(client, command)(chunk_name(key), *args)


def run_each(client: Client, keys: Iterable[ChunkKey], command: Command) -> list[Any]:
    """The replies to a command for each key, in one round trip."""
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        command(pipeline, key)
    return list(pipeline.execute())


def read_fields(client: Client, keys: Sequence[ChunkKey]) -> list[Fields]:
    """The hash of each chunk, {} for an absent one; one round trip.

    Raises what valkey-py does; TypeError for a reply that was damaged into one of another type.
    """
    found: list[Fields] = run_each(client, keys, on_chunk("hgetall"))
    if not all(isinstance(part, bytes) for fields in found for pair in fields.items() for part in pair):
        raise TypeError("a hash holds values that are not bytes")
    return found


def checked(key: ChunkKey, fields: Fields) -> ChunkRecord:
    """The record in a hash, all of it checked. Raises CorruptRecord, StoreVersion."""
    if HEADER not in fields:
        raise CorruptRecord(key, "it has no header")
    header = decode_header(key, fields[HEADER])
    layers = range(header.shape.n_layers)
    segments = [check_segment(key, header, l, fields.get(segment_name(l))) for l in layers]
    return ChunkRecord(key, header, segments.__getitem__, trusted=True)


def all_chunks(client: Client) -> set[ChunkKey]:
    """The keys of all chunks on the server, with or without entries."""
    names = (name.removeprefix(CHUNK) for name in client.scan_iter(match=CHUNK + b"*", count=BATCH))
    return {bytes.fromhex(name.decode()) for name in names if KEY_NAME.fullmatch(name)}
