"""Discrete events of a cluster.

    arrival -> router -> node's queue -> look-up -> fetch -> prefill, with local reads -> first token -> answer

A node answers one request at a time. A request looks its chunks up in prompt order when its turn comes. Hits enter the
node's memory, fetched chunks its disk; computed chunks enter its disk and the shared store after the answer. A chunk
that was never requested has no state, so memory does not grow with the corpus.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from math import inf
from time import process_time

import numpy as np

from blendserve.registry import ADMISSIONS
from blendserve.simulate.cache import Cache, key_of
from blendserve.simulate.config import Routing, SimulateConfig
from blendserve.simulate.routing import ChunkDirectory, Loads, make_router
from blendserve.simulate.service_time import Machine, ServiceTime, StoreLink
from blendserve.simulate.workload import Floats, Ints
from blendserve.store.policies import Admission, Always

TIERS = ("memory", "disk", "remote", "computed")
MEMORY, DISK, REMOTE, COMPUTED = range(len(TIERS))
Update = Callable[[int, int], None]
Stages = Iterator[tuple[float, float]]  # seconds of work, and seconds that pass in any case (a fetch, a disk)


@dataclass(slots=True)
class Node:
    """A node's caches and queue."""

    memory: Cache
    disk: Cache
    admission: Admission | None
    queue: deque[Request] = field(default_factory=deque)
    is_busy: bool = False


@dataclass(slots=True)
class Request:
    """A request, and how far its node is with it."""

    number: int
    chunks: Sequence[int]
    arrived_at: float
    node: int = 0
    stages: Stages = field(default_factory=lambda: iter(()))
    began: float = 0.0
    elapsed: float = 0.0  # seconds from its start to the end of its last stage
    until: float = 0.0  # earliest end of the running stage


@dataclass(frozen=True)
class SimulationResult:
    """Every request, by number [R]."""

    arrived_at: Floats
    ttft: Floats
    finished_at: Floats  # when its node was free again
    node: Ints
    found: Ints  # [R, len(TIERS)] chunks
    sent: int = 0  # chunks written to the shared store
    cpu_s: float = 0.0  # CPU time of the simulation
    chunks_held: int = 0  # in caches and stores at the end


class Cluster:
    """Nodes under one routing method."""

    def __init__(self, config: SimulateConfig, nodes: int, routing: Routing) -> None:
        self._config, compute, tiers = config, config.compute, config.tiers
        self._chunk_bytes = compute.stored_bytes * config.corpus.chunk_tokens
        self._holds_all = tiers.precomputed and tiers.remote_bytes == "all"
        self._remote = Cache(inf if tiers.remote_bytes == "all" else tiers.remote_bytes // self._chunk_bytes)
        self._prefill_s = cache(ServiceTime(compute, config.corpus, config.requests).prefill)
        self._loads, self._link = Loads(nodes, config.bound), StoreLink(config.links)
        directory = ChunkDirectory()
        self._route = make_router(routing, self._loads, directory)
        self._nodes = [self._make_node(number, directory, routing) for number in range(nodes)]
        # (time, order of equals, node, request); a machine's next completion: (time, -1, machine, None)
        self._events: list[tuple[float, int, int, Request | None]] = []
        self._share = len(compute.slowdown)  # nodes of a machine; one needs no machine's bookkeeping
        n_machines = -(-nodes // self._share) if self._share > 1 else 0
        self._machines = [Machine(compute.slowdown) for _ in range(n_machines)]
        self._running: dict[int, Request] = {}  # by node of a shared machine
        self._sent = 0

    def run(
        self, blocks: Iterable[tuple[Floats, Ints]], number: int, update: Update = lambda done, total: None
    ) -> SimulationResult:
        """Run all `number` requests of the blocks. Without a rate in the settings, in a closed loop."""
        began, events = process_time(), self._events
        self._arrived_at, self._ttft, self._finished_at = np.zeros(number), np.zeros(number), np.zeros(number)
        self._node, self._found = np.zeros(number, np.int64), np.zeros((number, len(TIERS)), np.int64)
        closed = not self._config.requests.rate
        idle = self._config.requests.clients * len(self._nodes)  # clients of a closed loop
        done, now = 0, 0.0
        for times, chunks in blocks:
            for at, wanted in zip(times.tolist(), chunks.tolist(), strict=True):
                while events and (not idle if closed else events[0][0] <= at):
                    now, ended = self._step()
                    idle += ended
                idle -= 1
                self._arrive(Request(done, wanted, now if closed else at))
                done += 1
            update(done, number)
        while events:
            self._step()
        requests = self._arrived_at, self._ttft, self._finished_at, self._node, self._found
        held = sum(len(node.memory) + len(node.disk) for node in self._nodes) + len(self._remote)
        return SimulationResult(*requests, self._sent, process_time() - began, held)

    def _make_node(self, number: int, directory: ChunkDirectory, routing: Routing) -> Node:
        tiers, compute, tokens = self._config.tiers, self._config.compute, self._config.corpus.chunk_tokens
        policy = ADMISSIONS.load(tiers.admission)
        admission = None if policy is Always else policy(self._config.seed)
        memory = Cache(tiers.memory_bytes // (compute.raw_bytes * tokens), admission, number)
        if routing == "chunks":
            memory.added, memory.evicted = directory.add, directory.remove
        return Node(memory, Cache(tiers.disk_bytes // self._chunk_bytes, admission), admission)

    def _arrive(self, request: Request) -> None:
        request.node = number = self._route(request.chunks)
        self._loads.add(number, 1)
        self._arrived_at[request.number], self._node[request.number] = request.arrived_at, number
        if self._nodes[number].is_busy:
            self._nodes[number].queue.append(request)
        else:
            self._start(request.arrived_at, request)

    def _start(self, now: float, request: Request) -> None:
        self._nodes[request.node].is_busy = True
        request.began, request.stages = now, self._stages(now, request)
        if self._machines:
            self._running[request.node] = request
            self._advance(now, request)
            return
        for work, least in request.stages:
            request.elapsed += max(work * self._config.compute.slowdown[0], least)
        self._wait(now + request.elapsed, request)

    def _step(self) -> tuple[float, bool]:
        """Handle the next event -> its time, and whether an answer ended."""
        now, _, number, request = heappop(self._events)
        if request is None:
            machine = self._machines[number]
            if now != machine.due:
                return now, False  # a stage has begun or ended since this was scheduled
            request = self._running[machine.complete()]
            self._schedule(number)
            if now < request.until:
                self._wait(request.until, request)
                return now, False
        if self._machines and not self._advance(now, request):
            return now, False
        self._end(now, request)
        return now, True

    def _advance(self, now: float, request: Request) -> bool:
        """Start the next stage on a shared machine -> whether there was none."""
        request.elapsed = now - request.began
        work, least = next(request.stages, (-1.0, 0.0))
        if work < 0:
            return True
        request.until = now + least
        if work:
            number = request.node // self._share
            self._machines[number].add(now, request.node, work)
            self._schedule(number)
        else:
            self._wait(request.until, request)
        return False

    def _wait(self, until: float, request: Request) -> None:
        heappush(self._events, (until, request.number, request.node, request))

    def _schedule(self, number: int) -> None:
        if (due := self._machines[number].due) < inf:
            heappush(self._events, (due, -1, number, None))

    def _end(self, now: float, request: Request) -> None:
        """An answer ends; its node starts the next request."""
        node = self._nodes[request.node]
        self._finished_at[request.number] = now
        if self._found[request.number, COMPUTED]:
            for chunk in request.chunks:
                if chunk not in node.memory and chunk not in node.disk:
                    node.disk.insert(chunk)
                    self._sent += chunk not in self._remote and self._remote.insert(chunk)
        self._loads.add(request.node, -1)
        node.is_busy = False
        if node.queue:
            self._start(now, node.queue.popleft())

    def _stages(self, now: float, request: Request) -> Stages:
        """The stages of an answer that starts now; their consumer updates `request.elapsed`."""
        tiers = self._look_up(self._nodes[request.node], request.chunks)
        compute, links = self._config.compute, self._config.links
        counts = [tiers.count(tier) for tier in range(len(TIERS))]
        self._found[request.number] = counts
        _, disk, remote, missing = counts
        tokens = self._config.corpus.chunk_tokens
        yield compute.fixed, 0.0
        if remote:
            fetching = self._link.fetch(now + request.elapsed, remote * self._chunk_bytes)
            yield remote * tokens * compute.per_fetched, fetching
        reads_disk = disk and links.disk_rate
        local = links.disk_delay + disk * self._chunk_bytes / links.disk_rate if reads_disk else 0.0
        decoding = (disk + remote) * tokens * compute.per_decoded
        yield self._prefill_s(tuple(tier != COMPUTED for tier in tiers)) + decoding, local
        self._ttft[request.number] = now + request.elapsed - request.arrived_at
        yield self._config.requests.answer_tokens * compute.per_answer_token, 0.0
        if missing:  # computed alone, in one pass
            yield compute.per_pass + missing * tokens * compute.per_stored, 0.0

    def _look_up(self, node: Node, chunks: Sequence[int]) -> list[int]:
        """The tier of each chunk; hits enter memory. As the engine does: local caches first, then the shared store."""
        memory, disk = node.memory, node.disk
        tiers, missing = [COMPUTED] * len(chunks), []
        for place, chunk in enumerate(chunks):
            if node.admission:
                node.admission.record_access(key_of(chunk))
            on_disk = disk.get(chunk)
            if memory.get(chunk):
                tiers[place] = MEMORY
            elif on_disk:
                tiers[place] = DISK
                memory.insert(chunk)
            else:
                missing.append(place)
        for place in missing:
            chunk = chunks[place]
            if self._holds_all or self._remote.get(chunk):
                tiers[place] = REMOTE
                memory.insert(chunk)
                disk.insert(chunk)
        return tiers
