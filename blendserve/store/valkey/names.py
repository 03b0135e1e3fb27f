"""What things are called on the server.

    blendserve:chunk:KEY         hash     a chunk: "h" -> header, "0", "1", ... -> segment of each layer (record.py)
    blendserve:lease:{CHUNK}     string   who computes the chunk of that name, in its slot
    blendserve:{TAG}:entries     hash     a namespace's chunks: key -> bytes, raw bytes, tokens, layers
    blendserve:{TAG}:used        zset     key -> when it was last used, microseconds since 1970
    blendserve:{TAG}:pins        set      of keys
    blendserve:{TAG}:bytes       string   of all entries together
    blendserve:{TAG}:counts      hash     of look-ups, evictions, ... (traffic.py)
    blendserve:namespaces        set      of TAGs
    blendserve:tables            hash     hash of a codec's tables -> what is known of them (store/tables.py)
    blendserve:tables:HASH       string   the tables

KEY, TAG and HASH are in hex, members and fields as they are. In a cluster what is in braces chooses the slot: a chunk is
in one slot and its neighbours in others, while all that counts a namespace lies together, so that one script changes it.
"""

from __future__ import annotations

from blendserve.store.key import ChunkKey

PREFIX = b"blendserve:"
CHUNK = PREFIX + b"chunk:"
NAMESPACES = PREFIX + b"namespaces"
TABLES = PREFIX + b"tables"
HEADER = b"h"


def chunk_name(key: ChunkKey) -> bytes:
    return CHUNK + key.hex().encode()


def chunk_key_of(name: bytes) -> ChunkKey | None:
    """The key of a chunk's name; None for a name that is none of ours."""
    try:
        return bytes.fromhex(name.removeprefix(CHUNK).decode())
    except ValueError:
        return None


def lease_name(key: ChunkKey) -> bytes:
    return PREFIX + b"lease:{%s}" % chunk_name(key)


def namespace_name(tag: bytes, what: str) -> bytes:
    return PREFIX + b"{%s}:%s" % (tag.hex().encode(), what.encode())


def tables_name(hash: bytes) -> bytes:
    return TABLES + b":" + hash.hex().encode()


def segment_name(l: int) -> bytes:
    return b"%d" % l
