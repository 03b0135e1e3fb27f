"""The events of a cluster: requests come, are routed, wait, are answered one at a time by a node, and leave chunks.

    arrival -> router -> node's queue -> look-up -> fetch -> prefill, local reads beside it -> first token -> answer

A node is the engine with one model thread: tiers and stores are looked into when a request's turn comes, chunk by chunk
in the prompt's order. What is found enters memory then, what was fetched the node's disk; what was computed enters its
disk and the shared store behind the answer. Chunks that nobody asked for have no state: memory does not grow with the
corpus.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from time import perf_counter, process_time

import numpy as np

from blendserve.registry import ADMISSIONS
from blendserve.simulate import draw
from blendserve.simulate.cache import Cache, key_of
from blendserve.simulate.config import Routing, SimulateConfig, TiersConfig
from blendserve.simulate.link import Link
from blendserve.simulate.machine import Event, Machines, Request, Stages
from blendserve.simulate.routing import ROUTERS, Holders, Loads, Router
from blendserve.simulate.work import Work
from blendserve.store.policies import Admission, Always

TIERS = ("memory", "disk", "remote", "computed")
Blocks = Iterable[tuple[draw.Reals, draw.Numbers]]
Update = Callable[[int, int], None]


@dataclass(slots=True)
class Node:
    """Its tiers, and who waits for it."""

    memory: Cache
    disk: Cache
    admission: Admission | None
    waiting: deque[Request] = field(default_factory=deque)
    busy: bool = False


@dataclass(frozen=True)
class Trace:
    """What became of every request, by its number [R]."""

    came: draw.Reals
    ttft: draw.Reals
    left: draw.Reals  # when its node was free for the next one
    node: draw.Numbers
    found: draw.Numbers  # [R, len(TIERS)] chunks
    sent: int  # chunks that were written to the shared store
    seconds: tuple[float, float]  # that simulating took, and of the CPU
    chunks_known: int  # places in tiers and stores that hold a chunk at the end


class Cluster:
    """Nodes under one way of routing. Each request is answered once, in the order of its node's queue."""

    def __init__(self, config: SimulateConfig, nodes: int, routing: Routing) -> None:
        self._config, self._work = config, Work(config.compute, config.corpus, config.requests)
        tiers, tokens = config.tiers, config.corpus.chunk_tokens
        self._stored = config.compute.stored_bytes * tokens
        self._all_there = tiers.precomputed and tiers.remote_bytes == "all"
        self._remote = _remote(tiers, self._stored)
        loads, holders = Loads(nodes, config.bound), Holders()
        self._loads, self._link = loads, Link(config.links)
        watched = (holders.came, holders.went) if routing == "chunks" else ()
        self._nodes = [_node(config, number, watched) for number in range(nodes)]
        self._router: Router = ROUTERS[routing](loads, holders)
        self._events: list[Event] = []  # when a node is done with which request
        slowdown = config.compute.slowdown
        self._pace = slowdown[0]
        self._shared = Machines(slowdown, nodes, self._events) if len(slowdown) > 1 else None
        self._prefills: dict[tuple[bool, ...], float] = {}
        self._sent = 0  # chunks, to the shared store

    def run(self, blocks: Blocks, number: int, update: Update = lambda done, total: None) -> Trace:
        """All requests of the blocks, `number` of them. Closed loop where the settings have no rate."""
        began, events = (perf_counter(), process_time()), self._events
        self._came, self._ttft, self._left = np.zeros(number), np.zeros(number), np.zeros(number)
        self._node, self._found = np.zeros(number, np.int64), np.zeros((number, len(TIERS)), np.int64)
        closed = not self._config.requests.rate
        free = self._config.requests.clients * len(self._nodes)  # clients that wait for no answer
        done, now = 0, 0.0
        for times, chunks in blocks:
            for at, wanted in zip(times.tolist(), chunks.tolist(), strict=True):
                while events and (not free if closed else events[0][0] <= at):
                    now, ended = self._step()
                    free += ended
                free -= 1
                self._arrive(Request(done, wanted, now if closed else at))
                done += 1
            update(done, number)
        while events:
            self._step()
        known = sum(len(node.memory) + len(node.disk) for node in self._nodes) + len(self._remote)
        took = perf_counter() - began[0], process_time() - began[1]
        return Trace(self._came, self._ttft, self._left, self._node, self._found, self._sent, took, known)

    def _arrive(self, request: Request) -> None:
        number = self._router.choose(request.chunks)
        self._loads.add(number, 1)
        self._came[request.number], self._node[request.number] = request.came, number
        node = self._nodes[number]
        if node.busy:
            node.waiting.append(request)
        else:
            self._start(request.came, number, request)

    def _step(self) -> tuple[float, bool]:
        """The next event -> when, and whether an answer ended."""
        event = heappop(self._events)
        now, _, number, request = event
        if self._shared:
            ended = self._shared.step(event)
            if ended is None:
                return now, False
            number, request = ended
        assert request
        self._end(now, number, request)
        return now, True

    def _end(self, now: float, number: int, request: Request) -> None:
        """An answer ends, and its node begins the next one."""
        self._left[request.number] = now
        self._write(number, request)
        self._loads.add(number, -1)
        node = self._nodes[number]
        node.busy = False
        if node.waiting:
            self._start(now, number, node.waiting.popleft())

    def _start(self, now: float, number: int, request: Request) -> None:
        self._nodes[number].busy = True
        stages = self._stages(now, number, request)
        if self._shared:
            self._shared.begin(now, number, request, stages)
            return
        for work, least in stages:
            request.elapsed += max(work * self._pace, least)
        heappush(self._events, (now + request.elapsed, request.number, number, request))

    def _stages(self, now: float, number: int, request: Request) -> Stages:
        """Of an answer that begins now. Whoever goes through them tells the request how long they took."""
        tiers = self._look_up(self._nodes[number], request.chunks)
        compute, links = self._config.compute, self._config.links
        memory, disk, remote, missing = (tiers.count(tier) for tier in range(len(TIERS)))
        self._found[request.number] = memory, disk, remote, missing
        tokens = self._config.corpus.chunk_tokens
        yield compute.fixed, 0.0
        if remote:
            fetching = self._link.fetch(now + request.elapsed, remote * self._stored)
            yield remote * tokens * compute.per_fetched, fetching
        local = links.disk_delay + disk * self._stored / links.disk_rate if disk and links.disk_rate else 0.0
        decoding = (disk + remote) * tokens * compute.per_decoded
        yield self._prefill(tuple(tier < 3 for tier in tiers)) + decoding, local
        self._ttft[request.number] = now + request.elapsed - request.came
        yield self._config.requests.answer_tokens * compute.per_answer_token, 0.0
        if missing:  # alone, and in one pass
            yield compute.per_pass + missing * tokens * compute.per_stored, 0.0

    def _look_up(self, node: Node, chunks: Sequence[int]) -> list[int]:
        """Where each chunk is found, as a number in TIERS; what is found enters memory.

        As the engine's snapshot does it: the node's own places first, then the shared store for all that is lacking.
        """
        memory, disk = node.memory, node.disk
        tiers, lacking = [3] * len(chunks), []
        for place, chunk in enumerate(chunks):
            if node.admission:
                node.admission.record_access(key_of(chunk))
            near = disk.use(chunk)
            if memory.use(chunk):
                tiers[place] = 0
            elif near:
                tiers[place] = 1
                memory.offer(chunk)
            else:
                lacking.append(place)
        for place in lacking:
            chunk = chunks[place]
            if self._all_there or self._remote.use(chunk):
                tiers[place] = 2
                memory.offer(chunk)
                disk.offer(chunk)
        return tiers

    def _write(self, number: int, request: Request) -> None:
        """What the request had to compute."""
        if self._found[request.number, 3]:
            node = self._nodes[number]
            for chunk in request.chunks:
                if chunk not in node.memory and chunk not in node.disk:
                    node.disk.offer(chunk)
                    self._sent += chunk not in self._remote and self._remote.offer(chunk)

    def _prefill(self, found: tuple[bool, ...]) -> float:
        seconds = self._prefills.get(found)
        if seconds is None:
            seconds = self._prefills[found] = self._work.prefill(found)
        return seconds


def _node(config: SimulateConfig, number: int, watched: tuple[Callable[[int, int], None], ...]) -> Node:
    tiers, compute, tokens = config.tiers, config.compute, config.corpus.chunk_tokens
    rule = ADMISSIONS.load(tiers.admission)
    admission = None if rule is Always else rule(config.seed)
    memory = Cache(int(tiers.memory_bytes // (compute.raw_bytes * tokens)), admission, number, *watched)
    disk = Cache(int(tiers.disk_bytes // (compute.stored_bytes * tokens)), admission, number)
    return Node(memory, disk, admission)


def _remote(tiers: TiersConfig, chunk_bytes: int) -> Cache:
    """The shared store; LRU at its cap."""
    endless = tiers.remote_bytes == "all"
    return Cache(1 << 62 if endless else int(float(tiers.remote_bytes) // chunk_bytes))
