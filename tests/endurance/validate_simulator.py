"""The simulator against real engine processes on this machine: the same requests at the same times, one router.

    python -m tests.endurance.validate_simulator [--nodes N] [--requests N] [--model NAME]

A few minutes; nothing else should run. The constants come from other requests, which one process makes alone before.
How much slower 1, 2, ... processes are at the same time is measured before and after each run, by other requests again:
nothing is fitted to what is compared. `isolated` is one node and one client, by the least of some repeats. The last line
is one JSON object. With --model random:configs/simulate/small_reader other work disturbs the requests less.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.support.valkey import Server
from benchmarks.support.worker import WorkerProcess
from blendserve import console
from blendserve.config import Section, changed
from blendserve.provenance import machine, versions
from blendserve.simulate import workload
from blendserve.simulate.calibrate import Constants, configured, pool_size
from blendserve.simulate.cluster import TIERS, Cluster, SimulationResult
from blendserve.simulate.config import Routing, SimulateConfig
from blendserve.simulate.metrics import summary
from blendserve.simulate.routing import ChunkDirectory, Loads, make_router
from blendserve.threads import COUNT

Figures = dict[str, Any]
NODE = "tests.endurance.simulator_node"
REPEATS = 3  # of the isolated run
ROUNDS, TURN = 2, 3  # of measuring the slowdown, and requests of each process in a turn
ROUTINGS: tuple[Routing, ...] = ("round_robin", "prefix", "chunks")
RUNS: tuple[tuple[str, Routing], ...] = (
    *(("full", routing) for routing in ROUTINGS),
    ("empty", ROUTINGS[0]),
    ("closed", ROUTINGS[-1]),
)  # store (or a closed loop over the full one), routing


class ValidationConfig(Section):
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


def validate(config: ValidationConfig) -> Figures:
    """Every run, measured and simulated. Raises InputError."""
    with processes(config) as nodes:
        console.note("Measuring one process")
        constants = nodes[0].call(["measure"])
        base = simulated(config, constants, nodes[0].about)
        for store, with_chunks in (("full", True), ("empty", False)):
            nodes[0].call(["precompute", store, with_chunks])
        isolated = {store: one_client(nodes[0], config, base, store) for store in ("full", "empty")}
        runs: list[Figures] = []
        before = slowdown(nodes, config, constants["hot"])
        for store, routing in RUNS:
            console.note(f"{config.requests} requests, {store}, {routing}")
            chosen = settings_of(config, slowed(base, before), store)
            blocks = list(workload.requests(chosen, config.nodes))
            open_all(nodes, "empty" if store == "empty" else "full")
            measured = serve(nodes, chosen, routing, *blocks[0])
            after = slowdown(nodes, config, constants["hot"])
            chosen = slowed(chosen, np.mean([before, after], axis=0).tolist())
            runs.append({"store": store, **compared(chosen, routing, blocks, measured)})
            before = after
    return {
        **{"versions": versions(), "machine": machine(), "load_average": os.getloadavg()},
        **{"settings": config.model_dump(mode="json"), "constants": constants},
        **{"isolated": isolated, "runs": runs},
    }


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


def settings_of(config: ValidationConfig, base: SimulateConfig, store: str) -> SimulateConfig:
    """A closed loop, or a rate that keeps the nodes at the wanted utilization."""
    if store == "closed":
        return base
    base = over(base, store)
    loop = Cluster(base, config.nodes, ROUTINGS[0]).run(
        workload.requests(base, config.nodes), config.requests
    )
    rate = config.utilization * summary(base, loop, config.nodes)["throughput"] / config.nodes
    return changed(base, requests=changed(base.requests, rate=rate).model_dump())


def over(base: SimulateConfig, store: str) -> SimulateConfig:
    """Over a full or an empty shared store."""
    return changed(base, tiers=changed(base.tiers, precomputed=store != "empty").model_dump())


def slowed(base: SimulateConfig, by: list[float]) -> SimulateConfig:
    return changed(base, compute=changed(base.compute, slowdown=by).model_dump())


def compared(
    chosen: SimulateConfig, routing: Routing, blocks: list[Any], measured: SimulationResult
) -> Figures:
    """A measured run, the same simulated, and simulated as if every node had a machine of its own."""
    (nodes,) = chosen.nodes
    found: Figures = {"routing": routing, "slowdown": chosen.compute.slowdown}
    found["measured"] = real = summary(chosen, measured, nodes)
    for name, settings in (("simulated", chosen), ("unshared", slowed(chosen, [1.0]))):
        result = Cluster(settings, nodes, routing).run(blocks, len(measured.ttft))
        found[name] = made = summary(settings, result, nodes)
        found[f"error_{name}"] = {
            "hit_rates": {tier: made["hit_rates"][tier] - rate for tier, rate in real["hit_rates"].items()},
            "ttft": {name: made["ttft"][name] / real["ttft"][name] - 1 for name in ("mean", "p50", "p95")},
            "throughput": made["throughput"] / real["throughput"] - 1,
        }
    return found


def slowdown(nodes: list[WorkerProcess], config: ValidationConfig, hot: float) -> list[float]:
    """TTFT of a request from memory while 1, 2, ... nodes compute, over `hot`, its TTFT alone."""
    open_all(nodes, "full")
    request, n = ["request", list(range(config.request_chunks)), False], len(nodes)
    times: list[list[float]] = [[] for _ in nodes]
    with ThreadPoolExecutor(n) as threads:
        list(threads.map(lambda node: node.call(request), nodes))
        for turn in range(ROUNDS * n):
            for busy in range(n):
                asked = [nodes[(turn + i) % n] for i in range(busy + 1)]
                told = threads.map(lambda node: [node.call(request)["ttft"] for _ in range(TURN)], asked)
                times[busy] += [ttft for own in told for ttft in own]
    factors = [max(1.0, fmean(own) / hot) for own in times]
    return np.maximum.accumulate(factors).tolist()  # type: ignore[no-any-return]


def one_client(node: WorkerProcess, config: ValidationConfig, base: SimulateConfig, store: str) -> Figures:
    """A single node and client: every request finds the same in every repeat, so its least time counts."""
    known = over(base, store)
    ((_, chunks),) = workload.requests(known, 1)
    times = []
    for repeat in range(REPEATS):
        namespace = store if store == "full" else f"isolated {repeat}"
        if store == "empty":
            node.call(["precompute", namespace, False])
        node.call(["open", namespace])
        told = [node.call(["request", wanted, False]) for wanted in chunks.tolist()]
        times.append([[part["ttft"], part["ttft"] + part["after"]] for part in told])
    ttft, whole = np.min(times, axis=0).T
    result = Cluster(known, 1, ROUTINGS[0]).run([(np.zeros(len(chunks)), chunks)], len(chunks))
    found = np.array([part["found"] for part in told])
    return {
        "same_tiers": float((found == result.found).all(axis=1).mean()),
        "ttft_measured": float(ttft.mean()),
        "error_of_mean": float(result.ttft.mean() / ttft.mean() - 1),
        "error_of_a_request": float(np.abs(result.ttft / ttft - 1).mean()),
        "error_of_whole": float(result.finished_at[-1] / whole.sum() - 1),
    }


def serve(
    nodes: list[WorkerProcess],
    config: SimulateConfig,
    routing: Routing,
    times: workload.Floats,
    chunks: workload.Ints,
) -> SimulationResult:
    """The requests, at their times, answered by real nodes: a queue and a thread each, behind one router."""
    loads, directory = Loads(len(nodes), config.bound), ChunkDirectory()
    route, number, closed = make_router(routing, loads, directory), len(times), not config.requests.rate
    arrived, ttft, finished = np.zeros(number), np.zeros(number), np.zeros(number)
    where, found = np.zeros(number, np.int64), np.zeros((number, len(TIERS)), np.int64)
    queues: list[SimpleQueue[int | None]] = [SimpleQueue() for _ in nodes]
    lock, clients = threading.Lock(), threading.Semaphore(config.requests.clients * len(nodes))
    began = time.perf_counter()

    def work(n: int) -> None:
        hot: set[int] = set()
        while (request := queues[n].get()) is not None:
            started = time.perf_counter() - began
            try:
                told = nodes[n].call(["request", chunks[request].tolist()])
            finally:
                clients.release()
            finished[request] = time.perf_counter() - began
            ttft[request] = started - arrived[request] + told["ttft"]  # reporting `hot` is no part of it
            found[request] = told["found"]
            with lock:
                loads.add(n, -1)
                for chunk in hot - set(told["hot"]):
                    directory.remove(n, chunk)
                for chunk in set(told["hot"]) - hot:
                    directory.add(n, chunk)
            hot = set(told["hot"])

    with ThreadPoolExecutor(len(nodes)) as threads:
        workers = [threads.submit(work, n) for n in range(len(nodes))]
        for request in range(number):
            if closed:
                clients.acquire()
            else:
                time.sleep(max(0.0, times[request] - (time.perf_counter() - began)))  # allow: arrival times
            if any(worker.done() for worker in workers):  # it has failed
                break
            arrived[request] = time.perf_counter() - began if closed else times[request]
            with lock:
                where[request] = route(chunks[request].tolist())
                loads.add(int(where[request]), 1)
            queues[where[request]].put(request)
        for queue in queues:
            queue.put(None)
        for worker in workers:
            worker.result()
    return SimulationResult(arrived, ttft, finished, where, found)


def open_all(nodes: list[WorkerProcess], store: str) -> None:
    for node in nodes:
        node.call(["open", store])


@contextmanager
def processes(config: ValidationConfig) -> Iterator[list[WorkerProcess]]:
    """Engine processes of one thread each, over one server. Raises InputError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="blendserve-simulate-")))
        pool = max(config.pool, pool_size(config.request_chunks))
        url = stack.enter_context(Server()).url
        task = {**config.model_dump(mode="json"), "pool": pool, "url": url}
        start = [(task, folder / f"{n}.log", {**os.environ, COUNT: "1"}) for n in range(config.nodes)]
        yield [stack.enter_context(WorkerProcess(NODE, *arguments)) for arguments in start]


def main() -> None:
    parser = ArgumentParser(description="Compare the simulator with real engine processes.")
    for name, value in ValidationConfig():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    console.print_json(validate(ValidationConfig(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
