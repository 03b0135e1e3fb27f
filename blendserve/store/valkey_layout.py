"""What lies where on a Valkey or Redis server, and the scripts that change a namespace's accounting.

    blendserve:chunk:KEY         hash     a chunk: "h" -> header, "0", "1", ... -> segment of each layer (record.py)
    blendserve:lease:{CHUNK}     string   owner of the lease on the chunk of that name, in its slot
    blendserve:{TAG}:entries     hash     a namespace's chunks: key -> bytes, raw bytes, tokens, layers
    blendserve:{TAG}:used        zset     key -> last use, microseconds since 1970
    blendserve:{TAG}:pins        set      of keys
    blendserve:{TAG}:bytes       string   of all entries together
    blendserve:{TAG}:counts      hash     of look-ups, evictions, ... (usage.py)
    blendserve:namespaces        set      of TAGs
    blendserve:tables            hash     hash of a blob -> its description (blobs.py)
    blendserve:tables:HASH       string   the blob

KEY, TAG and HASH are in hex. In a cluster what is in braces chooses the slot: a namespace's accounting lies together, so
that one script changes it, and chunks spread. A chunk is entered before it is written and removed before it is deleted,
so the quota holds. The server evicts by itself, too, and processes end: entries without chunks are removed by `stats`,
once a minute, and by `verify`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from blendserve.errors import CorruptBlob, CorruptRecord
from blendserve.store.blobs import BlobInfo, BlobStore, check_blob, check_room
from blendserve.store.codecs.base import tables_hash
from blendserve.store.key import TAG_BYTES, ChunkKey
from blendserve.store.network.connection import Connection
from blendserve.store.policies import Candidate
from blendserve.store.record import ChunkRecord, check_segment, decode_header
from blendserve.store.request_reads import Sample
from blendserve.store.usage import UsageLog
from blendserve.store.valkey_client import Client

PREFIX = b"blendserve:"
CHUNK, NAMESPACES, BLOBS = PREFIX + b"chunk:", PREFIX + b"namespaces", PREFIX + b"tables"
HEADER = b"h"

EXPIRES_S = 30 * 86_400  # of an unpinned chunk, after its last use: volatile-lru evicts only what expires
BATCH = 1000  # keys in one command

Fields: TypeAlias = "Mapping[bytes, bytes]"

_START = """
local entries, used, pins, bytes, counts = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local function size(key)
    local entry = redis.call('HGET', entries, key)
    return entry and tonumber(string.match(entry, '^%d+')) or 0
end
local function remove(key)
    redis.call('DECRBY', bytes, size(key))  -- -0 is no integer to Redis
    redis.call('HDEL', entries, key)
    redis.call('ZREM', used, key)
    redis.call('SREM', pins, key)
end
"""
# key, n_bytes, entry, now, pin, quota, dry, victims ... -> lacking, chunks, layers before, pinned, other bytes, then key,
# bytes ... of the oldest that make room. Enters the chunk, in place of the victims, if all is within the quota then.
RESERVE = (
    _START
    + """
local key, n, pin = ARGV[1], tonumber(ARGV[2]), ARGV[5] == '1'
local before = redis.call('HGET', entries, key)
local layers = before and tonumber(string.match(before, '%d+$')) or -1
local total = tonumber(redis.call('GET', bytes) or '0') - size(key)
local lacking = total + n - tonumber(ARGV[6])
local victims = {}
for i = 8, #ARGV do
    if ARGV[i] ~= key and redis.call('SISMEMBER', pins, ARGV[i]) == 0 then
        victims[#victims + 1] = ARGV[i]
        lacking = lacking - size(ARGV[i])
    end
end
local told = {lacking, redis.call('HLEN', entries), layers, redis.call('SISMEMBER', pins, key), total}
if lacking > 0 or ARGV[7] == '1' then
    local at, room = 0, 0
    while room < total + n - tonumber(ARGV[6]) do
        local page = redis.call('ZRANGE', used, at, at + 63)
        if #page == 0 then break end
        for _, old in ipairs(page) do
            if old ~= key and redis.call('SISMEMBER', pins, old) == 0 then
                told[#told + 1], told[#told + 2] = old, size(old)
                room = room + size(old)
            end
        end
        at = at + 64
    end
    return told
end
for _, victim in ipairs(victims) do
    remove(victim)
    redis.call('HINCRBY', counts, 'evictions', 1)
end
if pin then redis.call('SADD', pins, key); told[4] = 1 end
redis.call('INCRBY', bytes, n - size(key))
redis.call('HSET', entries, key, ARGV[3])
redis.call('ZADD', used, ARGV[4], key)
return told
"""
)
# "use", "pin" or "unpin", then key, when ... -> those that may expire
TOUCH = (
    _START
    + """
local free = {}
for i = 2, #ARGV, 2 do
    local key = ARGV[i]
    if redis.call('HEXISTS', entries, key) == 1 then
        if ARGV[1] == 'pin' then redis.call('SADD', pins, key)
        elseif ARGV[1] == 'unpin' then redis.call('SREM', pins, key)
        elseif tonumber(ARGV[i + 1]) > tonumber(redis.call('ZSCORE', used, key) or '0') then
            redis.call('ZADD', used, ARGV[i + 1], key)  -- another process may have written a later use
        end
        if redis.call('SISMEMBER', pins, key) == 0 then free[#free + 1] = key end
    end
end
return free
"""
)
# last use, key ... : those that were used later than that are left alone
REMOVE = (
    _START
    + """
for i = 2, #ARGV do
    if tonumber(redis.call('ZSCORE', used, ARGV[i]) or '0') <= tonumber(ARGV[1]) then remove(ARGV[i]) end
end
return {}
"""
)
# Delete a lease only if it is still ours: after its time another process may hold it.
RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class Entry(NamedTuple):
    """What a namespace counts of a chunk."""

    n_bytes: int
    raw_bytes: int
    n_tokens: int
    n_layers: int

    @classmethod
    def of(cls, record: ChunkRecord) -> Entry:
        return cls(record.n_bytes, record.raw_bytes, record.n_tokens, record.n_layers)


class Reserved(NamedTuple):
    """What became of a chunk that was to be entered; nothing has changed if `lacking` > 0."""

    lacking: int  # bytes that are to be freed first
    n_chunks: int
    layers_before: int  # of what is there under the key; -1 where nothing is
    pinned: int  # 1 if it is
    others: int  # bytes of all other chunks
    oldest: list[Candidate]  # that make room


def chunk_name(key: ChunkKey) -> bytes:
    return CHUNK + key.hex().encode()


def segment_name(l: int) -> bytes:
    return b"%d" % l


def namespace_name(tag: bytes, what: str) -> bytes:
    return PREFIX + b"{%s}:%s" % (tag.hex().encode(), what.encode())


def lease_name(key: ChunkKey) -> bytes:
    return PREFIX + b"lease:{%s}" % chunk_name(key)


def read_fields(client: Client, keys: Sequence[ChunkKey]) -> list[Fields]:
    """The hash of each chunk, {} where nothing is; one round trip. Raises what valkey-py does, TypeError."""
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.hgetall(chunk_name(key))
    found: list[dict[bytes, bytes]] = pipeline.execute()
    _require_bytes([part for fields in found for pair in fields.items() for part in pair])
    return list(found)


def checked(key: ChunkKey, fields: Fields) -> ChunkRecord:
    """The record in a hash, all of it checked. Raises CorruptRecord, StoreVersion."""
    if HEADER not in fields:
        raise CorruptRecord(key, "it has no header")
    header = decode_header(key, fields[HEADER])
    layers = range(header.shape.n_layers)
    segments = [check_segment(key, header, l, fields.get(segment_name(l))) for l in layers]
    return ChunkRecord(key, header, segments.__getitem__, trusted=True)


def blob_name(hash: bytes) -> bytes:
    return BLOBS + b":" + hash.hex().encode()


def persist(pipeline: Client, key: ChunkKey) -> None:
    """Let a chunk never expire."""
    pipeline.persist(chunk_name(key))


def expire(pipeline: Client, key: ChunkKey) -> None:
    """Let a chunk expire in time."""
    pipeline.expire(chunk_name(key), EXPIRES_S)


def pins_and_counts(client: Client, tag: bytes) -> tuple[set[ChunkKey], dict[bytes, bytes]]:
    """The pinned keys and the counters of a namespace."""
    pins = set(client.smembers(namespace_name(tag, "pins")))
    return pins, client.hgetall(namespace_name(tag, "counts"))


def scan(client: Client) -> set[ChunkKey]:
    """The keys of all chunks on the server, entered or not."""
    names = (name.removeprefix(CHUNK) for name in client.scan_iter(match=CHUNK + b"*", count=1000))
    return {bytes.fromhex(name.decode()) for name in names if len(name) % 2 == 0 and name.isalnum()}


def sample(client: Client, keys: Sequence[ChunkKey], n_bytes: int) -> Sample | None:
    """Headers of these, timed, then the first layers of one. Raises what valkey-py does, CorruptRecord, StoreVersion."""
    client.ping()  # or connecting would be timed
    start = time.perf_counter()
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.hget(chunk_name(key), HEADER)
    headers = pipeline.execute()
    round_trip = time.perf_counter() - start
    found = next(((key, raw) for key, raw in zip(keys, headers, strict=True) if raw), None)
    if found is None:
        return None
    header = decode_header(*found)
    layers = header.shape.n_layers
    some = max(1, min(layers, n_bytes * layers // max(1, header.n_bytes)))
    start = time.perf_counter()
    got = client.hmget(chunk_name(found[0]), [segment_name(l) for l in range(some)])
    seconds = time.perf_counter() - start
    if None in got:  # evicted meanwhile
        return None
    part = sum(header.lengths[:some]) / max(1, header.n_bytes)
    return Sample(round_trip, seconds, part, header.shape.n_tokens)


def by_namespace(keys: Iterable[ChunkKey]) -> Iterator[tuple[bytes, list[ChunkKey]]]:
    """(tag, keys of that namespace), at most BATCH at a time."""
    grouped: defaultdict[bytes, list[ChunkKey]] = defaultdict(list)
    for key in keys:
        grouped[key[:TAG_BYTES]].append(key)
    for tag, some in grouped.items():
        for at in range(0, len(some), BATCH):
            yield tag, some[at : at + BATCH]


def _require_bytes(parts: Sequence[object]) -> None:
    """Raise TypeError for a reply that was damaged into one of another type."""
    if not all(isinstance(part, bytes) for part in parts):
        raise TypeError("a hash holds something else than bytes")


class ServerBlobs(BlobStore):
    """Every method raises StoreUnavailable."""

    def __init__(self, connection: Connection, usage: UsageLog, check: Callable[..., None]) -> None:
        """check: of the store's state, before a call that writes or not. Raises StoreUnavailable."""
        self._connection, self._usage, self._check = connection, usage, check

    def list(self) -> Sequence[BlobInfo]:
        self._check()
        found: dict[bytes, bytes] = self._connection.ask(lambda client: client.hgetall(BLOBS))
        infos = []
        for hash, raw in sorted(found.items()):
            try:
                infos.append(BlobInfo.from_bytes(hash, raw))
            except ValueError:
                continue
        return infos

    def get(self, hash: bytes) -> bytes | None:
        return self.read(hash)

    def read(self, hash: bytes, seconds: float | None = None) -> bytes | None:
        """Within so many seconds, by default the deadline. Raises CorruptBlob."""
        self._check()
        raw: bytes | None = self._connection.ask(lambda client: client.get(blob_name(hash)), seconds)
        return None if raw is None else check_blob(hash, raw)

    def put(self, kind: str, owner: str, raw: bytes, current: bool = True) -> bytes:
        self._check(writing=True)
        hash = tables_hash(raw)
        check_room(self.list(), hash, len(raw))
        info = BlobInfo(hash, kind, owner, len(raw), self._usage.now() if current else 0)

        def job(client: Client) -> None:
            client.set(blob_name(hash), raw)
            client.hset(BLOBS, hash, info.to_bytes())

        self._connection.ask(job)
        return hash

    def delete(self, hash: bytes) -> bool:
        self._check(writing=True)

        def job(client: Client) -> bool:
            return bool(client.unlink(blob_name(hash)) + client.hdel(BLOBS, hash))

        return self._connection.ask(job)

    def problems(self) -> tuple[tuple[str, str], ...]:
        """(hash in hex, what is wrong) of blobs with which something is."""
        hashes: Sequence[bytes] = self._connection.ask(lambda client: client.hkeys(BLOBS))
        found = ((hash.hex(), self._problem(hash)) for hash in sorted(hashes))
        return tuple((hash, problem) for hash, problem in found if problem)

    def _problem(self, hash: bytes) -> str:
        if hash not in {info.hash for info in self.list()}:
            return "what they are for is damaged"
        try:
            return "they are missing" if self.read(hash) is None else ""
        except CorruptBlob as error:
            return str(error)
