"""The simulator against real engines: processes on this machine, the same requests at the same times, one router.

Constants come from other requests, which all processes make at once beforehand. Where others' work takes cores from them
meanwhile, Linux tells for how much of their threads' time they stood in line: real requests are late by that, simulated
ones are not. A single node, asked one by one, is compared by the least of some repeats, which others disturb less.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from typing import Any

import numpy as np
import yaml

from blendserve.bench.crowded import Subject, subject_of
from blendserve.bench.servers import Server
from blendserve.config import Section, changed
from blendserve.provenance import machine, versions
from blendserve.simulate import draw
from blendserve.simulate.cluster import Cluster, Trace
from blendserve.simulate.config import ROUTINGS, Routing, SimulateConfig
from blendserve.simulate.figures import summary
from blendserve.simulate.node import TIMED
from blendserve.simulate.routing import ROUTERS, Holders, Loads
from blendserve.threads import COUNT

Figures = dict[str, Any]
Say = Callable[[str], None]
REPEATS = 5  # of a run whose least times count


class RealConfig(Section):
    """A check of the simulator that two cores can make in some minutes."""

    inside = "real."
    model: str = "smollm2-135m"
    nodes: int = 2
    pool: int = 60  # chunks
    chunk_tokens: int = 64
    request_chunks: int = 4
    topic_chunks: int = 6
    memory: int = 10  # chunks of a node's memory tier
    near: int = 14  # chunks of a node's own store
    requests: int = 60  # of a run
    busy: float = 0.5  # share of its time that a node is to be busy
    routing: tuple[Routing, ...] = ("round_robin", "prefix", "chunks")
    seed: int = 0


def compare(config: RealConfig, say: Say) -> Figures:
    """Every way of routing over a full store, one over an empty one, one in a closed loop; each real and simulated."""
    with nodes_of(config) as nodes:
        say(f"Measuring what {config.nodes} processes take")
        constants = mean_of(together(nodes, ["measure"]))
        base = settings(config, constants, nodes[0].about)
        nodes[0].take(["precompute", "full"])
        say("One node, one by one")
        alone = one_by_one(nodes[0], base, next(draw.requests(base, 1))[1])
        runs: list[Figures] = []
        plan: list[tuple[str, Routing]] = [("full", routing) for routing in config.routing]
        plan += [("empty", config.routing[0]), ("closed", config.routing[-1])]
        for kind, routing in plan:
            say(f"{config.requests} requests, {kind} store, {routing}")
            chosen = as_run(config, base, kind)
            blocks = list(draw.requests(chosen, config.nodes))
            ask_all(nodes, "open", kind if kind == "empty" else "full")
            waited, real = serve(nodes, chosen, routing, *blocks[0])
            simulated = Cluster(chosen, config.nodes, routing).run(blocks, config.requests)
            runs.append(
                {
                    "store": kind,
                    "routing": routing,
                    "rate": chosen.requests.rate * config.nodes,
                    "waited": waited,
                    "real": summary(chosen, real, config.nodes),
                    "simulated": summary(chosen, simulated, config.nodes),
                }
            )
    for run in runs:
        run["error"] = errors(run["real"], run["simulated"])
    return {
        "simulate": "validation",
        "versions": versions(),
        "machine": machine(),
        "load_average": os.getloadavg(),  # others' work counts, too
        "settings": config.model_dump(mode="json"),
        "constants": constants,
        "alone": alone,
        "runs": runs,
    }


def measured(config: SimulateConfig, say: Say) -> str:
    """YAML: the settings with this machine's constants, of one process with one thread and a server beside it."""
    real = RealConfig(nodes=1)
    say("Measuring an engine process over a server (about half a minute)")
    with nodes_of(real) as nodes:
        found = settings(real, mean_of(together(nodes, ["measure"])), nodes[0].about)
    mine = changed(
        config,
        compute=found.compute.model_dump(),
        links=changed(config.links, node_rate=found.links.node_rate, delay=found.links.delay).model_dump(),
        requests=changed(
            config.requests,
            prefix_tokens=found.requests.prefix_tokens,
            question_tokens=found.requests.question_tokens,
            answer_tokens=1,
        ).model_dump(),
    )
    text: str = yaml.safe_dump(mine.model_dump(mode="json"), sort_keys=False)
    about = machine()
    return f"# `blendserve simulate --measure`: {real.model}, one thread, {about['cpu']}\n{text}"


def settings(config: RealConfig, constants: Figures, about: Figures) -> SimulateConfig:
    """What is simulated: the real nodes, as far as the simulator knows them."""
    names = ("per_pass", "per_row", "per_pair", "per_loaded", "fixed", "per_answer_token", "per_stored")
    raw, chunk = about["raw_bytes"], about["raw_bytes"] * config.chunk_tokens
    return SimulateConfig(
        nodes=(config.nodes,),
        routing=config.routing,
        seed=config.seed,
        corpus={
            **{"chunks": config.pool, "chunk_tokens": config.chunk_tokens, "zipf": 0.8},
            **{"topic_chunks": config.topic_chunks, "coherence": 0.8},
        },
        requests={
            **{"number": config.requests, "warm_up": 0.0, "chunks": config.request_chunks},
            **{"prefix_tokens": about["prefix_tokens"], "question_tokens": about["question_tokens"]},
            **{"answer_tokens": 1, "rate": 0.0, "clients": 1},
        },
        tiers={"memory_bytes": config.memory * chunk, "disk_bytes": config.near * chunk},
        links={"node_rate": constants["node_rate"], "delay": constants["delay"], "disk_rate": 0.0},
        compute={**{name: constants[name] for name in names}, "raw_bytes": raw, "stored_bytes": raw},
    )


def as_run(config: RealConfig, base: SimulateConfig, kind: str) -> SimulateConfig:
    """The settings of one run: a closed loop, or requests at a rate that keeps nodes busy for the wanted share."""
    if kind == "closed":
        return base
    if kind == "empty":
        base = changed(base, tiers=changed(base.tiers, precomputed=False).model_dump())
    loop = Cluster(base, config.nodes, "round_robin").run(draw.requests(base, config.nodes), config.requests)
    rate = config.busy * summary(base, loop, config.nodes)["throughput"] / config.nodes
    return changed(base, requests=changed(base.requests, rate=rate).model_dump())


def one_by_one(node: Subject, config: SimulateConfig, chunks: draw.Numbers) -> Figures:
    """A single node, asked by one client alone: each request's time is the least of REPEATS of the whole run.

    Nothing queues, so a request finds the same in every repeat, and others' work on the machine only adds to its time.
    """
    runs = []
    for _ in range(REPEATS):
        node.take(["open", "full"])
        told = [node.take(["ask", asked]) for asked in chunks.tolist()]
        runs.append([part["ttft"] for part in told])
    real = np.min(runs, axis=0)
    simulated = Cluster(config, 1, "round_robin").run([(np.zeros(len(chunks)), chunks)], len(chunks))
    found = np.array([part["found"] for part in told])
    off = simulated.ttft / real - 1
    return {
        "requests": len(chunks),
        "same_places": float((found == simulated.found).all(axis=1).mean()),
        "ttft_real": float(real.mean()),
        "ttft_simulated": float(simulated.ttft.mean()),
        "error_of_mean": float(simulated.ttft.mean() / real.mean() - 1),
        "error_of_a_request": float(np.abs(off).mean()),
    }


def serve(
    nodes: list[Subject], config: SimulateConfig, routing: Routing, times: draw.Reals, chunks: draw.Numbers
) -> tuple[float, Trace]:
    """The requests, at their times, answered by real nodes: a queue and a thread for each, a router before them.

    -> share of requests' time for which their processes waited for cores, and what became of each.
    """
    loads, holders = Loads(len(nodes), config.bound), Holders()
    router = ROUTERS[routing](loads, holders)
    number, closed = len(times), not config.requests.rate
    came, ttft, left = np.zeros(number), np.zeros(number), np.zeros(number)
    where, found = np.zeros(number, np.int64), np.zeros((number, 4), np.int64)
    stood: list[float] = []
    queues: list[SimpleQueue[int | None]] = [SimpleQueue() for _ in nodes]
    guard = threading.Lock()
    clients = threading.Semaphore(config.requests.clients * len(nodes))
    failed: list[BaseException] = []
    began = time.perf_counter()

    def work(n: int) -> None:
        hot: set[int] = set()
        try:
            while (request := queues[n].get()) is not None:
                begun = time.perf_counter() - began
                told = nodes[n].take(["ask", chunks[request].tolist()])
                left[request] = time.perf_counter() - began
                ttft[request] = begun - came[request] + told["ttft"]  # telling what is hot is none of it
                found[request] = told["found"]
                stood.append(told["waited"])
                with guard:
                    loads.add(n, -1)
                    for chunk in hot - set(told["hot"]):
                        holders.went(n, chunk)
                    for chunk in set(told["hot"]) - hot:
                        holders.came(n, chunk)
                hot = set(told["hot"])
                clients.release()
        except BaseException as error:  # told to who waits for all threads
            failed.append(error)
            clients.release()

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(len(nodes))]
    for thread in threads:
        thread.start()
    for request in range(number):
        if closed:
            clients.acquire()
            came[request] = time.perf_counter() - began
        else:
            time.sleep(max(0.0, times[request] - (time.perf_counter() - began)))
            came[request] = times[request]
        if failed:
            break
        with guard:
            n = router.choose(chunks[request].tolist())
            loads.add(n, 1)
        where[request] = n
        queues[n].put(request)
    for queue in queues:
        queue.put(None)
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return fmean(stood), Trace(came, ttft, left, where, found, 0, (time.perf_counter() - began, 0.0), 0)


def errors(real: Figures, simulated: Figures) -> Figures:
    """Of the simulated figures: hit rates as a difference, the others as a share of the real ones."""
    hits = {tier: simulated["hit_rates"][tier] - share for tier, share in real["hit_rates"].items()}
    ttft = {name: simulated["ttft"][name] / real["ttft"][name] - 1 for name in ("mean", "p50", "p95")}
    return {
        "hit_rates": hits,
        "ttft": ttft,
        "throughput": simulated["throughput"] / real["throughput"] - 1,
    }


def together(nodes: list[Subject], order: list[Any]) -> list[Figures]:
    """All nodes at once -> what each told. Raises InputError."""
    told: list[Figures] = [{} for _ in nodes]

    def tell(n: int) -> None:
        told[n] = nodes[n].take(order)

    threads = [threading.Thread(target=tell, args=(n,)) for n in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def ask_all(nodes: list[Subject], *order: Any) -> None:
    """One after the other."""
    for node in nodes:
        node.take(list(order))


def mean_of(told: list[Figures]) -> Figures:
    return {name: fmean(part[name] for part in told) for name in told[0]}


@contextmanager
def nodes_of(config: RealConfig) -> Iterator[list[Subject]]:
    """Engine processes of one thread each, and their server. Raises InputError."""
    needed = (1 + TIMED) * config.request_chunks + TIMED
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="blendserve-simulate-")))
        task = {**config.model_dump(mode="json"), "url": stack.enter_context(Server()).url}
        task["pool"] = max(needed, config.pool)
        logs = (folder / f"{n}.log" for n in range(config.nodes))
        one_thread = {COUNT: "1"}
        yield [
            stack.enter_context(subject_of("blendserve.simulate.node", task, log, one_thread)) for log in logs
        ]


assert set(RealConfig().routing) <= set(ROUTINGS)
