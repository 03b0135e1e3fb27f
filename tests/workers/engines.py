"""What workers in other processes open: a toy engine on the shared store, which notes each chunk that is stored."""

from __future__ import annotations

import os
import signal
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from blendserve.config import ValkeyConfig, changed
from blendserve.core import ChunkKV, TokenIds
from blendserve.engine.engine import Engine
from blendserve.store import ChunkKey, KVStore, LayeredStore, MemoryStore, Snapshot
from blendserve.store.policies import LRU
from blendserve.store.valkey.store import ValkeyStore
from blendserve.store.wrapped import WrappedStore
from tests.engine.helpers import CONFIG, reader

CAP = 1 << 28
CHUNKS: list[TokenIds] = [tuple(range(i, i + 40)) for i in range(60)]


SECOND_NODE = "BLENDSERVE_TEST_SECOND_NODE"  # in the environment of processes there


def on_second_node() -> bool:
    return SECOND_NODE in os.environ


def kill(process: int, node: int | None = None) -> None:
    """A worker, and with it the node that it is on; there the node is first, so that it cannot tell of the worker."""
    for pid in (node, process):
        if pid is not None:
            os.kill(pid, signal.SIGKILL)


class NotingStore(WrappedStore):
    """Writes process and key of each put to a file: a line is one write, whoever else writes."""

    def __init__(self, store: KVStore, opened: OpenToy) -> None:
        super().__init__(store)
        self._opened, self._puts = opened, 0

    def reading(self) -> AbstractContextManager[Snapshot]:
        return self._store.reading()

    def put(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        stored = super().put(key, kv, pin)
        self._note(key)
        return stored

    def put_uncoded(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        stored = super().put_uncoded(key, kv, pin)
        self._note(key)
        return stored

    def _note(self, key: ChunkKey) -> None:
        with self._opened.log.open("a") as out:
            out.write(f"{os.getpid()} {key.hex()}\n")
        self._puts += 1
        if self._puts == self._opened.dies_after:
            self._die()

    def _die(self) -> None:
        """By SIGKILL: the second node first, and then one process of those on the first."""
        second = on_second_node()
        while not second and not self._opened.died(True).exists():
            time.sleep(0.01)
        if not (died := self._opened.died(second)).exists():
            died.touch()
            kill(os.getpid(), os.getppid() if second else None)


@dataclass(frozen=True)
class OpenToy:
    """Opens the toy engine on a server's database."""

    server: ValkeyConfig
    log: Path
    dies_after: int | None = None  # puts: on each of two nodes one process dies that comes so far

    def died(self, node: bool) -> Path:
        """There as soon as a process has, or the second node with the process that ran there."""
        return self.log.with_suffix(".node_died" if node else ".died")

    def __call__(self) -> Engine:
        return Engine(CONFIG, reader(), NotingStore(ValkeyStore(self.server, CAP), self))

    @property
    def pids(self) -> list[int]:
        """Of the processes that opened a replica's on the first node, in order."""
        return [pid for pid, _, second in self._replicas() if not second]

    @property
    def second_pids(self) -> list[tuple[int, int]]:
        """The same on the second node, each with its node's process."""
        return [(pid, node) for pid, node, second in self._replicas() if second]

    def _replicas(self) -> list[list[int]]:
        lines = self.log.with_suffix(".pids").read_text().splitlines()
        return [[int(word) for word in line.split()] for line in lines]

    def replica(self) -> Engine:
        """Opens one with a memory of its own before the server, for a few chunks."""
        with self.log.with_suffix(".pids").open("a") as out:
            out.write(f"{os.getpid()} {os.getppid()} {on_second_node():d}\n")
        config = changed(CONFIG, decode={"max_new_tokens": 40})
        store = LayeredStore(MemoryStore(CAP, eviction=LRU()), ValkeyStore(self.server, CAP))
        return Engine(config, reader(), store)

    def noted(self) -> list[tuple[int, bytes]]:
        """Process and key of each put so far."""
        lines = self.log.read_text().split("\n")[:-1] if self.log.exists() else []
        return [(int(pid), bytes.fromhex(key)) for pid, key in map(str.split, lines)]
