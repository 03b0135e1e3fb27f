"""Two routers of replicas on a Ray cluster on this machine, in turns: chunk affinity and round robin.

    python -m scripts.demo_ray [--passages 24] [--requests 120] [--clients 2]

Needs the extras ray and valkey, and the demo's index, which is built if it is missing. Each router sends questions about
a few topics to two replicas, over one Valkey server; everything ends with this process. The last line is JSON: the
fraction of chunks found in a replica's memory, and TTFT. The exit code is 1 if a question fails. tests/ray proves that
workers make the same store as one process, and that no request fails when a replica dies.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from benchmarks.support.valkey import Server
from blendserve import console
from blendserve.config import Config, ServeConfig
from blendserve.core import Passage
from blendserve.demo import open_demo
from blendserve.engine.engine import Engine
from blendserve.engine.request import Failed, Finished, PrefillDone, Request
from blendserve.ray.cluster import WorkerResources, cluster
from blendserve.ray.replica import RoutedRequest
from blendserve.ray.replicas import CHUNK_ROUTER, ReplicaCount, Replicas

ROUND_ROBIN = "blendserve.ray.router:RoundRobinRouter"
ROUTERS = {"chunk affinity": CHUNK_ROUTER, "round robin": ROUND_ROBIN}
TOPIC = 6  # passages; a question is about ASKED of them, in any order
ASKED = 4
ROUND = 12  # requests of a turn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passages", type=int, default=24)
    parser.add_argument("--requests", type=int, default=120, help="of each router")
    parser.add_argument("--clients", type=int, default=2, help="questions at a time")
    given = parser.parse_args()
    with open_demo() as demo:
        assert demo.index
        passages = demo.index.passages[: given.passages]
    with Server() as server, cluster(None, 4) as share:
        found = asyncio.run(routed(server.url, passages, given.requests, given.clients, share))
    console.print_json({name: results.figures for name, results in found.items()})
    raise SystemExit(any(results.failed for results in found.values()))


def settings(url: str, own_bytes: int = 0) -> Config:
    """The server alone, or behind a memory tier."""
    far = {"location": url, "cap_gb": 8, "deadline_s": 30}
    own = {"location": "memory", "cap_gb": own_bytes / 1e9, "remote": far}
    return Config(store=own if own_bytes else far, blend={"method": "blend"}, decode={"max_new_tokens": 8})


@dataclass
class Results:
    """The questions of one router."""

    tiers: Counter[str] = field(default_factory=Counter)
    ttft: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def figures(self) -> dict[str, float]:
        return {
            "requests": len(self.ttft),
            "failed": self.failed,
            "in_memory": round(self.tiers["local"] / max(1, self.tiers.total()), 3),
            "ttft_mean_s": statistics.fmean(self.ttft or [0.0]),
            "ttft_median_s": statistics.median(self.ttft or [0.0]),
        }


class Questions:
    """Random questions about topics of different popularity."""

    def __init__(self, engine: Engine, passages: list[Passage]) -> None:
        self._engine = engine
        self._topics = [passages[i : i + TOPIC] for i in range(0, len(passages) - TOPIC + 1, TOPIC)]

    def draw(self, seed: int) -> RoutedRequest:
        """A request."""
        lots = random.Random(seed)
        weights = [1 / (rank + 1) for rank in range(len(self._topics))]  # Zipf
        (topic,) = lots.choices(self._topics, weights)
        own = tuple(lots.sample(topic, ASKED))
        prepared = self._engine.prepare(Request("What is this about?", own))
        keys = frozenset(self._engine.blender.key(chunk.ids) for chunk in prepared.prompt.chunks)
        return RoutedRequest(prepared, keys)


async def routed(
    url: str, passages: list[Passage], requests: int, clients: int, share: WorkerResources
) -> dict[str, Results]:
    """Two replicas for each router over one store, in turns: both meet the same machine."""
    with Engine.open(settings(url)) as engine, ExitStack() as stack:
        engine.blender.writer.precompute(engine.prompts.chunk_ids(passages))
        questions = Questions(engine, passages)
        own = int(0.55 * engine.store.stats().bytes)  # a replica's memory: two hold everything, one does not
        opener = partial(Engine.open, settings(url, own))
        serve = ServeConfig(slots=4, slot_tokens=4096)
        groups = {
            name: stack.enter_context(Replicas(opener, serve, ReplicaCount(2, 2), share, router))
            for name, router in ROUTERS.items()
        }
        found = {name: Results() for name in groups}
        for start in range(0, requests, ROUND):
            for name, group in groups.items():
                seeds = range(start, min(start + ROUND, requests))
                await ask_all(group, questions, seeds, found[name], clients)
        return found


async def ask_all(
    group: Replicas, questions: Questions, seeds: Iterable[int], into: Results, clients: int
) -> None:
    """Ask by a number of clients; each asks again after its answer."""
    left = iter(seeds)

    async def client() -> None:
        for seed in left:
            await ask(group, questions, seed, into)

    await asyncio.gather(*(client() for _ in range(clients)))


async def ask(group: Replicas, questions: Questions, seed: int, into: Results) -> None:
    """One question, counted."""
    request = questions.draw(seed)
    start = time.perf_counter()
    try:
        async for event in group.answer(request):
            if isinstance(event, PrefillDone):
                into.ttft.append(time.perf_counter() - start)
                into.tiers.update(event.report.tiers)
            into.failed += isinstance(event, Failed)
            if isinstance(event, Finished | Failed):
                return
    except Exception as error:
        console.note(f"a question failed: {error}")
        into.failed += 1


if __name__ == "__main__":
    main()
