"""Which process computes a chunk: the one that set the lease first, until released or expired.

one round trip    lease, for all chunks of a stack
with the write    release: in a cluster, too, as a lease lies in its chunk's slot
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterable, Sequence

from blendserve.errors import StoreError
from blendserve.store.key import ChunkKey
from blendserve.store.network.connection import Connection
from blendserve.store.valkey.client import Client
from blendserve.store.valkey.names import lease_name

# Delete it only if it is still ours: after its time another process may hold it.
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class Leases:
    """The leases that this process holds on a server. Safe to share between threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._owner = secrets.token_bytes(16)
        self._held: set[ChunkKey] = set()
        self._lock = threading.Lock()

    def take(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        """See KVStore.lease."""
        milliseconds = max(1, round(seconds * 1000))

        def job(client: Client) -> list[object]:
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.set(lease_name(key), self._owner, nx=True, px=milliseconds)
            replies: list[object] = pipeline.execute()
            return replies

        try:
            replies = self._connection.ask(job) if keys else []
        except StoreError:
            return set(keys)
        granted = {key for key, leased in zip(keys, replies, strict=True) if leased}
        with self._lock:
            self._held |= granted
        return granted

    def end_with(self, pipeline: Client, key: ChunkKey) -> None:
        """Have a chunk's lease end behind what the pipeline does, if there is one: see `ended`."""
        if key in self._held:
            pipeline.execute_command("EVAL", _RELEASE, 1, lease_name(key), self._owner)

    def ended(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Those of which a lease was held; it is no more."""
        with self._lock:
            held = [key for key in keys if key in self._held]
            self._held.difference_update(held)
        return held

    def release(self, keys: Iterable[ChunkKey]) -> None:
        held = self.ended(keys)

        def job(client: Client) -> None:
            pipeline = client.pipeline(transaction=False)
            for key in held:
                pipeline.execute_command("EVAL", _RELEASE, 1, lease_name(key), self._owner)
            pipeline.execute()

        if held:
            with contextlib.suppress(StoreError):  # it expires
                self._connection.ask(job)
