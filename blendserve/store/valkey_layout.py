"""The names on a Valkey or Redis server, and the accounting of its namespaces by scripts.

    blendserve:chunk:KEY         hash     a chunk: "h" -> header, "0", "1", ... -> segment of each layer (record.py)
    blendserve:lease:{CHUNK}     string   owner of the lease on the chunk of that name, in its slot
    blendserve:{TAG}:entries     hash     a namespace's chunks: key -> bytes, raw bytes, tokens, layers
    blendserve:{TAG}:used        zset     key -> last use, microseconds since 1970
    blendserve:{TAG}:pins        set      of keys
    blendserve:{TAG}:bytes       string   of all entries together
    blendserve:{TAG}:counts      hash     of look-ups, evictions, ... (ledger.py)
    blendserve:namespaces        set      of TAGs
    blendserve:tables            hash     hash of a blob -> its description (blobs.py)
    blendserve:tables:HASH       string   the blob

KEY, TAG and HASH are in hex. In a cluster the part in braces chooses the slot: the accounting of a namespace is in one
slot, so that one script changes it, and chunks spread.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from blendserve.errors import CorruptRecord
from blendserve.store.key import KEY_BYTES, TAG_BYTES, ChunkKey, namespace_tag
from blendserve.store.ledger import COUNTERS, Totals
from blendserve.store.policies import Candidate
from blendserve.store.record import ChunkRecord, check_segment, decode_header
from blendserve.store.valkey_client import Client

PREFIX = b"blendserve:"
CHUNK, NAMESPACES, BLOBS = PREFIX + b"chunk:", PREFIX + b"namespaces", PREFIX + b"tables"
HEADER = b"h"
KEY_NAME = re.compile(rb"[0-9a-f]{%d}" % (2 * KEY_BYTES))
NUMBER = re.compile(rb"-?\d{1,18}")  # of a counter
ACCOUNTS = "entries", "used", "pins", "bytes", "counts"  # KEYS of all scripts but RELEASE
BATCH = 1000  # keys in one command
EXPIRES_S = 30 * 86_400  # of an unpinned chunk, after its last use: volatile-lru evicts only keys that expire

log = logging.getLogger(__name__)

Fields: TypeAlias = "Mapping[bytes, bytes]"
Command: TypeAlias = "Callable[[Client, ChunkKey], object]"

# in front of all scripts but RELEASE
START = """
local entries, used, pins, bytes, counts = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local function size(key)
    local entry = redis.call('HGET', entries, key)
    return entry and tonumber(string.match(entry, '^%d+')) or 0
end
local function total()
    local n = redis.call('GET', bytes) or '0'
    if #n < 16 and string.match(n, '^%-?%d+$') then return tonumber(n) end
    n = 0  -- garbage: count again
    for _, entry in ipairs(redis.call('HVALS', entries)) do n = n + (tonumber(string.match(entry, '^%d+')) or 0) end
    redis.call('SET', bytes, string.format('%.0f', n))
    return n
end
local stored = total()
local function is_pinned(key) return redis.call('SISMEMBER', pins, key) == 1 end
local function remove(key)
    redis.call('DECRBY', bytes, size(key))  -- -0 is no integer to Redis
    redis.call('HDEL', entries, key)
    redis.call('ZREM', used, key)
    redis.call('SREM', pins, key)
end
"""
# key, n_bytes, quota, entry, now, pin, evict -> Reservation. Victims are the least recently used unpinned chunks that
# make room. Nothing changes if there are too few, or some and evict is 0, or the entry is empty.
RESERVE = """
local key, n = ARGV[1], tonumber(ARGV[2])
local before = redis.call('HGET', entries, key)
local others = stored - size(key)
local lacking, at, victims, sizes = others + n - tonumber(ARGV[3]), 0, {}, {}
while lacking > 0 do
    local page = redis.call('ZRANGE', used, at, at + 63)
    if #page == 0 then break end
    for _, old in ipairs(page) do
        if lacking > 0 and old ~= key and not is_pinned(old) then
            victims[#victims + 1], sizes[#sizes + 1] = old, size(old)
            lacking = lacking - size(old)
        end
    end
    at = at + 64
end
local enters = lacking <= 0 and (#victims == 0 or ARGV[7] == '1') and ARGV[4] ~= ''
if enters then
    for _, victim in ipairs(victims) do
        remove(victim)
        redis.pcall('HINCRBY', counts, 'evictions', 1)
    end
    if ARGV[6] == '1' then redis.call('SADD', pins, key) end
    redis.call('INCRBY', bytes, n - size(key))
    redis.call('HSET', entries, key, ARGV[4])
    redis.call('ZADD', used, ARGV[5], key)
end
return {enters and 1 or 0, before and tonumber(string.match(before, '%d+$')) or -1, is_pinned(key) and 1 or 0,
    others, redis.call('HLEN', entries), victims, sizes}
"""
# "use", "pin" or "unpin", then key, when, ... -> the unpinned ones, which may expire
TOUCH = """
local free = {}
for i = 2, #ARGV, 2 do
    local key = ARGV[i]
    if redis.call('HEXISTS', entries, key) == 1 then
        if ARGV[1] == 'pin' then redis.call('SADD', pins, key)
        elseif ARGV[1] == 'unpin' then redis.call('SREM', pins, key)
        elseif tonumber(ARGV[i + 1]) > tonumber(redis.call('ZSCORE', used, key) or '0') then
            redis.call('ZADD', used, ARGV[i + 1], key)  -- another process may have written a later use
        end
        if not is_pinned(key) then free[#free + 1] = key end
    end
end
return free
"""
# last use, key ... : removes the chunks that were used at that time or before
REMOVE = """
for i = 2, #ARGV do
    if tonumber(redis.call('ZSCORE', used, ARGV[i]) or '0') <= tonumber(ARGV[1]) then remove(ARGV[i]) end
end
return {}
"""
# Delete a lease only if it is still ours: after its time another process may hold it.
RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class ChunkEntry(NamedTuple):
    """A namespace's accounting of one chunk."""

    n_bytes: int
    raw_bytes: int
    n_tokens: int
    n_layers: int

    @classmethod
    def of(cls, record: ChunkRecord) -> ChunkEntry:
        return cls(record.n_bytes, record.raw_bytes, record.n_tokens, record.n_layers)

    @classmethod
    def parse(cls, key: bytes, raw: bytes) -> ChunkEntry | None:
        """None for garbage."""
        is_entry = len(key) == KEY_BYTES and re.fullmatch(rb"\d{1,18}( \d{1,18}){3}", raw)
        return cls(*map(int, raw.split())) if is_entry else None


class Reservation(NamedTuple):
    """Whether a chunk was entered, and what it finds."""

    is_entered: int
    layers_before: int  # of the chunk that it replaces; -1 for none
    is_pinned: int
    others: int  # bytes of all other chunks of the namespace
    n_chunks: int
    victims: list[Candidate]  # the chunks that make room; their entries are removed if it was entered


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


def by_namespace(keys: Iterable[ChunkKey]) -> Iterator[tuple[bytes, list[ChunkKey]]]:
    """(tag, keys of that namespace), at most BATCH keys at a time."""
    grouped: defaultdict[bytes, list[ChunkKey]] = defaultdict(list)
    for key in keys:
        grouped[key[:TAG_BYTES]].append(key)
    for tag, some in grouped.items():
        for at in range(0, len(some), BATCH):
            yield tag, some[at : at + BATCH]


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


def _delete_fields(client: Client, name: bytes, fields: Sequence[bytes]) -> None:
    client.hdel(name, *fields)


class Accounts:
    """The accounting of all namespaces. Methods raise StoreUnavailable; writing ones also StoreFull.

    Garbage, which another program may have written, counts as absent. `repair` deletes it.
    """

    def __init__(self, ask: Callable[..., Any]) -> None:
        """ask: runs a job with the client (ValkeyStore)."""
        self._ask = ask
        self._has_logged = False

    def _script(self, script: str, tag: bytes, *args: Any) -> list[Any]:
        names = [namespace_name(tag, what) for what in ACCOUNTS]
        return list(self._ask(lambda client: client.eval(START + script, len(names), *names, *args)))

    def _members(self, command: str, tag: bytes, what: str) -> Any:
        return self._ask(lambda client: getattr(client, command)(namespace_name(tag, what)))

    def tags(self, namespace: str | None) -> list[bytes]:
        """The tag of a namespace, or of all that ever stored anything."""
        if namespace is not None:
            return [namespace_tag(namespace)]
        found = self._ask(lambda client: client.smembers(NAMESPACES))
        return sorted(tag for tag in found if len(tag) == TAG_BYTES)

    def entries(self, tag: bytes) -> dict[ChunkKey, ChunkEntry]:
        found = self._members("hgetall", tag, "entries")
        parsed = {key: entry for key, raw in found.items() if (entry := ChunkEntry.parse(key, raw))}
        self._warn_of_garbage(len(found) - len(parsed))
        return parsed

    def repair(self, tag: bytes) -> None:
        """Delete the garbage in a namespace's entries and counters."""
        entries = self._members("hgetall", tag, "entries")
        counts = self._members("hgetall", tag, "counts")
        bad = {
            "entries": [key for key, raw in entries.items() if not ChunkEntry.parse(key, raw)],
            "counts": [name for name, n in counts.items() if not NUMBER.fullmatch(n)],
        }
        for what, names in bad.items():
            if names:
                self._ask(partial(_delete_fields, name=namespace_name(tag, what), fields=names))

    def _warn_of_garbage(self, n: int) -> None:
        if n and not self._has_logged:
            self._has_logged = True
            log.warning("the counters on the Valkey server have values of another program, which are ignored")

    def reserve(
        self,
        key: ChunkKey,
        n_bytes: int,
        quota: int,
        entry: ChunkEntry | None = None,
        now: int = 0,
        pin: bool = False,
        evict: bool = False,
    ) -> Reservation:
        """Enter a chunk if it fits, and if `evict` in place of others; without an entry change nothing.

        now: microseconds.
        """
        if entry:
            self._ask(lambda client: client.sadd(NAMESPACES, key[:TAG_BYTES]))
        raw = b"%d %d %d %d" % entry if entry else b""
        args = key, n_bytes, quota, raw, now, int(pin), int(evict)
        *found, victims, sizes = self._script(RESERVE, key[:TAG_BYTES], *args)
        return Reservation._make([*found, list(map(Candidate, victims, sizes))])

    def touch(self, action: str, used: Mapping[ChunkKey, int]) -> list[ChunkKey]:
        """ "use", "pin" or "unpin" entries. used: microseconds -> the unpinned ones."""
        free: list[ChunkKey] = []
        for tag, some in by_namespace(used):
            free += self._script(TOUCH, tag, action, *(part for key in some for part in (key, used[key])))
        return free

    def remove(self, keys: Iterable[ChunkKey], used_before: int = 1 << 62) -> None:
        """Remove entries, pinned or not. used_before: microseconds."""
        for tag, some in by_namespace(keys):
            self._script(REMOVE, tag, used_before, *some)

    def totals(self, tag: bytes) -> Totals:
        """Sums over a namespace's entries."""
        pins = set(self._members("smembers", tag, "pins"))
        total = Totals()
        for key, entry in self.entries(tag).items():
            n_pinned = entry.n_bytes if key in pins else 0
            parts = 1, entry.n_tokens, entry.n_bytes, entry.raw_bytes, int(key in pins), n_pinned
            total = Totals(*map(sum, zip(total, parts, strict=True)))
        return total

    def counts(self, tag: bytes) -> dict[str, int]:
        """A namespace's counters."""
        found = self._members("hgetall", tag, "counts")
        known = {
            name: int(found[name.encode()])
            for name in COUNTERS
            if NUMBER.fullmatch(found.get(name.encode(), b""))
        }
        self._warn_of_garbage(len(found) - len(known))
        return known

    def count(self, counts: Mapping[tuple[bytes, str], int]) -> None:
        """Add to counters, by (tag, counter)."""

        def job(client: Client) -> None:
            pipeline = client.pipeline(transaction=False)
            if counts:  # a namespace whose look-ups all missed has stored nothing
                pipeline.sadd(NAMESPACES, *{tag for tag, _ in counts})
            for (tag, counter), n in counts.items():
                pipeline.hincrby(namespace_name(tag, "counts"), counter, n)
            pipeline.execute()

        self._ask(job)
