"""What workers in other processes open: a toy engine on a shared database."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from blendserve.config import ValkeyConfig
from blendserve.core import TokenIds
from blendserve.engine.engine import Engine
from blendserve.fetch import TieredStore
from blendserve.store import KVStore, MemoryStore
from blendserve.store.valkey import ValkeyStore
from tests.support.engines import CONFIG, toy_engine
from tests.support.waiting import eventually

CAP = 1 << 28
CHUNKS: list[TokenIds] = [tuple(range(i, i + 40)) for i in range(24)]
SECOND_NODE = "BLENDSERVE_TEST_SECOND_NODE"  # in the environment of processes there
OF_REPLICAS = CONFIG.with_values(decode={"max_new_tokens": 40})


@dataclass(frozen=True)
class OpenToy:
    """Opens an engine and notes the process in a file."""

    server: ValkeyConfig
    log: Path
    replica: bool = False  # with its own memory in front of the server
    on_both: bool = False  # an engine waits until each of the two nodes has one

    def __call__(self) -> Engine:
        with self.log.open("a") as out:
            out.write(f"{SECOND_NODE in os.environ:d} {os.getpid()} {os.getppid()}\n")
        if self.on_both:
            eventually(lambda: self._opened(second_node=True) and self._opened(second_node=False))
        store: KVStore = ValkeyStore(self.server, CAP)
        if self.replica:
            store = TieredStore(MemoryStore(CAP), store)
        return toy_engine(store, OF_REPLICAS)

    def kill(self, second_node: bool = False) -> None:
        """SIGKILL to the latest of the processes; on the second node to its node first, so that it cannot report it."""
        process, node = self._opened(second_node)[-1]
        for pid in (node, process) if second_node else (process,):
            os.kill(pid, signal.SIGKILL)

    def _opened(self, second_node: bool) -> list[tuple[int, int]]:
        """Processes there, with the processes of their nodes."""
        lines = map(str.split, self.log.read_text().splitlines())
        return [(int(pid), int(node)) for where, pid, node in lines if where == f"{second_node:d}"]
