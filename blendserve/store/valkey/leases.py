"""Who computes a chunk, of all the processes that miss it: whoever set the lease first, until released or expired."""

from __future__ import annotations

import contextlib
import secrets

from blendserve.errors import StoreError
from blendserve.store.base import Lease
from blendserve.store.key import ChunkKey
from blendserve.store.valkey.connection import Connection
from blendserve.store.valkey.names import lease_name

# Delete it only if it is still ours: after its time another process may hold it.
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class ServerLease(Lease):
    """Held by the token that only this object knows."""

    def __init__(self, connection: Connection, name: bytes, token: bytes) -> None:
        self._connection, self._name, self._token = connection, name, token
        self._held = True

    def release(self) -> None:
        held, self._held = self._held, False
        if held:
            with contextlib.suppress(StoreError):  # it expires
                self._connection.ask(lambda client: client.eval(_RELEASE, 1, self._name, self._token))


def lease(connection: Connection, key: ChunkKey, seconds: float) -> Lease | None:
    """See KVStore.lease."""
    name, token = lease_name(key), secrets.token_bytes(16)
    milliseconds = max(1, round(seconds * 1000))
    try:
        granted = connection.ask(lambda client: client.set(name, token, nx=True, px=milliseconds))
    except StoreError:
        return Lease()  # nobody can be asked: better computed twice than not at all
    return ServerLease(connection, name, token) if granted else None
