"""`python -m benchmarks sharing`: one cache for each user against one shared cache of the same total capacity.

Users ask about passages of one pool: popular ones (a Zipf law over the pool), and the user's own favorites (the same law
over another order). Engine processes answer, each one question at a time; a missing chunk is stored after the answer, as
a server does it. Every round starts with an empty Valkey server.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from pydantic import Field

from benchmarks.support.valkey import Server
from benchmarks.support.worker import WorkerProcess
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, count, ms, ratio, table
from blendserve.bench.runner import Bench, BenchConfig
from blendserve.bench.workload import make_workload
from blendserve.config import Config, Positive, Ratio
from blendserve.core import Passage
from blendserve.engine.engine import Engine
from blendserve.evaluate.methods import parse_methods
from blendserve.fetch import open_store
from blendserve.models.loader import load_model
from blendserve.registry import BENCHED

PER_USER, SHARED = "one per user", "one shared"
METHOD = f"{BENCHED[0]}@0.15"
DEADLINE_S = 30.0  # of the server


class SharingConfig(BenchConfig):
    """Users with overlapping questions, and their caches."""

    users: Positive = Field(4, description="Number of users.")
    engines: Positive = Field(2, description="Number of engine processes that serve them.")
    questions: Positive = Field(20, description="Number of questions per user.")
    passages: Positive = Field(4, description="Number of passages in a prompt.")
    chunk_tokens: Positive = Field(256, description="Length of a chunk, in tokens.")
    pool: Positive = Field(32, description="Number of passages that prompts are drawn from.")
    overlap: Ratio = Field(
        0.7, description="Fraction of passages drawn by the popularity that all users share."
    )
    memory: float = Field(
        0.75, gt=0, description="Total capacity of the caches, as a fraction of the pool's KV."
    )
    threads: Positive | None = Field(1, description="Number of CPU threads per process.")


def groups(config: SharingConfig, log: SampleLog) -> Iterator[Group]:
    with Server() as server, ExitStack() as stack:
        tasks = [(config, server.url, n) for n in range(config.engines)]
        nodes = [stack.enter_context(WorkerProcess(_start, task)) for task in tasks]
        log.note(model=nodes[0].about)

        def run(arrangement: str) -> Metrics:
            with ThreadPoolExecutor(len(nodes)) as pool:
                parts = pool.map(lambda node: node.call(arrangement), nodes)
                return summarize(config, [request for part in parts for request in part])

        cases = [Case({"cache": name}, partial(run, name), server.restart) for name in (PER_USER, SHARED)]
        yield Group({"users": config.users, "engines": config.engines}, cases)


def trace(config: SharingConfig) -> list[list[tuple[int, ...]]]:
    """The passages of each question of each user, by their numbers in the pool."""
    law = [1 / rank for rank in range(1, config.pool + 1)]
    asked = []
    for user in range(config.users):
        draw = random.Random(f"{config.seed} {user}")
        orders: list[Sequence[int]] = [range(config.pool), draw.sample(range(config.pool), config.pool)]
        questions = []
        for _ in range(config.questions):
            chosen: dict[int, None] = {}  # different passages, of the pool's favorites or of the user's own
            while len(chosen) < min(config.passages, config.pool):
                order = orders[0 if draw.random() < config.overlap else 1]
                chosen[draw.choices(order, law)[0]] = None
            questions.append(tuple(chosen))
        asked.append(questions)
    return asked


def summarize(config: SharingConfig, requests: Sequence[Mapping[str, float]]) -> Metrics:
    """One round of all engine processes."""
    ttft, hits, chunks = ([request[name] for request in requests] for name in ("ttft", "hits", "chunks"))
    n_computed = sum(chunks) - sum(hits)
    n_asked = len({i for user in trace(config) for question in user for i in question})
    return {
        "hit_rate": sum(hits) / sum(chunks),
        "ttft_mean_s": float(np.mean(ttft)),
        **{f"ttft_p{q}_s": float(np.percentile(ttft, q)) for q in (50, 95)},
        "chunks_computed": n_computed,
        "chunks_recomputed": n_computed - n_asked,
    }


def _start(task: tuple[SharingConfig, str, int]) -> tuple[Any, Callable[[str], list[dict[str, float]]]]:
    """One engine process: every n-th user is its own."""
    config, url, node = task
    (*_, method), model = parse_methods((METHOD,), ()), load_model(config.model_settings)
    passages = make_workload(model, config.pool, config.chunk_tokens, None, config.seed).passages
    asked, users = trace(config), range(node, config.users, config.engines)
    pool_bytes = config.pool * config.chunk_tokens * model.decoder.kv_bytes_per_token

    def engine(location: str, namespace: str, share: float) -> Engine:
        """share: of the total capacity."""
        store = {"location": location, "deadline_s": DEADLINE_S, "namespace": namespace}
        cap = {"cap_gb": config.memory * share * pool_bytes / 1e9}
        settings = Config(store={**store, **cap}, blend=method.blend)
        return Engine(settings, model, open_store(settings.store, None))

    def ask(engine: Engine, passages: tuple[Passage, ...], question: str) -> dict[str, float]:
        answer = engine.answer(question, passages, max_new_tokens=1)
        return {"ttft": answer.timings.ttft, "hits": answer.report.chunks_hit, "chunks": answer.report.chunks}

    def answer(arrangement: str) -> list[dict[str, float]]:
        """The questions of its users, in turns."""
        requests = []
        with ExitStack() as stack:
            engines = {}
            for user in users:
                own = ("all", 1.0) if arrangement == SHARED else (f"user{user}", 1 / config.users)
                engines[user] = stack.enter_context(engine(url, *own))
            for n in range(config.questions):
                for user, own_engine in engines.items():
                    chosen = tuple(passages[i] for i in asked[user][n])
                    requests.append(ask(own_engine, chosen, f"Question {n} of user {user}: what is said?"))
        return requests

    with engine("memory", "warm-up", 1.0) as warm:
        for _ in range(2):
            ask(warm, passages[: config.passages], "What is this about?")
    dtype = str(model.decoder.dtype).removeprefix("torch.")
    return {"model": model.name, "dtype": dtype}, answer


TABLE = table(
    "Caches of the same total capacity",
    ms("mean TTFT ms", "ttft_mean_s"),
    ratio("/ one per user", "ttft_mean_s", cache=PER_USER),
    ms("p95 ms", "ttft_p95_s", spread=False),
    count("hit rate", "hit_rate", digits=2),
    count("computed", "chunks_computed"),
    count("of those again", "chunks_recomputed"),
)
TINY = {
    **{"users": 2, "engines": 1, "questions": 6, "passages": 2, "pool": 6},
    **{"memory": 1.0, "overlap": 1.0, "repeats": 1},
}
BENCH = Bench(SharingConfig, groups, (TABLE,), tiny=TINY)
