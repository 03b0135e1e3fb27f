"""A Ray cluster on this machine: what its workers compute, where its router sends questions, and what a kill costs.

    python -m scripts.demo_ray [--only stores|questions|autoscale] [--passages 24] [--requests 120] [--clients 2]

Needs the extras ray and valkey, and the demo's index, which is built if it is not there. Everything runs on one
Valkey server and ends with this process. It prints:

1. the store that one process, two actors, and two actors of which one is killed make of the same passages;
2. questions about a few topics, sent to two replicas by chunk affinity and, in turns with it, round robin: where their
   chunks were read from, and the time to the first token;
3. what becomes of the questions that are being answered when a replica is killed;
4. how many replicas there are, of one to two (`--replicas 1-2`), under many clients and after the last question.

The last line is JSON; the exit code is 1 if a store differs, a question fails, or no replica comes or goes.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import math
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.valkey import Server
from blendserve import console
from blendserve.config import Config, ServeConfig
from blendserve.core import Passage, TokenIds
from blendserve.demo import open_demo
from blendserve.engine.engine import Engine
from blendserve.engine.request import Failed, Finished, PrefillDone, Request
from blendserve.ray.cluster import WorkerResources, cluster
from blendserve.ray.precompute import precompute
from blendserve.ray.replica import RoutedRequest
from blendserve.ray.replicas import CHUNK_ROUTER, ReplicaCount, Replicas
from blendserve.store import ChunkKey

ROUND_ROBIN = "blendserve.ray.router:RoundRobinRouter"
ROUTERS = {"chunk affinity": CHUNK_ROUTER, "round robin": ROUND_ROBIN}
STORES = 3  # of the first part, each in a database of its own
TOPIC = 6  # passages; a question is about ASKED of them, in any order
ASKED = 4
ROUND = 12  # requests of one routing before the other one's turn
SCALED = 1, 2  # replicas of the last part
DELAYS = {"upscale_delay_s": 5, "downscale_delay_s": 20}  # Ray Serve's own are 30 and 600
SLOTS, MANY = 2, 8  # requests that a replica answers at a time, and clients, who want more than that
PATIENCE = 180.0  # seconds for a replica to come or go


def main() -> None:
    """All parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passages", type=int, default=24)
    parser.add_argument("--requests", type=int, default=120, help="of each routing")
    parser.add_argument("--clients", type=int, default=2, help="questions asked at a time")
    parser.add_argument(
        "--only",
        choices=("stores", "questions", "autoscale"),
        help="the first part, the next two, or the last",
    )
    given = parser.parse_args()
    with open_demo() as demo:
        assert demo.index
        passages = demo.index.passages[: given.passages]
    with Server(databases="16") as server, cluster(None, 4) as share:
        figures: dict[str, Any] = {}
        if given.only in (None, "stores"):
            figures["stores"] = made_stores(server, passages, share)
        if given.only in (None, "questions"):
            figures |= asyncio.run(served(server, passages, given.requests, given.clients, share))
        if given.only in (None, "autoscale"):
            figures["autoscale"] = asyncio.run(autoscaled(server, passages, share))
    failed = figures.get("killed", {}).get("failed") or figures.get("autoscale", {}).get("failed")
    scaled = figures.get("autoscale", {}).get("there and back", True)
    right = figures.get("stores", {}).get("equal", True) and scaled and not failed
    console.print_json({**figures, "right": right})
    raise SystemExit(not right)


def settings(url: str, own_bytes: int = 0, dtype: str = "auto") -> Config:
    """The server alone, or behind a memory of so many bytes."""
    far = {"kind": "valkey", "cap_gb": 8, "valkey": {"url": url, "deadline_s": 30}}
    own = {"kind": "memory", "cap_gb": own_bytes / 1e9, "tiers": {"remote": far}}
    store, reader = own if own_bytes else far, {"dtype": dtype}
    return Config(reader=reader, store=store, blend={"method": "blend"}, decode={"max_new_tokens": 8})


# 1. Stores


def made_stores(server: Server, passages: list[Passage], share: WorkerResources) -> dict[str, Any]:
    """The same by one process, by two actors, and by two of which one is killed.

    In fp32, whose rounding is small beside any mistake: actors have other threads and other stacks than one process.
    """
    figures: dict[str, Any] = {"passages": len(passages)}
    with ExitStack() as stack:
        engines = [
            stack.enter_context(Engine.open(settings(f"{server.url}/{i}", dtype="float32")))
            for i in range(STORES)
        ]
        chunks = engines[0].prompts.chunk_ids(passages)
        figures["one process"] = engines[0].blender.precompute(chunks).computed
        for engine, kill in zip(engines[1:], (False, True), strict=True):
            report = by_actors(engine, chunks, share, kill)
            name = "two actors, one killed" if kill else "two actors"
            figures[name] = {"computed": report, "missing": len(engine.blender.missing(chunks))}
        differences = [difference(engines[0], engine) for engine in engines[1:]]
    figures["largest difference"] = max(differences)
    figures["equal"] = max(differences) < 1e-4
    for name, value in figures.items():
        console.out.print(f"{name}: {value}")
    return figures


def by_actors(engine: Engine, chunks: list[TokenIds], share: WorkerResources, kill: bool) -> int:
    """Compute by two actors -> chunks computed. kill: one of them at the first stack's end."""
    left = [kill]

    def first_stack(done: int, total: int) -> None:
        if left[0] and done < total:
            left[0] = False
            os.kill(next(pids("PrecomputeActor")), signal.SIGKILL)

    opener = partial(Engine.open, engine.config)
    return precompute(engine, opener, chunks, 2, share, first_stack).computed


def difference(one: Engine, other: Engine) -> float:
    """The largest between two stores' values, as a share of the layer's largest; infinite where keys differ."""
    if set(one.store.keys()) != set(other.store.keys()):
        return float("inf")
    return max(map(partial(_distance, one, other), one.store.keys()))


def _distance(one: Engine, other: Engine, key: ChunkKey) -> float:
    with one.store.reading() as a, other.store.reading() as b:
        x, y = a.get(key), b.get(key)
        assert x
        assert y
        layers = [(torch.stack(x.layer(l)), torch.stack(y.layer(l))) for l in range(x.n_layers)]
    return max(float((p - q).abs().max() / p.abs().max()) for p, q in layers)


def pids(name: str) -> Iterator[int]:
    """Of Ray's processes of that name which this one has started."""
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            title = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if title.startswith("ray::") and name in title and os.getpid() in _ancestors(pid):
            yield pid


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return
        yield pid


# 2. and 3. Questions


@dataclass
class Asked:
    """What became of the questions of one routing."""

    tiers: Counter[str] = field(default_factory=Counter)
    ttft: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def figures(self) -> dict[str, Any]:
        chunks = sum(self.tiers.values())
        return {
            "requests": len(self.ttft),
            "failed": self.failed,
            "in memory": round(self.tiers["local"] / max(1, chunks), 3),
            "ttft ms": {
                name: round(of(self.ttft or [math.nan]) * 1e3, 1)
                for name, of in (("mean", statistics.mean), ("median", statistics.median))
            },
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


async def served(
    server: Server, passages: list[Passage], requests: int, clients: int, share: WorkerResources
) -> dict[str, Any]:
    """Two replicas for each routing on a store that one process made, asked in turns: both meet the same machine."""
    url = f"{server.url}/{STORES}"  # which the first part has not filled: its size is what memories are a share of
    with Engine.open(settings(url)) as engine, ExitStack() as stack:
        engine.blender.precompute(engine.prompts.chunk_ids(passages))
        questions = Questions(engine, passages)
        own = int(0.55 * engine.store.stats().bytes)  # a replica's memory: two hold everything, one does not
        opener = partial(Engine.open, settings(url, own))
        batching = ServeConfig(slots=4, slot_tokens=4096).batching
        groups = {
            name: stack.enter_context(Replicas(opener, batching, ReplicaCount(2, 2), share, router))
            for name, router in ROUTERS.items()
        }
        found = {name: Asked() for name in groups}
        for start in range(0, requests, ROUND):
            for name, group in groups.items():
                seeds = range(start, min(start + ROUND, requests))
                await ask_all(group, questions, seeds, found[name], clients)
        figures: dict[str, Any] = {name: asked.figures for name, asked in found.items()}
        figures["killed"] = await killed(groups["chunk affinity"], questions, requests, 2 * clients)
    for name, values in figures.items():
        console.out.print(f"{name}: {values}")
    return figures


async def ask_all(
    group: Replicas, questions: Questions, seeds: Iterable[int], into: Asked, clients: int
) -> None:
    """By so many clients, each of whom asks again when they have an answer."""
    left = iter(seeds)

    async def client() -> None:
        for seed in left:
            await ask(group, questions, seed, into)

    await asyncio.gather(*(client() for _ in range(clients)))


async def ask(group: Replicas, questions: Questions, seed: int, into: Asked) -> None:
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


async def killed(group: Replicas, questions: Questions, first: int, clients: int) -> dict[str, Any]:
    """Kill a replica while questions are being answered."""
    asked, n = Asked(), 3 * ROUND
    work = asyncio.create_task(ask_all(group, questions, range(first, first + n), asked, clients))
    while len(asked.ttft) < n // 3:
        await asyncio.sleep(0.01)
    os.kill(next(pids(group.name)), signal.SIGKILL)
    await work
    return asked.figures


# 4. As many replicas as there is work for


class Hasty(ReplicaCount):
    """As many as there is work for, without long delays."""

    def options(self, slots: int) -> dict[str, Any]:
        options = super().options(slots)
        options["autoscaling_config"].update(DELAYS)
        return options


async def autoscaled(server: Server, passages: list[Passage], share: WorkerResources) -> dict[str, Any]:
    """Replicas over time: under many clients until there are more, and after the last question until there are fewer."""
    url, asked, (least, most) = f"{server.url}/{STORES + 1}", Asked(), SCALED
    batching = ServeConfig(slots=SLOTS, slot_tokens=4096).batching
    with Engine.open(settings(url)) as engine:
        engine.blender.precompute(engine.prompts.chunk_ids(passages))
        questions, opener = Questions(engine, passages), partial(Engine.open, settings(url))
        with Replicas(opener, batching, Hasty(least, most), share) as group:
            busy = [True]
            seeds = takewhile(lambda _: busy[0], count())
            work = asyncio.create_task(ask_all(group, questions, seeds, asked, MANY))
            more = await replicas_become(most, group)
            await asyncio.sleep(DELAYS["downscale_delay_s"] / 2)  # all of them answer for a while
            busy[0] = False
            await work
            fewer = await replicas_become(least, group)
    console.out.print(
        f"replicas: {least}, then {most} after {more:.0f} s of questions by {MANY} clients, {least} again {fewer:.0f} s "
        f"after the last one; {len(asked.ttft)} questions answered, {asked.failed} failed"
    )
    there_and_back = max(more, fewer) < PATIENCE
    return {**asked.figures, "more after s": more, "fewer after s": fewer, "there and back": there_and_back}


async def replicas_become(wanted: int, group: Replicas) -> float:
    """Seconds until so many run; at most PATIENCE."""
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
