"""Leases in an LMDB map: which chunks are being computed, so that of several processes one does.

"x" + key -> ends, in nanoseconds since 1970 8 | owner 16 | xxh3-64 with the key 8
"""

from __future__ import annotations

import struct

from blendserve.store.key import ChunkKey
from blendserve.store.lmdb.ledger import Txn, opened, sealed, starting

LEASE = b"x"
OWNER_BYTES = 16

_LEASE = struct.Struct(f"<Q{OWNER_BYTES}s")


def take(txn: Txn, key: ChunkKey, owner: bytes, now: int, ends: int) -> bool:
    """Have a chunk leased, unless somebody else has. What is over, or damaged, goes."""
    for name in [name for name, raw in starting(txn, LEASE) if _over(name, raw, now)]:
        txn.delete(name)
    return bool(txn.put(LEASE + key, sealed(key, _LEASE.pack(ends, owner)), overwrite=False))


def is_of(txn: Txn, key: ChunkKey, owner: bytes) -> bool:
    """Whether the chunk is leased to this owner."""
    body = opened(key, txn.get(LEASE + key))
    return body is not None and _LEASE.unpack(body)[1] == owner


def end(txn: Txn, key: ChunkKey) -> None:
    """The chunk is there, or its owner gave it up."""
    txn.delete(LEASE + key)


def _over(name: bytes, raw: memoryview, now: int) -> bool:
    body = opened(name[len(LEASE) :], raw)
    return body is None or bool(_LEASE.unpack(body)[0] <= now)
