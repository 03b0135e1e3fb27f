"""What workers in other processes open: a toy engine on the shared store, which notes each chunk that is stored."""

from __future__ import annotations

import os
import signal
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
        if self._puts == self._opened.dies_after and not self._opened.died.exists():
            self._opened.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class OpenToy:
    """Opens the toy engine on a server's database."""

    server: ValkeyConfig
    log: Path
    dies_after: int | None = None  # puts, by SIGKILL: the first process that comes so far

    @property
    def died(self) -> Path:
        """There as soon as one has."""
        return self.log.with_suffix(".died")

    def __call__(self) -> Engine:
        return Engine(CONFIG, reader(), NotingStore(ValkeyStore(self.server, CAP), self))

    @property
    def pids(self) -> list[int]:
        """Of the processes that opened a replica's, in order."""
        return [int(line) for line in self.log.with_suffix(".pids").read_text().split()]

    def replica(self) -> Engine:
        """Opens one with a memory of its own before the server, for a few chunks."""
        with self.log.with_suffix(".pids").open("a") as out:
            out.write(f"{os.getpid()}\n")
        config = changed(CONFIG, decode={"max_new_tokens": 40})
        store = LayeredStore(MemoryStore(CAP, eviction=LRU()), ValkeyStore(self.server, CAP))
        return Engine(config, reader(), store)

    def noted(self) -> list[tuple[int, bytes]]:
        """Process and key of each put so far."""
        lines = self.log.read_text().split("\n")[:-1] if self.log.exists() else []
        return [(int(pid), bytes.fromhex(key)) for pid, key in map(str.split, lines)]
