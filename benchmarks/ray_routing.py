"""`python -m benchmarks ray_routing`: routing by chunk affinity against Ray's default, on a local Ray cluster.

Each router has two replicas, whose memory holds a little more than half of all chunks; a Valkey server holds all of them.
Both get the same questions, in turns, about a few topics of different popularity. tests/ray proves that workers make the
same store as one process, and that no request fails when a replica dies.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count as count_up

import numpy as np
from pydantic import Field

from benchmarks.support.valkey import Server
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, count, ms, ratio, table
from blendserve.bench.runner import Bench, BenchConfig, open_model
from blendserve.bench.workload import make_workload
from blendserve.config import Config, Positive, ServeConfig
from blendserve.engine.engine import Engine
from blendserve.engine.request import Failed, PrefillDone, Request
from blendserve.fetch import open_store
from blendserve.ray.cluster import cluster
from blendserve.ray.replica import RoutedRequest
from blendserve.ray.replicas import CHUNK_ROUTER, ReplicaCount, Replicas

DEFAULT = "Ray's default"
POWER_OF_TWO = "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"
ROUTERS = {"chunk affinity": CHUNK_ROUTER, DEFAULT: POWER_OF_TWO}
OWN = 0.55  # of all chunks: a replica's memory; two hold everything, one does not
TOPIC, ASKED = 6, 4  # passages of a topic, and of a question about it


class RoutingConfig(BenchConfig):
    """Questions to replicas behind a router."""

    passages: Positive = Field(24, description="Number of passages; six make a topic.")
    chunk_tokens: Positive = Field(256, description="Length of a chunk, in tokens.")
    questions: Positive = Field(40, description="Number of questions of a round.")
    clients: Positive = Field(2, description="Number of questions at the same time.")


def groups(config: RoutingConfig, log: SampleLog) -> Iterator[Group]:
    model, serve = open_model(config, log), ServeConfig(slots=4, slot_tokens=4096)
    passages = make_workload(model, config.passages, config.chunk_tokens, None, config.seed).passages
    topics = [passages[i : i + TOPIC] for i in range(0, len(passages) - TOPIC + 1, TOPIC)]
    popularity = [1 / rank for rank in range(1, len(topics) + 1)]  # Zipf
    with Server() as server, cluster(None, 4) as share, ExitStack() as stack:
        shared = _settings(config, server.url)
        engine = stack.enter_context(Engine(shared, model, open_store(shared.store, None)))
        engine.blender.writer.precompute(engine.prompts.chunk_ids(passages))
        open_replica = partial(Engine.open, _settings(config, server.url, OWN * engine.store.stats().bytes))

        def question(seed: str) -> RoutedRequest:
            rng = random.Random(seed)
            (topic,) = rng.choices(topics, popularity)
            prepared = engine.prepare(Request("What is this about?", tuple(rng.sample(topic, ASKED))))
            keys = frozenset(engine.blender.key(chunk.ids) for chunk in prepared.prompt.chunks)
            return RoutedRequest(prepared, keys)

        def run(replicas: Replicas, rounds: Iterator[int]) -> Metrics:
            n = next(rounds)
            questions = (question(f"{config.seed} {n} {i}") for i in range(config.questions))
            return asyncio.run(ask_all(replicas, questions, config.clients))

        cases = []
        for name, router in ROUTERS.items():
            replicas = Replicas(open_replica, serve, ReplicaCount(2, 2), share, router)
            cases.append(Case({"router": name}, partial(run, stack.enter_context(replicas), count_up())))
        yield Group({"clients": config.clients}, cases)


def _settings(config: RoutingConfig, url: str, own_bytes: float = 0) -> Config:
    """The server alone, or behind a memory tier."""
    store = {"location": url, "cap_gb": 8, "deadline_s": 30}
    if own_bytes:
        store = {"location": "memory", "cap_gb": own_bytes / 1e9, "remote": store}
    blend = {"method": "blend", "ratio": 0.05}
    return Config(model=config.model_settings, store=store, blend=blend, decode={"max_new_tokens": 8})


async def ask_all(replicas: Replicas, questions: Iterator[RoutedRequest], clients: int) -> Metrics:
    """Each client asks again after its answer. Raises what a question fails with."""
    tiers, ttft = Counter[str](), list[float]()

    async def client() -> None:
        for request in questions:
            start = time.perf_counter()
            async for event in replicas.answer(request):
                if isinstance(event, PrefillDone):
                    ttft.append(time.perf_counter() - start)
                    tiers.update(event.report.tiers)
                if isinstance(event, Failed):
                    raise event.error

    await asyncio.gather(*(client() for _ in range(clients)))
    times = {f"ttft_p{q}_s": float(np.percentile(ttft, q)) for q in (50, 95)}
    return {"in_memory": tiers["local"] / tiers.total(), "ttft_mean_s": float(np.mean(ttft)), **times}


TABLE = table(
    "Two replicas",
    ms("mean TTFT ms", "ttft_mean_s"),
    ratio("/ default", "ttft_mean_s", router=DEFAULT),
    ms("p95 ms", "ttft_p95_s", spread=False),
    count("chunks in memory", "in_memory", digits=2),
)
TINY = {"passages": 12, "questions": 4, "repeats": 1}
BENCH = Bench(RoutingConfig, groups, (TABLE,), tiny=TINY)
