"""A namespace's accounting on a Valkey server: entries, uses, pins, counters and the quota. Its scripts run alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from blendserve.errors import StoreError
from blendserve.store.clock import Clock
from blendserve.store.key import TAG_BYTES, ChunkKey, namespace_tag
from blendserve.store.network.connection import Connection
from blendserve.store.policies import Candidate
from blendserve.store.usage import UsageLog
from blendserve.store.valkey_client import Client
from blendserve.store.valkey_layout import (
    NAMESPACES,
    REMOVE,
    RESERVE,
    TOUCH,
    Entry,
    Reserved,
    by_namespace,
    chunk_name,
    expire,
    namespace_name,
)

GRACE_S = 60.0  # an entry as young as this may be of a chunk that is still being written


class ServerAccounts:
    """The accounting of all namespaces. Every method raises StoreUnavailable; those that write, StoreFull."""

    def __init__(self, connection: Connection, quota: int, clock: Clock) -> None:
        """quota: bytes of a namespace."""
        self._connection, self._quota, self._clock = connection, quota, clock

    def enter(
        self,
        key: ChunkKey,
        entry: Entry,
        now: int,
        pin: bool,
        victims: Sequence[Candidate] = (),
        dry: bool = False,
        quota: int | None = None,
    ) -> Reserved:
        """now: microseconds. dry: change nothing. quota: by default the cap."""
        tag, about = key[:TAG_BYTES], b" ".join(b"%d" % part for part in entry)
        quota = self._quota if quota is None else quota
        told = [key, entry.n_bytes, about, now, int(pin), quota, int(dry), *(v.key for v in victims)]
        if not dry:
            self._connection.ask(lambda client: client.sadd(NAMESPACES, tag))
        found = self._script(RESERVE, tag, told)
        oldest = [Candidate(k, n) for k, n in zip(found[5::2], found[6::2], strict=True)]
        lacking, n_chunks, layers, pinned, others = map(int, found[:5])
        return Reserved(lacking, n_chunks, layers, pinned, others, oldest)

    def remove(self, keys: Iterable[ChunkKey], used_before: int = 1 << 62) -> None:
        """Remove entries, pinned or not. used_before: microseconds."""
        for tag, some in by_namespace(keys):
            self._script(REMOVE, tag, [used_before, *some])

    def remove_lost(self) -> None:
        """Remove the entries whose chunks the server has evicted, or that no process ever wrote."""
        settled = self._clock.time_ns() // 1000 - round(GRACE_S * 1e6)
        for tag in self.tags(None):
            for _, some in by_namespace(self.entries(tag)):
                self.remove(set(some) - self.stored(some), settled)

    def touch(self, action: str, keys: Mapping[ChunkKey, int]) -> list[ChunkKey]:
        """ "use", "pin" or "unpin" entries; values: microseconds -> those that may expire."""
        free: list[ChunkKey] = []
        for tag, some in by_namespace(keys):
            free += self._script(TOUCH, tag, [action, *(part for key in some for part in (key, keys[key]))])
        return free

    def note(self, usage: UsageLog) -> None:
        """Write what was noted of uses. Raises StoreError; the notes are kept then."""
        notes = usage.drain()

        def count(client: Client) -> None:
            pipeline = client.pipeline(transaction=False)
            if notes.counts:  # a namespace whose look-ups all missed has stored nothing
                pipeline.sadd(NAMESPACES, *{tag for tag, _ in notes.counts})
            for (tag, counter), n in notes.counts.items():
                pipeline.hincrby(namespace_name(tag, "counts"), counter, n)
            pipeline.execute()

        try:
            free = self.touch("use", {key: used // 1000 for key, used in notes.used.items()})
            self._connection.ask(count)
            self.each(free, expire)
        except StoreError:
            usage.restore(notes)
            raise

    def entries(self, tag: bytes) -> dict[ChunkKey, Entry]:
        found = self._connection.ask(lambda client: client.hgetall(namespace_name(tag, "entries")))
        return {key: Entry(*map(int, raw.split())) for key, raw in found.items()}

    def tags(self, namespace: str | None) -> list[bytes]:
        """The tag of a namespace, or of all that ever stored anything."""
        if namespace is not None:
            return [namespace_tag(namespace)]
        return self._connection.ask(lambda client: sorted(client.smembers(NAMESPACES)))

    def _script(self, script: str, tag: bytes, told: Sequence[Any]) -> list[Any]:
        names = [namespace_name(tag, what) for what in ("entries", "used", "pins", "bytes", "counts")]
        return self._connection.ask(lambda client: list(client.eval(script, len(names), *names, *told)))

    def each(self, keys: Sequence[ChunkKey], command: Callable[[Client, ChunkKey], object]) -> list[Any]:
        """The replies to a command for each key, in one round trip."""

        def job(client: Client) -> list[Any]:
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                command(pipeline, key)
            replies: list[Any] = pipeline.execute()
            return replies

        return self._connection.ask(job) if keys else []

    def stored(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Those whose chunks are on the server."""
        asked = list(keys)
        found = self.each(asked, lambda pipeline, key: pipeline.exists(chunk_name(key)))
        return {key for key, is_there in zip(asked, found, strict=True) if is_there}
