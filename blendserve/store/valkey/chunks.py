"""A chunk's hash on the server: written by one command, read by one, so that nobody sees half of one.

Records are those of record.py. The header's checksum covers the chunk's key, and every segment's the key, the header's
fields and the layer: bytes of another chunk, or of another layer, are damage like any other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

from blendserve.errors import CorruptRecord
from blendserve.store import record
from blendserve.store.codecs.base import Buffer
from blendserve.store.key import TAG_BYTES, ChunkKey
from blendserve.store.record import ChunkRecord, Header
from blendserve.store.request_reads import Sample
from blendserve.store.valkey.client import Client
from blendserve.store.valkey.leases import Leases
from blendserve.store.valkey.names import HEADER, chunk_name, namespace_name, segment_name

EXPIRES_S = (
    30 * 86_400
)  # of a chunk that is not pinned, after its last use: what lets volatile-lru evict it, and no other

Fields: TypeAlias = "dict[bytes, bytes]"


def write(
    client: Client,
    chunk: ChunkRecord,
    pinned: bool,
    layers_before: int,
    leases: Leases,
) -> None:
    """In place of what was there; a lease on it ends. layers_before: of that. Raises what valkey-py does."""
    name = chunk_name(chunk.key)
    fields: dict[bytes, Buffer] = {HEADER: chunk.header_bytes()}
    fields |= {segment_name(l): memoryview(segment).cast("B") for l, segment in enumerate(chunk.segments())}
    surplus = [segment_name(l) for l in range(chunk.n_layers, layers_before)]
    pipeline = client.pipeline(transaction=False)
    pipeline.hset(name, mapping=fields)
    if pinned:
        pipeline.persist(name)
    else:
        pipeline.expire(name, EXPIRES_S)
    if surplus:
        pipeline.hdel(name, *surplus)
    leases.end_with(pipeline, chunk.key)
    pipeline.execute()
    leases.ended([chunk.key])


def read(client: Client, keys: Sequence[ChunkKey]) -> list[Fields]:
    """What is there of each chunk, {} where nothing is; one round trip. Raises what valkey-py does, TypeError."""
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.hgetall(chunk_name(key))
    found: list[Fields] = pipeline.execute()
    for fields in found:
        _require_bytes([*fields, *fields.values()])
    return found


def headers(client: Client, keys: Sequence[ChunkKey]) -> list[bytes | None]:
    """The header of each chunk, None where nothing is; one round trip. Raises what valkey-py does, TypeError."""
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.hget(chunk_name(key), HEADER)
    found: list[bytes | None] = pipeline.execute()
    _require_bytes([raw for raw in found if raw is not None])
    return found


def headers_and_pins(client: Client, keys: Sequence[ChunkKey]) -> list[tuple[bytes | None, bool]]:
    """The header of each chunk, None where nothing is, and whether it is pinned; one round trip."""
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.hget(chunk_name(key), HEADER)
        pipeline.sismember(namespace_name(key[:TAG_BYTES], "pins"), key)
    found = pipeline.execute()
    _require_bytes([raw for raw in found[::2] if raw is not None])
    return [(raw, bool(pinned)) for raw, pinned in zip(found[::2], found[1::2], strict=True)]


def sample(client: Client, keys: Sequence[ChunkKey], n_bytes: int) -> Sample | None:
    """Headers of these, timed, then the first layers of one. Raises what valkey-py does, CorruptRecord, StoreVersion."""
    client.ping()  # or connecting would be timed
    start = time.perf_counter()
    raw_headers = headers(client, keys)
    round_trip = time.perf_counter() - start
    found = next(((key, raw) for key, raw in zip(keys, raw_headers, strict=True) if raw), None)
    if found is None:
        return None
    header = record.decode_header(*found)
    layers = header.shape.n_layers
    some = max(1, min(layers, n_bytes * layers // max(1, header.n_bytes)))
    start = time.perf_counter()
    got = client.hmget(chunk_name(found[0]), [segment_name(l) for l in range(some)])
    seconds = time.perf_counter() - start
    if None in got:  # evicted meanwhile
        return None
    part = sum(header.lengths[:some]) / max(1, header.n_bytes)
    return Sample(round_trip, seconds, part, header.shape.n_tokens)


def there(client: Client, keys: Sequence[ChunkKey]) -> list[bool]:
    """Which chunks are there."""
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.exists(chunk_name(key))
    return [bool(n) for n in pipeline.execute()]


def drop(client: Client, keys: Sequence[ChunkKey]) -> int:
    """Delete chunks -> how many were there."""
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.unlink(chunk_name(key))
    return sum(pipeline.execute()) if keys else 0


def keep(client: Client, keys: Sequence[ChunkKey], pinned: bool) -> None:
    """Let chunks never expire, or from now on in time."""
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        if pinned:
            pipeline.persist(chunk_name(key))
        else:
            pipeline.expire(chunk_name(key), EXPIRES_S)
    if keys:
        pipeline.execute()


def checked(key: ChunkKey, fields: Fields) -> tuple[Header, list[Buffer]]:
    """The record in a hash, all of it checked. Raises CorruptRecord, StoreVersion."""
    if HEADER not in fields:
        raise CorruptRecord(key, "it has no header")
    header = record.decode_header(key, fields[HEADER])
    layers = range(header.shape.n_layers)
    return header, [record.check_segment(key, header, l, fields.get(segment_name(l))) for l in layers]


def checked_record(key: ChunkKey, fields: Fields) -> ChunkRecord:
    """The same as a record. Raises CorruptRecord, StoreVersion."""
    header, segments = checked(key, fields)
    return ChunkRecord(key, header, segments.__getitem__, trusted=True)


def _require_bytes(parts: Sequence[object]) -> None:
    """Raise TypeError for a reply that was damaged into one of another type."""
    if not all(isinstance(part, bytes) for part in parts):
        raise TypeError("a hash holds something else than bytes")
