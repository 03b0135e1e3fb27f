"""One of the engine processes that answer the users of `bench sharing`: a reader, and a store for each of its users.

It is asked for an arrangement by a line, and tells its users' requests, what it computed and what is stored.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from blendserve.bench.child import run, say
from blendserve.bench.config import SharingConfig
from blendserve.bench.figures import Figures
from blendserve.bench.machine import where
from blendserve.bench.sharing import SHARED, trace
from blendserve.bench.workload import make_workload
from blendserve.config import Config, StoreConfig
from blendserve.core import ChunkKV, Passage
from blendserve.engine.engine import Engine
from blendserve.models.loader import Reader, load_reader
from blendserve.registry import SHARED_STORE
from blendserve.store import ChunkKey, KVStore, open_store
from blendserve.store.wrapped import WrappedStore

DEADLINE_S = 30.0  # nothing is to fail here


def main() -> None:
    """A task on stdin and what is there on stdout; then, line by line, an arrangement and what came of it."""
    task = json.loads(sys.stdin.readline())
    node = Node(SharingConfig(**task["config"]), task["node"], Path(task["folder"]), task["url"])
    say(where(node.config, node.reader))
    for line in sys.stdin:
        say(node.run(json.loads(line)))


class Node:
    """Every so-manieth user is its own."""

    def __init__(self, config: SharingConfig, number: int, folder: Path, url: str) -> None:
        self.config, self._folder, self._url = config, folder, url
        self.reader: Reader = load_reader(config.reader)
        self._users = range(number, config.users, config.engines)
        self._passages = make_workload(
            self.reader, config.pool, config.chunk_tokens, None, config.seed
        ).passages
        self._trace = trace(config)
        with Engine(
            self._settings("warm", 1.0), self.reader, open_store(StoreConfig(kind="memory"), None)
        ) as warm:
            for _ in range(2):
                self._ask(warm, self._passages[: config.passages], "What is this about?")

    def run(self, arrangement: str) -> Figures:
        """The node's users' questions, in turns."""
        requests: list[Figures] = []
        with ExitStack() as stack:
            engines = {user: stack.enter_context(self._engine(arrangement, user)) for user in self._users}
            for n in range(self.config.questions):
                for user, engine in engines.items():
                    passages = tuple(self._passages[i] for i in self._trace[user][n])
                    requests.append(
                        self._ask(engine, passages, f"Question {n} of user {user}: what is said?")
                    )
            stores = [engine.store for engine in engines.values()]
            names = [engine.config.store.namespace for engine in engines.values()]
            return {
                "requests": requests,
                "computed": [chunk for s in stores if isinstance(s, _Counted) for chunk in s.computed],
                "bytes": {name: s.stats(name).bytes for name, s in zip(names, stores, strict=True)},
            }

    def _ask(self, engine: Engine, passages: tuple[Passage, ...], question: str) -> Figures:
        blend = self.config.variant.blend
        options = {name: getattr(blend, name) for name in ("method", "policy", "correction", "ratio")}
        answer = engine.answer(question, passages, max_new_tokens=1, **options)
        return {
            "ttft": answer.timings.ttft,
            "hit": answer.report.chunks_hit,
            "asked": answer.report.chunks,
        }

    def _engine(self, arrangement: str, user: int) -> Engine:
        shared = arrangement == SHARED
        settings = self._settings(
            "all" if shared else f"user{user}", 1.0 if shared else 1 / self.config.users
        )
        return Engine(settings, self.reader, _Counted(open_store(settings.store, None)))

    def _settings(self, name: str, share: float) -> Config:
        """share: of all memory."""
        per_token = self.reader.adapter.kv_bytes_per_token
        pool = self.config.pool * self.config.chunk_tokens * per_token
        store: dict[str, Any] = {
            "kind": self.config.store,
            "path": self._folder / name,
            "namespace": name,
            "cap_gb": self.config.memory * share * pool / 1e9,
        }
        if self._url:
            store[SHARED_STORE] = {"url": self._url, "deadline_s": DEADLINE_S}
        return Config(store=store)


class _Counted(WrappedStore):
    """Notes which chunks were computed."""

    def __init__(self, store: KVStore) -> None:
        super().__init__(store)
        self.computed: list[int] = []

    def reading(self) -> Any:
        return self._store.reading()

    def put(self, key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        self.computed.append(hash(kv.ids))  # whoever's cache it is for
        return super().put(key, kv, pin)


if __name__ == "__main__":
    run(main)
