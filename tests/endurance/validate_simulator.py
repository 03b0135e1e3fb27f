"""The simulator against real engine processes on this machine: the same requests at the same times, one router.

    python -m tests.endurance.validate_simulator [--nodes N] [--requests N] [--model NAME]

A few minutes; nothing else should run. The constants come from other requests, which one process makes alone before, and
so does the slowdown of 1, 2, ... processes at the same time: nothing is fitted to what is compared. The last line is one
JSON object. With --model random:configs/simulate/small_reader other work disturbs the requests less.
"""

from __future__ import annotations

import os
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.support.valkey import Server
from benchmarks.support.worker import WorkerProcess
from blendserve import console
from blendserve.config import Config, Settings, StoreConfig
from blendserve.engine.engine import Engine
from blendserve.provenance import machine, versions
from blendserve.simulate import workload
from blendserve.simulate.cache import ChunkDirectory
from blendserve.simulate.calibrate import DEADLINE_S, CalibratedNode, Constants, configured, pool_size
from blendserve.simulate.cluster import Cluster, SimulationResult
from blendserve.simulate.config import Routing, SimulateConfig
from blendserve.simulate.metrics import summary
from blendserve.simulate.routing import Loads, make_router
from blendserve.threads import limit_torch

Figures = dict[str, Any]
TURNS = 6  # of measuring the slowdown, three requests of each process in a turn
RUNS: tuple[tuple[str, Routing], ...] = (  # the shared store at the start
    *(("full", "round_robin"), ("full", "prefix"), ("full", "chunks"), ("empty", "round_robin")),
)


class ValidationConfig(Settings):
    """What two cores can check in some minutes."""

    prefix = "validation."
    model: str = "smollm2-135m"
    nodes: int = 2
    pool: int = 60  # chunks
    chunk_tokens: int = 64
    request_chunks: int = 4
    memory: int = 10  # chunks in a node's memory
    disk: int = 14  # chunks in a node's own store
    requests: int = 60  # of a run
    utilization: float = 0.5  # of a node
    seed: int = 0


class ServingNode(CalibratedNode):
    """A node that fills the shared store, and says where it found a request's chunks."""

    engine: Engine  # since `begin`

    def begin(self, namespace: str, memory: int, disk: int) -> None:
        """Start with empty caches over the server's namespace; sizes in chunks."""
        if hasattr(self, "engine"):
            self.engine.close()
        self.engine = self.open(namespace, memory, disk)

    def precompute(self, namespace: str, with_chunks: bool = True) -> None:
        """Store all chunks on the server, or none."""
        store = StoreConfig(location=self.url or "", namespace=namespace, deadline_s=DEADLINE_S)
        with Engine.open(Config(store=store.model_dump()), model=self.model) as engine:
            engine.blender.writer.precompute(self.workload.chunks if with_chunks else [])

    def request(self, chunks: list[int], cached: bool = True) -> dict[str, Any]:
        """Answer one request -> TTFT, chunks by tier, and the chunks in memory if `cached`."""
        answer, _ = self.answer(self.engine, chunks)
        tiers = answer.report.tiers
        hot = self.engine.fetcher.resident() if cached else frozenset()
        in_pool = enumerate(self.workload.chunks if hot else ())
        return {
            "ttft": answer.timings.ttft,
            "found": [
                *(tiers.get(t, 0) for t in ("memory", "local", "remote")),
                answer.report.chunks_missing,
            ],
            "hot": [n for n, ids in in_pool if self.engine.blender.key(ids) in hot],
        }


def start_node(task: tuple[str, int, int, str, int]) -> tuple[dict[str, int], Callable[[list[Any]], Any]]:
    """A process with one thread."""
    limit_torch(1)
    node = ServingNode(*task)
    return node.prompt_shape, lambda order: getattr(node, order[0])(*order[1:])


def validate(config: ValidationConfig) -> Figures:
    """Every run, measured and simulated, and the errors of the simulation. Raises InputError."""
    sizes, runs = [config.memory, config.disk], list[Figures]()
    with processes(config) as nodes:
        constants = nodes[0].call(["measure", config.request_chunks, *sizes])
        for store in ("full", "empty"):
            nodes[0].call(["precompute", store, store == "full"])
        for node in nodes:
            node.call(["begin", "full", *sizes])
        base = simulated(config, constants, nodes[0].about)
        factors = slowdown(nodes, config, constants["hot"])
        base = base.with_values(compute=base.compute.with_values(slowdown=factors).model_dump())
        for store, routing in RUNS:
            console.note(f"{config.requests} requests, {store}, {routing}")
            loaded = over(base, store)
            requests = workload.requests(loaded, config.nodes)
            loop = Cluster(loaded, config.nodes, "round_robin").run(requests, config.requests)
            # At a rate that keeps the nodes at the wanted utilization: a share of a closed loop's throughput.
            rate = config.utilization * summary(loaded, loop, config.nodes)["throughput"] / config.nodes
            chosen = loaded.with_values(requests=loaded.requests.with_values(rate=rate).model_dump())
            blocks = list(workload.requests(chosen, config.nodes))
            for node in nodes:
                node.call(["begin", store, *sizes])
            real = summary(chosen, serve(nodes, chosen, routing, *blocks[0]), config.nodes)
            result = Cluster(chosen, config.nodes, routing).run(blocks, config.requests)
            made = summary(chosen, result, config.nodes)
            error = {name: made["ttft"][name] / real["ttft"][name] - 1 for name in ("mean", "p50", "p95")}
            found = {"measured": real, "simulated": made, "error_of_ttft": error}
            runs.append({"store": store, "routing": routing, **found})
    about = {"versions": versions(), "machine": machine(), "load_average": os.getloadavg()}
    return {**about, "constants": constants, "slowdown": base.compute.slowdown, "runs": runs}


def simulated(config: ValidationConfig, constants: Constants, shape: dict[str, int]) -> SimulateConfig:
    """The measured cluster, as far as the simulator models it."""
    chunk_bytes = shape["raw_bytes"] * config.chunk_tokens
    base = SimulateConfig(
        nodes=(config.nodes,),
        seed=config.seed,
        corpus={"chunks": config.pool, "zipf": 0.8, "topic_chunks": 6},
        requests={"number": config.requests, "warm_up": 0.0, "rate": 0.0, "clients": 1},
        tiers={"memory_bytes": config.memory * chunk_bytes, "disk_bytes": config.disk * chunk_bytes},
        links={"disk_rate": 0.0},
    )
    return configured(base, constants, shape, config.chunk_tokens, config.request_chunks)


def over(base: SimulateConfig, store: str) -> SimulateConfig:
    """Over a full or an empty shared store."""
    return base.with_values(tiers=base.tiers.with_values(precomputed=store != "empty").model_dump())


def slowdown(nodes: list[WorkerProcess], config: ValidationConfig, hot: float) -> list[float]:
    """TTFT of a request from memory while 1, 2, ... nodes compute, over `hot`, its TTFT alone."""
    request, n = ["request", list(range(config.request_chunks)), False], len(nodes)
    times: list[list[float]] = [[] for _ in nodes]
    with ThreadPoolExecutor(n) as threads:
        list(threads.map(lambda node: node.call(request), nodes))
        for turn in range(TURNS):
            for busy in range(n):
                asked = [nodes[(turn + i) % n] for i in range(busy + 1)]
                told = threads.map(lambda node: [node.call(request)["ttft"] for _ in range(3)], asked)
                times[busy] += [ttft for own in told for ttft in own]
    factors = [max(1.0, fmean(own) / hot) for own in times]
    return np.maximum.accumulate(factors).tolist()  # type: ignore[no-any-return]


def serve(
    nodes: list[WorkerProcess],
    config: SimulateConfig,
    routing: Routing,
    times: workload.Floats,
    chunks: workload.Ints,
) -> SimulationResult:
    """The requests, at their times, answered by real nodes, each with a queue, behind one router."""
    loads, directory = Loads(len(nodes), config.bound), ChunkDirectory()
    route, number = make_router(routing, loads, directory), len(times)
    result = SimulationResult(number)
    result.arrived_at = times
    hot: list[set[int]] = [set() for _ in nodes]
    lock, began = threading.Lock(), time.perf_counter()

    def work(n: int, request: int) -> None:
        started = time.perf_counter() - began
        told = nodes[n].call(["request", chunks[request].tolist()])
        result.finished_at[request] = time.perf_counter() - began
        result.ttft[request] = started - times[request] + told["ttft"]  # reporting `hot` is no part of it
        result.found[request] = told["found"]
        before, hot[n] = hot[n], set(told["hot"])
        with lock:
            loads.add(n, -1)
            for chunk in before - hot[n]:
                directory.remove(n, chunk)
            for chunk in hot[n] - before:
                directory.add(n, chunk)

    with ExitStack() as stack:
        queues, jobs = [stack.enter_context(ThreadPoolExecutor(1)) for _ in nodes], []
        for request in range(number):
            time.sleep(max(0.0, times[request] - (time.perf_counter() - began)))  # allow: arrival times
            with lock:
                result.node[request] = n = route(chunks[request].tolist())
                loads.add(n, 1)
            jobs.append(queues[n].submit(work, n, request))
        for job in jobs:
            job.result()
    return result


@contextmanager
def processes(config: ValidationConfig) -> Iterator[list[WorkerProcess]]:
    """Engine processes of one thread each, over one server. Raises InputError."""
    with ExitStack() as stack:
        pool = max(config.pool, pool_size(config.request_chunks))
        url = stack.enter_context(Server()).url
        task = config.model, pool, config.chunk_tokens, url, config.seed
        yield [stack.enter_context(WorkerProcess(start_node, task)) for _ in range(config.nodes)]


if __name__ == "__main__":
    parser = ArgumentParser(description="Compare the simulator with real engine processes.")
    for name, value in ValidationConfig():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    console.print_json(validate(ValidationConfig(**vars(parser.parse_args()))))
