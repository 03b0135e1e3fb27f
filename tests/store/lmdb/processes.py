"""What other processes do with a store."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path

from blendserve.store import LMDBStore
from blendserve.store.policies import LRU
from tests.store.helpers import chunk, key_of, read, same

CAP = 50_000_000


def tokens_of(n: int) -> int:
    return 40 + n % 30


def write(connection: Connection, path: Path, n_keys: int, cap: int = CAP) -> None:
    """Puts chunks for ever and says which are there."""
    with LMDBStore(path, cap, eviction=LRU()) as store:
        n = 0
        while True:
            store.put(key_of(n % n_keys), chunk(tokens_of(n), seed=n % n_keys))
            connection.send(n)
            n += 1


def read_all(connection: Connection, path: Path, n_keys: int, seconds: float) -> None:
    """Reads and checks chunks, and says how many were there."""
    hits, stop = 0, time.monotonic() + seconds
    with LMDBStore(path, CAP, read_only=True) as store:
        while time.monotonic() < stop:
            for n in range(n_keys):
                kv = read(store, key_of(n))
                if kv is not None:
                    assert same(kv, chunk(kv.n_tokens, seed=n))
                    hits += 1
    connection.send(hits)


def hold(connection: Connection, path: Path) -> None:
    """Is the writer until told otherwise."""
    with LMDBStore(path, CAP) as store, store._env.writing(5.0):
        connection.send("held")
        connection.recv()


def fill(connection: Connection, path: Path, n_keys: int) -> None:
    """Puts some chunks and ends."""
    with LMDBStore(path, CAP) as store:
        for n in range(n_keys):
            store.put(key_of(n), chunk(tokens_of(n), seed=n))
