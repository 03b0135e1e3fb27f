"""`python -m benchmarks sharing`: one cache for each user against one shared cache of the same total capacity.

Users ask about passages of one pool: some are asked for by all (a Zipf law over the pool), others by one user above all
(the same law over an order of their own). Engine processes answer, each one question at a time; a chunk that was missing
is stored after the answer, as a server does it. Every round starts with empty caches.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from benchmarks.support.valkey import Server
from benchmarks.support.worker import WorkerProcess, serve
from blendserve.bench.fixture import scratch
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, count, ms, ratio, table
from blendserve.bench.runner import Bench, BenchConfig
from blendserve.bench.workload import make_workload
from blendserve.config import BlendConfig, Config, Positive, Ratio, StoreConfig
from blendserve.core import Passage
from blendserve.engine.engine import Engine
from blendserve.evaluate.methods import parse_methods
from blendserve.fetch import open_store
from blendserve.models.loader import LoadedModel, load_model
from blendserve.registry import BENCHED, SHARED_STORE
from blendserve.store import ChunkKey, ChunkRecord

PER_USER, SHARED = "one per user", "one shared"
DEADLINE_S = 30.0  # of the server: nothing is to fail here


class SharingConfig(BenchConfig):
    """Users with overlapping questions, and their caches."""

    users: Positive = Field(4, description="Number of users.")
    engines: Positive = Field(2, description="Number of engine processes that serve them.")
    questions: Positive = Field(20, description="Number of questions per user.")
    passages: Positive = Field(4, description="Number of passages in a prompt.")
    chunk_tokens: Positive = Field(256, description="Length of a chunk, in tokens.")
    pool: Positive = Field(32, description="Number of passages that prompts are drawn from.")
    zipf: float = Field(
        1.0, ge=0.0, description="Zipf exponent of the passages' popularity; 0: all equally popular."
    )
    overlap: Ratio = Field(
        0.7, description="Fraction of passages drawn by the popularity that all users share."
    )
    memory: float = Field(
        0.75, gt=0, description="Total capacity of the caches, as a fraction of the pool's KV."
    )
    store: Literal["valkey", "lmdb", "memory"] = Field(
        "valkey",
        description="Kind of store of the caches; a server is started for a kind that needs one.",
    )
    method: str = Field(f"{BENCHED[0]}@0.15", description="Method, written as for `evaluate`.")
    threads: Positive | None = Field(1, description="Number of CPU threads per process.")
    repeats: Positive = Field(3, description="Number of measured rounds.")

    @property
    def blend(self) -> BlendConfig:
        """Raises ConfigError."""
        return parse_methods((self.method,), ())[-1].blend


def groups(config: SharingConfig, log: SampleLog) -> Iterator[Group]:
    labels = {"users": config.users, "engines": config.engines}
    if log.done(labels):
        return
    with scratch(config.folder) as folder, ExitStack() as stack:
        server = stack.enter_context(Server()) if config.store == SHARED_STORE else None
        task = {
            "config": config.model_dump(mode="json"),
            "folder": str(folder),
            "url": server.url if server else "",
        }
        nodes = [
            stack.enter_context(WorkerProcess(__name__, {**task, "node": n}, folder / f"node{n}.log"))
            for n in range(config.engines)
        ]
        log.note(model=nodes[0].about)
        runs = iter(range(10**6))

        def run(arrangement: str) -> Metrics:
            request = {"arrangement": arrangement, "run": next(runs)}
            with ThreadPoolExecutor(len(nodes)) as pool:
                return summarize_nodes(list(pool.map(lambda node: node.call(request), nodes)))

        empty = server.restart if server else lambda: None
        yield Group(labels, [Case({"cache": name}, partial(run, name), empty) for name in (PER_USER, SHARED)])


def trace(config: SharingConfig) -> list[list[tuple[int, ...]]]:
    """The passages of each question of each user, by their numbers in the pool."""
    law = [1 / rank**config.zipf for rank in range(1, config.pool + 1)]
    asked = []
    for user in range(config.users):
        draw = random.Random(f"{config.seed} {user}")
        orders: list[Sequence[int]] = [range(config.pool), draw.sample(range(config.pool), config.pool)]
        asked.append([_question(config, draw, law, orders) for _ in range(config.questions)])
    return asked


def _question(
    config: SharingConfig, draw: random.Random, law: list[float], orders: list[Sequence[int]]
) -> tuple[int, ...]:
    """Different passages, each of the pool's favourites or of the user's own."""
    chosen: dict[int, None] = {}
    while len(chosen) < min(config.passages, config.pool):
        order = orders[0 if draw.random() < config.overlap else 1]
        chosen[draw.choices(order, law)[0]] = None
    return tuple(chosen)


def summarize_nodes(parts: list[dict[str, Any]]) -> dict[str, float]:
    """What the engine processes tell of one round, together."""
    requests = [request for part in parts for request in part["requests"]]
    ttft = [request["ttft"] for request in requests]
    computed = Counter(chunk for part in parts for chunk in part["computed"])
    stored: dict[str, int] = {}
    for part in parts:  # every process tells of a shared cache
        stored |= {name: max(size, stored.get(name, 0)) for name, size in part["bytes"].items()}
    return {
        "hit_rate": sum(r["hits"] for r in requests) / sum(r["chunks"] for r in requests),
        "ttft_mean_s": float(np.mean(ttft)),
        **{f"ttft_p{q}_s": float(np.percentile(ttft, q)) for q in (50, 95)},
        "bytes_stored": sum(stored.values()),
        "chunks_computed": computed.total(),
        "chunks_recomputed": computed.total() - len(computed),
    }


class Node:
    """One engine process: every n-th user is its own."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.config, self._folder, self._url = (
            SharingConfig(**task["config"]),
            Path(task["folder"]),
            task["url"],
        )
        config = self.config
        self.reader: LoadedModel = load_model(config.reader)
        self._users = range(task["node"], config.users, config.engines)
        self._passages = make_workload(
            self.reader, config.pool, config.chunk_tokens, None, config.seed
        ).passages
        self._trace = trace(config)
        memory = open_store(StoreConfig(location="memory"), None)
        with Engine(self._settings("warm", "warm", 1.0), self.reader, memory) as warm:
            for _ in range(2):
                self._ask(warm, self._passages[: config.passages], "What is this about?")

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The questions of its users, in turns, over caches that no run before has used."""
        shared, requests = request["arrangement"] == SHARED, list[dict[str, Any]]()
        computed: list[int] = []
        with ExitStack() as stack:
            engines: dict[int, Engine] = {}
            for user in self._users:
                name, share = ("all", 1.0) if shared else (f"user{user}", 1 / self.config.users)
                settings = self._settings(name, f"{request['run']}-{name}", share)
                store = open_store(settings.store, None)
                vars(store)["put"] = partial(_counted, store.put, computed)
                engines[user] = stack.enter_context(Engine(settings, self.reader, store))
            for n in range(self.config.questions):
                for user, engine in engines.items():
                    passages = tuple(self._passages[i] for i in self._trace[user][n])
                    requests.append(
                        self._ask(engine, passages, f"Question {n} of user {user}: what is said?")
                    )
            stores = {engine.config.store.namespace: engine.store for engine in engines.values()}
            return {
                "requests": requests,
                "computed": computed,
                "bytes": {name: store.stats(name).bytes for name, store in stores.items()},
            }

    def _ask(self, engine: Engine, passages: tuple[Passage, ...], question: str) -> dict[str, Any]:
        blend = self.config.blend
        options = {name: getattr(blend, name) for name in ("method", "policy", "correction", "ratio")}
        answer = engine.answer(question, passages, max_new_tokens=1, **options)
        return {"ttft": answer.timings.ttft, "hits": answer.report.chunks_hit, "chunks": answer.report.chunks}

    def _settings(self, name: str, folder: str, share: float) -> Config:
        """share: of the total capacity."""
        pool_bytes = self.config.pool * self.config.chunk_tokens * self.reader.adapter.kv_bytes_per_token
        places = {"memory": "memory", "lmdb": str(self._folder / folder), SHARED_STORE: self._url}
        store: dict[str, Any] = {
            "location": places[self.config.store],
            "deadline_s": DEADLINE_S,
            "namespace": name,
            "cap_gb": self.config.memory * share * pool_bytes / 1e9,
        }
        return Config(store=store)


def _counted(
    put: Callable[..., bool], computed: list[int], key: ChunkKey, record: ChunkRecord, pin: bool = False
) -> bool:
    """Store a chunk, and note that it was computed."""
    computed.append(hash(record.token_ids))  # the same chunk in any cache
    return put(key, record, pin)


def _start(task: dict[str, Any]) -> tuple[Any, Any]:
    node = Node(task)
    return {
        "model": node.reader.name,
        "dtype": str(node.reader.adapter.dtype).removeprefix("torch."),
    }, node.answer


TABLE = table(
    "Caches of the same total capacity",
    ms("mean TTFT ms", "ttft_mean_s"),
    ratio("/ one per user", "ttft_mean_s", cache=PER_USER),
    ms("p95 ms", "ttft_p95_s", spread=False),
    count("hit rate", "hit_rate", digits=2),
    count("MB stored", "bytes_stored", 1e-6, 1),
    count("computed", "chunks_computed"),
    count("of those again", "chunks_recomputed"),
)
TINY = {
    **{"users": 2, "engines": 1, "questions": 6, "passages": 2, "pool": 6, "store": "lmdb"},
    **{"memory": 1.0, "overlap": 1.0, "repeats": 1},
}
BENCH = Bench(SharingConfig, groups, (TABLE,), tiny=TINY)


if __name__ == "__main__":
    serve(_start)
