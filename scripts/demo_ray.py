"""A Ray cluster on this machine: its routers side by side, and as many replicas as there is work for.

    python -m scripts.demo_ray [--passages 24] [--requests 120] [--clients 2]

Needs the extras ray and valkey, and the demo's index, which is built if it is missing. Everything runs on one Valkey
server and ends with this process. It prints:

1. questions about a few topics, sent to two replicas by chunk affinity and, in turns with it, round robin: the fraction
   of chunks found in a replica's memory, and TTFT;
2. the time until a second replica starts under many clients (`--replicas 1-2`), and until it stops after the last one.

The last line is JSON; the exit code is 1 if a question fails, or no replica starts or stops. That workers make the same
store as one process, and that no request fails when a replica dies, is proven in `tests/ray`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from typing import Any

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
ROUND = 12  # requests of one routing before the other one's turn
SCALED = 1, 2  # replicas of the second part
DELAYS = {"upscale_delay_s": 5, "downscale_delay_s": 20}  # Ray Serve's own are 30 and 600
SLOTS, MANY = 2, 8  # requests that a replica answers at a time, and clients that need more
PATIENCE = 180.0  # seconds for a replica to start or stop


def main() -> None:
    """Both parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passages", type=int, default=24)
    parser.add_argument("--requests", type=int, default=120, help="of each routing")
    parser.add_argument("--clients", type=int, default=2, help="questions asked at a time")
    given = parser.parse_args()
    with open_demo() as demo:
        assert demo.index
        passages = demo.index.passages[: given.passages]
    with Server(databases="2") as server, cluster(None, 4) as share:
        figures = asyncio.run(routed(server, passages, given.requests, given.clients, share))
        figures["autoscale"] = asyncio.run(autoscaled(server, passages, share))
    failed = sum(part["failed"] for part in figures.values())
    right = not failed and figures["autoscale"]["there and back"]
    console.print_json({**figures, "right": right})
    raise SystemExit(not right)


def settings(url: str, own_bytes: int = 0) -> Config:
    """The server alone, or with a memory tier before it."""
    far = {"location": url, "cap_gb": 8, "deadline_s": 30}
    own = {"location": "memory", "cap_gb": own_bytes / 1e9, "remote": far}
    return Config(store=own if own_bytes else far, blend={"method": "blend"}, decode={"max_new_tokens": 8})


@dataclass
class Results:
    """The questions of one routing."""

    tiers: Counter[str] = field(default_factory=Counter)
    ttft: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def figures(self) -> dict[str, Any]:
        mean, median = (of(self.ttft or [math.nan]) for of in (statistics.mean, statistics.median))
        return {
            "requests": len(self.ttft),
            "failed": self.failed,
            "in memory": round(self.tiers["local"] / max(1, self.tiers.total()), 3),
            "ttft ms": {"mean": round(mean * 1e3, 1), "median": round(median * 1e3, 1)},
        }


class Questions:
    """Random questions about topics, some more asked for than others."""

    def __init__(self, engine: Engine, passages: list[Passage]) -> None:
        self._engine = engine
        self._topics = [passages[i : i + TOPIC] for i in range(0, len(passages) - TOPIC + 1, TOPIC)]

    def draw(self, seed: int) -> tuple[RoutedRequest, frozenset[bytes]]:
        """A request, and the keys of its chunks."""
        lots = random.Random(seed)
        weights = [1 / (rank + 1) for rank in range(len(self._topics))]  # Zipf
        (topic,) = lots.choices(self._topics, weights)
        own = tuple(lots.sample(topic, ASKED))
        plan = self._engine.plan(Request("What is this about?", own))
        keys = frozenset(self._engine.blender.key(chunk.ids) for chunk in plan.prompt.chunks)
        return RoutedRequest(plan.prompt, plan.passages, plan.blend, plan.decode, "", "", 0.0, 0.0), keys


async def routed(
    server: Server, passages: list[Passage], requests: int, clients: int, share: WorkerResources
) -> dict[str, Any]:
    """Two replicas for each routing over one store, asked in turns: both meet the same machine."""
    url = f"{server.url}/0"
    with Engine.open(settings(url)) as engine, ExitStack() as stack:
        engine.blender.writer.precompute(engine.prompts.chunk_ids(passages))
        questions = Questions(engine, passages)
        own = int(0.55 * engine.store.stats().bytes)  # a replica's memory: two hold everything, one does not
        opener = partial(Engine.open, settings(url, own))
        batching = ServeConfig(slots=4, slot_tokens=4096).batching
        groups = {
            name: stack.enter_context(Replicas(opener, batching, ReplicaCount(2, 2), share, router))
            for name, router in ROUTERS.items()
        }
        found = {name: Results() for name in groups}
        for start in range(0, requests, ROUND):
            for name, group in groups.items():
                seeds = range(start, min(start + ROUND, requests))
                await ask_all(group, questions, seeds, found[name], clients)
    figures = {name: results.figures for name, results in found.items()}
    for name, values in figures.items():
        console.out.print(f"{name}: {values}")
    return figures


async def ask_all(
    group: Replicas, questions: Questions, seeds: Iterable[int], into: Results, clients: int
) -> None:
    """By a number of clients; each asks again after its answer."""
    left = iter(seeds)

    async def client() -> None:
        for seed in left:
            await ask(group, questions, seed, into)

    await asyncio.gather(*(client() for _ in range(clients)))


async def ask(group: Replicas, questions: Questions, seed: int, into: Results) -> None:
    """One question, counted."""
    request, keys = questions.draw(seed)
    start = time.perf_counter()
    try:
        async for event in group.answer(request, keys):
            if isinstance(event, PrefillDone):
                into.ttft.append(time.perf_counter() - start)
                into.tiers.update(event.report.tiers)
            into.failed += isinstance(event, Failed)
            if isinstance(event, Finished | Failed):
                return
    except Exception as error:
        console.note(f"a question failed: {error}")
        into.failed += 1


class Hasty(ReplicaCount):
    """Autoscaling without long delays."""

    def options(self, slots: int) -> dict[str, Any]:
        options = super().options(slots)
        options["autoscaling_config"].update(DELAYS)
        return options


async def autoscaled(server: Server, passages: list[Passage], share: WorkerResources) -> dict[str, Any]:
    """Replicas over time: under many clients until there are more, and after the last question until there are fewer."""
    url, results, (least, most) = f"{server.url}/1", Results(), SCALED
    batching = ServeConfig(slots=SLOTS, slot_tokens=4096).batching
    with Engine.open(settings(url)) as engine:
        engine.blender.writer.precompute(engine.prompts.chunk_ids(passages))
        questions, opener = Questions(engine, passages), partial(Engine.open, settings(url))
        with Replicas(opener, batching, Hasty(least, most), share) as group:
            busy = [True]
            seeds = takewhile(lambda _: busy[0], count())
            work = asyncio.create_task(ask_all(group, questions, seeds, results, MANY))
            more = await replicas_become(most, group)
            await asyncio.sleep(DELAYS["downscale_delay_s"] / 2)  # all of them answer for a while
            busy[0] = False
            await work
            fewer = await replicas_become(least, group)
    console.out.print(f"replicas: {least}, then {most} after {more:.0f} s, {least} again after {fewer:.0f} s")
    there_and_back = max(more, fewer) < PATIENCE
    return {**results.figures, "more after s": more, "fewer after s": fewer, "there and back": there_and_back}


async def replicas_become(wanted: int, group: Replicas) -> float:
    """Seconds until `wanted` replicas run; at most PATIENCE."""
    serve, start, last = importlib.import_module("ray.serve"), time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < PATIENCE:
        deployment = serve.status().applications[group.name].deployments[group.name]
        running = deployment.replica_states.get("RUNNING", 0)
        if running != last:
            console.note(f"{passed:.0f} s: {running} running, {wanted} waited for")
            last = running
        if running == wanted:
            break
        await asyncio.sleep(1.0)
    return passed


if __name__ == "__main__":
    main()
