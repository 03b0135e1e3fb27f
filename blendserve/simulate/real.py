"""The simulator against real engines: processes on this machine, the same requests at the same times, one router.

Constants come from other requests beforehand, which one process makes alone: each is the least of some tries. How much
longer a request takes than that while 1, 2, ... processes compute is timed before and after each run, by others again:
nothing is fitted to what is compared. A single node, asked one by one, is compared by the least of some repeats, which
others' work on the machine disturbs less.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from typing import Any, Literal, get_args

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
RunKind = Literal["alone", "full", "empty", "closed"]
RUN_KINDS: tuple[RunKind, ...] = get_args(RunKind)
REPEATS = 3  # of a run whose least times count
ROUNDS, TURN = 2, 3  # of timing how processes slow each other down, and requests of each process in a turn


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
    runs: tuple[RunKind, ...] = RUN_KINDS
    seed: int = 0


def compare(config: RealConfig, say: Say) -> Figures:
    """Runs of the plan, and a single node over a full and an empty store; each real and simulated."""
    with nodes_of(config) as nodes:
        say("Measuring one process")
        constants = nodes[0].take(["measure"])
        base = settings(config, constants, nodes[0].about)
        nodes[0].take(["precompute", "full"])
        alone: Figures = {}
        for store in ("full", "empty") if "alone" in config.runs else ():
            say(f"One node, sequential requests, {store} store")
            alone[store] = one_by_one(nodes[0], over(base, store), store)
        runs: list[Figures] = []
        before = slowdown(nodes, config, constants["hot"])
        for kind, routing in plan(config):
            say(f"{config.requests} requests, {kind} store, {routing}")
            chosen = as_run(config, slowed(base, before), kind)
            blocks = list(draw.requests(chosen, config.nodes))
            ask_all(nodes, "open", kind if kind == "empty" else "full")
            waited, real = serve(nodes, chosen, routing, *blocks[0])
            after = slowdown(nodes, config, constants["hot"])
            chosen = slowed(chosen, np.mean([before, after], axis=0).tolist())
            runs.append({"store": kind, "waited": waited, **against(chosen, routing, blocks, real)})
            before = after
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


def plan(config: RealConfig) -> list[tuple[RunKind, Routing]]:
    """Every way of routing over a full store, one over an empty one, one in a closed loop."""
    full, first, last = config.routing, config.routing[:1], config.routing[-1:]
    routings: dict[RunKind, tuple[Routing, ...]] = {"full": full, "empty": first, "closed": last}
    return [(kind, routing) for kind in config.runs if kind != "alone" for routing in routings[kind]]


def against(chosen: SimulateConfig, routing: Routing, blocks: list[Any], real: Trace) -> Figures:
    """A run beside the same simulated, and simulated as if each node had a machine."""
    (nodes,), slower = chosen.nodes, chosen.compute.slowdown
    found: Figures = {"routing": routing, "slowdown": slower, "rate": chosen.requests.rate * nodes}
    found["real"] = summary(chosen, real, nodes)
    for name, settings in (("simulated", chosen), ("apart", slowed(chosen, [1.0]))):
        trace = Cluster(settings, nodes, routing).run(blocks, len(real.ttft))
        found[name] = summary(settings, trace, nodes)
        found[f"error_{name}"] = errors(found["real"], found[name])
    return found


def measured(config: SimulateConfig, say: Say) -> str:
    """YAML: the settings with this machine's constants, of one process with one thread and a server beside it."""
    real = RealConfig(nodes=1)
    say("Measuring an engine process over a server (about half a minute)")
    with nodes_of(real) as nodes:
        found = settings(real, nodes[0].take(["measure"]), nodes[0].about)
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
    names = (
        "per_pass",
        "per_row",
        "per_pair",
        "per_loaded",
        "per_fetched",
        "fixed",
        "per_answer_token",
        "per_stored",
    )
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


def over(base: SimulateConfig, store: str) -> SimulateConfig:
    """Over a shared store that has all, or one that has nothing."""
    return changed(base, tiers=changed(base.tiers, precomputed=store != "empty").model_dump())


def slowed(base: SimulateConfig, by: list[float]) -> SimulateConfig:
    """Nodes that slow each other down by so much."""
    return changed(base, compute=changed(base.compute, slowdown=by).model_dump())


def as_run(config: RealConfig, base: SimulateConfig, kind: str) -> SimulateConfig:
    """The settings of one run: a closed loop, or requests at a rate that keeps nodes busy for the wanted share."""
    if kind == "closed":
        return base
    base = over(base, kind)
    loop = Cluster(base, config.nodes, "round_robin").run(draw.requests(base, config.nodes), config.requests)
    rate = config.busy * summary(base, loop, config.nodes)["throughput"] / config.nodes
    return changed(base, requests=changed(base.requests, rate=rate).model_dump())


def slowdown(nodes: list[Subject], config: RealConfig, least: float) -> list[float]:
    """How many times as long as the least a request takes while 1, 2, ... of the nodes compute: by means, in turns.

    least: seconds of the same request, of which all chunks are in memory.
    """
    ask_all(nodes, "open", "full")
    request, n = list(range(config.request_chunks)), len(nodes)
    ask_all(nodes, "ask", request, False)
    took: list[list[float]] = [[] for _ in nodes]
    for turn in range(ROUNDS * n):
        for busy in range(n):
            asked = [nodes[(turn + i) % n] for i in range(busy + 1)]
            took[busy] += [
                part["ttft"] for told in together(asked, ["ask", request, False], TURN) for part in told
            ]
    times = [max(1.0, fmean(part) / least) for part in took]
    return np.maximum.accumulate(times).tolist()  # type: ignore[no-any-return]


def one_by_one(node: Subject, known: SimulateConfig, store: str) -> Figures:
    """A single node, asked by one client alone: each request's time is the least of REPEATS of the whole run.

    Nothing queues, so a request finds the same in every repeat, and others' work on the machine only adds to its time.
    """
    ((_, chunks),) = draw.requests(known, 1)
    runs = []
    for repeat in range(REPEATS):
        node.take(["open", store if store == "full" else f"alone {repeat}"])
        told = [node.take(["ask", asked, False]) for asked in chunks.tolist()]
        runs.append([[part["ttft"], part["ttft"] + part["behind"]] for part in told])
    first, whole = np.min(runs, axis=0).T
    simulated = Cluster(known, 1, "round_robin").run([(np.zeros(len(chunks)), chunks)], len(chunks))
    found = np.array([part["found"] for part in told])
    return {
        "requests": len(chunks),
        "same_places": float((found == simulated.found).all(axis=1).mean()),
        "ttft_real": float(first.mean()),
        "ttft_simulated": float(simulated.ttft.mean()),
        "error_of_mean": float(simulated.ttft.mean() / first.mean() - 1),
        "error_of_a_request": float(np.abs(simulated.ttft / first - 1).mean()),
        "error_of_whole": float(simulated.left[-1] / whole.sum() - 1),
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


def together(nodes: list[Subject], order: list[Any], times: int) -> list[list[Figures]]:
    """All nodes at once, each so many times in a row -> what each told. Raises InputError."""
    with ThreadPoolExecutor(len(nodes)) as threads:
        return list(threads.map(lambda node: [node.take(order) for _ in range(times)], nodes))


def ask_all(nodes: list[Subject], *order: Any) -> None:
    """One after the other."""
    for node in nodes:
        node.take(list(order))


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
