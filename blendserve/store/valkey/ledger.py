"""What each namespace has on the server: sizes, uses, pins, counters; and its quota, kept by scripts, which run alone.

A chunk is entered before it is written and struck out before it is deleted, so nobody stores more than the quota. The
server evicts on its own account, and a process may end between the two: then there are entries without chunks, which
count until they are evicted as the oldest, or until `strike_lost` finds them. Entries of another size than their chunk's
(two writers at once) are mended by `verify`.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from blendserve.store.clock import Clock
from blendserve.store.key import TAG_BYTES, ChunkKey
from blendserve.store.network.connection import Connection
from blendserve.store.policies import Candidate
from blendserve.store.record import Header
from blendserve.store.usage import Notes
from blendserve.store.valkey import chunks
from blendserve.store.valkey.client import Client
from blendserve.store.valkey.names import NAMESPACES, namespace_name

PAGE = 64  # candidates for eviction that are asked for at a time
BATCH = 1000  # keys in one command
SCAN_S = 600.0  # for the names of all chunks
GRACE_S = 60.0  # an entry as young as this may be of a chunk that is still being written

_WHAT = ("entries", "used", "pins", "bytes", "counts")
_START = """
local entries, used, pins, bytes, counts = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local function size(key)
    local entry = redis.call('HGET', entries, key)
    return entry and tonumber(string.match(entry, '^%d+')) or 0
end
local function strike(key)
    local n = size(key)
    redis.call('DECRBY', bytes, n)  -- -0 is no integer to Redis
    redis.call('HDEL', entries, key)
    redis.call('ZREM', used, key)
    redis.call('SREM', pins, key)
    return n
end
"""
# key, n_bytes, entry, now, pin, quota, dry, victims ... -> room lacking, chunks, layers before, pinned
_ENTER = (
    _START
    + """
local key, n, entry, now, pin = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5] == '1'
local before = redis.call('HGET', entries, key)
local total = tonumber(redis.call('GET', bytes) or '0') - size(key)
local lacking = total + n - tonumber(ARGV[6])
local victims = {}
for i = 8, #ARGV do
    if ARGV[i] ~= key and redis.call('SISMEMBER', pins, ARGV[i]) == 0 then
        victims[#victims + 1] = ARGV[i]
        lacking = lacking - size(ARGV[i])
    end
end
local pinned = redis.call('SISMEMBER', pins, key)
local layers = before and tonumber(string.match(before, '%d+$')) or -1
if lacking > 0 or ARGV[7] == '1' then
    return {lacking, redis.call('HLEN', entries), layers, pinned, total}
end
for _, victim in ipairs(victims) do
    strike(victim)
    redis.call('HINCRBY', counts, 'evictions', 1)
end
if pin then redis.call('SADD', pins, key); pinned = 1 end
redis.call('INCRBY', bytes, n - size(key))
redis.call('HSET', entries, key, entry)
redis.call('ZADD', used, now, key)
return {lacking, redis.call('HLEN', entries), layers, pinned, total}
"""
)
# last use, key ... : those that were used later than that are left alone
_STRIKE = (
    _START
    + """
for i = 2, #ARGV do
    if tonumber(redis.call('ZSCORE', used, ARGV[i]) or '0') <= tonumber(ARGV[1]) then strike(ARGV[i]) end
end
"""
)
# first, last -> how many there are, then key, bytes ... of those that are not pinned
_OLDEST = (
    _START
    + """
local page = redis.call('ZRANGE', used, ARGV[1], ARGV[2])
local found = {#page}
for _, key in ipairs(page) do
    if redis.call('SISMEMBER', pins, key) == 0 then
        found[#found + 1] = key
        found[#found + 1] = size(key)
    end
end
return found
"""
)
_PIN = (
    _START
    + """
for i = 2, #ARGV do
    if ARGV[1] == '0' then redis.call('SREM', pins, ARGV[i])
    elseif redis.call('HEXISTS', entries, ARGV[i]) == 1 then redis.call('SADD', pins, ARGV[i]) end
end
"""
)
# key, when ... -> those that may expire
_USE = (
    _START
    + """
local free = {}
for i = 1, #ARGV, 2 do
    if redis.call('HEXISTS', entries, ARGV[i]) == 1 then
        if tonumber(ARGV[i + 1]) > tonumber(redis.call('ZSCORE', used, ARGV[i]) or '0') then
            redis.call('ZADD', used, ARGV[i + 1], ARGV[i])  -- another process may have written a later use
        end
        if redis.call('SISMEMBER', pins, ARGV[i]) == 0 then free[#free + 1] = ARGV[i] end
    end
end
return free
"""
)


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a chunk without reading it."""

    n_bytes: int
    raw_bytes: int
    n_tokens: int
    n_layers: int

    @classmethod
    def of(cls, header: Header) -> Entry:
        shape = header.shape
        return cls(header.n_bytes, shape.n_bytes, shape.n_tokens, shape.n_layers)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Entry:
        return cls(*map(int, raw.split()))

    def to_bytes(self) -> bytes:
        return b"%d %d %d %d" % (self.n_bytes, self.raw_bytes, self.n_tokens, self.n_layers)


@dataclass(frozen=True, slots=True)
class Entered:
    """What became of a chunk that was to be entered; nothing has changed if `lacking` > 0."""

    lacking: int  # bytes that are to be freed first
    n_chunks: int
    layers_before: int  # of what is there under the key; -1 where nothing is
    pinned: int  # 1 if it is
    others: int  # bytes of all other chunks


class Ledger:
    """The entries of all namespaces. Every method raises StoreUnavailable; those that write, StoreFull."""

    def __init__(self, connection: Connection, clock: Clock = time) -> None:
        self._connection, self._clock = connection, clock

    def enter(
        self,
        key: ChunkKey,
        entry: Entry,
        now: int,
        pin: bool,
        quota: int,
        victims: Sequence[Candidate] = (),
        dry: bool = False,
    ) -> Entered:
        """Enter a chunk and strike out the victims, if all is within the quota then. now: microseconds. dry: only see."""
        tag = key[:TAG_BYTES]
        told: list[bytes | int] = [key, entry.n_bytes, entry.to_bytes(), now, int(pin), quota, int(dry)]
        told += [victim.key for victim in victims]

        def job(client: Client) -> Entered:
            if not dry:
                client.sadd(NAMESPACES, tag)
            return Entered(*map(int, _run(client, _ENTER, tag, told)))

        return self._connection.ask(job)

    def strike(self, keys: Iterable[ChunkKey], used_before: int = 1 << 62) -> None:
        """Strike out chunks, pinned or not. used_before: microseconds."""
        for tag, some in _by_namespace(keys):
            self._script(_STRIKE, tag, [used_before, *some])

    def oldest(self, tag: bytes) -> Iterator[Candidate]:
        """The chunks of a namespace that may be evicted, the least recently used first."""
        at = 0
        there = PAGE
        while there == PAGE:
            there, *found = self._script(_OLDEST, tag, [at, at + PAGE - 1])
            for key, n_bytes in zip(found[::2], found[1::2], strict=True):
                yield Candidate(key, n_bytes)
            at += PAGE

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> None:
        for tag, some in _by_namespace(keys):
            self._script(_PIN, tag, [int(pinned), *some])

    def note(self, notes: Notes) -> list[ChunkKey]:
        """Write down uses and counters -> of the chunks used, those that may expire."""
        free: list[ChunkKey] = []
        for tag, keys in _by_namespace(notes.used):
            told = [part for key in keys for part in (key, notes.used[key] // 1000)]
            free += self._script(_USE, tag, told)

        def count(client: Client) -> None:
            pipeline = client.pipeline(transaction=False)
            if notes.counts:  # a namespace whose look-ups all missed has stored nothing
                pipeline.sadd(NAMESPACES, *{tag for tag, _ in notes.counts})
            for (tag, counter), n in notes.counts.items():
                pipeline.hincrby(namespace_name(tag, "counts"), counter, n)
            pipeline.execute()

        self._connection.ask(count)
        return free

    def namespaces(self) -> list[bytes]:
        """The tags of all that ever stored anything."""
        return self._connection.ask(lambda client: sorted(client.smembers(NAMESPACES)))

    def entries(self, tag: bytes) -> dict[ChunkKey, Entry]:
        def job(client: Client) -> dict[ChunkKey, Entry]:
            found = client.hgetall(namespace_name(tag, "entries"))
            return {key: Entry.from_bytes(raw) for key, raw in found.items()}

        return self._connection.ask(job)

    def keys(self, tag: bytes) -> set[ChunkKey]:
        """Of the entries. In pages: the server answers others between them."""
        entries = namespace_name(tag, "entries")
        return self._connection.ask(
            lambda client: {key for key, _ in client.hscan_iter(entries, count=1000)}, SCAN_S
        )

    def pins(self, tag: bytes) -> set[ChunkKey]:
        return self._connection.ask(lambda client: set(client.smembers(namespace_name(tag, "pins"))))

    def counts(self, tag: bytes) -> Counter[str]:
        def job(client: Client) -> Counter[str]:
            found = client.hgetall(namespace_name(tag, "counts"))
            return Counter({counter.decode(): int(n) for counter, n in found.items()})

        return self._connection.ask(job)

    def strike_lost(self, tag: bytes) -> None:
        """Strike out the entries whose chunks the server has evicted, or nobody ever wrote."""
        settled = self._clock.time_ns() // 1000 - round(GRACE_S * 1e6)
        for _, keys in _by_namespace(self.entries(tag)):
            found = self._connection.ask(partial(chunks.there, keys=keys))
            lost = [key for key, is_there in zip(keys, found, strict=True) if not is_there]
            self.strike(lost, settled)

    def _script(self, script: str, tag: bytes, told: Sequence[bytes | int]) -> list[Any]:
        return self._connection.ask(lambda client: list(_run(client, script, tag, told) or ()))


def _run(client: Client, script: str, tag: bytes, told: Sequence[bytes | int]) -> Any:
    names = [namespace_name(tag, what) for what in _WHAT]
    return client.eval(script, len(names), *names, *told)


def _by_namespace(keys: Iterable[ChunkKey]) -> Iterator[tuple[bytes, list[ChunkKey]]]:
    """(tag, keys of that namespace), at most BATCH at a time."""
    grouped: defaultdict[bytes, list[ChunkKey]] = defaultdict(list)
    for key in keys:
        grouped[key[:TAG_BYTES]].append(key)
    for tag, some in grouped.items():
        for at in range(0, len(some), BATCH):
            yield tag, some[at : at + BATCH]
