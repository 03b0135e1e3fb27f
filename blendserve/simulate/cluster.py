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
from blendserve.simulate.cache import Cache, ChunkDirectory, key_of
from blendserve.simulate.config import Routing, SimulateConfig
from blendserve.simulate.routing import Loads, make_router
from blendserve.simulate.service_time import Machine, ServiceTime, StoreLink
from blendserve.simulate.workload import Floats, Ints
from blendserve.store.policies import Admission, Always

TIERS = ("memory", "disk", "remote", "computed")
MEMORY, DISK, REMOTE, COMPUTED = range(len(TIERS))
Update = Callable[[int, int], None]
Stages = Iterator[tuple[float, float]]  # seconds of work, and seconds that pass in any case (a fetch, a disk)


class Node:
    """A node's caches and queue, whose first request is running."""

    def __init__(self, config: SimulateConfig, number: int, directory: ChunkDirectory | None) -> None:
        """directory: is told what the node's memory holds."""
        tiers = config.tiers
        compute = config.compute
        tokens = config.corpus.chunk_tokens
        policy = ADMISSIONS.load(tiers.admission)
        self.admission: Admission | None = None if policy is Always else policy(config.seed)
        places = tiers.memory_bytes // (compute.raw_bytes * tokens)
        self.memory = Cache(places, self.admission, directory, number)
        self.disk = Cache(tiers.disk_bytes // (compute.stored_bytes * tokens), self.admission)
        self.queue = deque[SimulatedRequest]()


@dataclass(slots=True)
class SimulatedRequest:
    """A request, and how far its node is with it."""

    number: int
    chunks: Sequence[int]
    arrived_at: float
    node: int = 0
    stages: Stages = field(default_factory=lambda: iter(()))
    began: float = 0.0
    elapsed: float = 0.0  # seconds from its start to the end of its last stage
    until: float = 0.0  # earliest end of the running stage


class SimulationResult:
    """Every request, by number [R]."""

    def __init__(self, number: int) -> None:
        self.arrived_at = np.zeros(number)
        self.ttft = np.zeros(number)
        self.finished_at = np.zeros(number)  # when its node was free again
        self.node = np.zeros(number, np.int64)
        self.found = np.zeros((number, len(TIERS)), np.int64)  # chunks
        self.sent = 0  # chunks written to the shared store
        self.cpu_s = 0.0  # CPU time of the simulation
        self.chunks_held = 0  # in caches and stores at the end


class Cluster:
    """Nodes under one routing method."""

    def __init__(self, config: SimulateConfig, nodes: int, routing: Routing) -> None:
        self._config = config
        compute = config.compute
        tiers = config.tiers
        self._chunk_bytes = compute.stored_bytes * config.corpus.chunk_tokens
        self._holds_all = tiers.precomputed and tiers.remote_bytes == "all"
        self._remote = Cache(inf if tiers.remote_bytes == "all" else tiers.remote_bytes // self._chunk_bytes)
        self._prefill_s = cache(ServiceTime(config).prefill)
        self._loads = Loads(nodes, config.bound)
        self._link = StoreLink(config.links)
        directory = ChunkDirectory()
        self._route = make_router(routing, self._loads, directory)
        told = directory if routing == "chunks" else None
        self._nodes = [Node(config, number, told) for number in range(nodes)]
        # (time, request, node); a machine's next completion: (time, -1, machine)
        self._events: list[tuple[float, int, int]] = []
        self._share = len(compute.slowdown)  # nodes of a machine; one needs no machine's bookkeeping
        n_machines = -(-nodes // self._share) if self._share > 1 else 0
        self._machines = [Machine(compute.slowdown) for _ in range(n_machines)]

    def run(
        self, blocks: Iterable[tuple[Floats, Ints]], number: int, update: Update = lambda done, total: None
    ) -> SimulationResult:
        """Run all `number` requests of the blocks. Without a rate in the settings, in a closed loop."""
        began = process_time()
        events = self._events
        result = SimulationResult(number)
        self._result = result
        closed = not self._config.requests.rate
        idle = self._config.requests.clients * len(self._nodes)  # clients of a closed loop
        done = 0
        now = 0.0
        for times, chunks in blocks:
            for at, wanted in zip(times.tolist(), chunks.tolist(), strict=True):
                while events and (not idle if closed else events[0][0] <= at):
                    now, ended = self._step()
                    idle += ended
                idle -= 1
                self._arrive(SimulatedRequest(done, wanted, now if closed else at))
                done += 1
            update(done, number)
        while events:
            self._step()
        result.chunks_held = sum(len(n.memory) + len(n.disk) for n in self._nodes) + len(self._remote)
        result.cpu_s = process_time() - began
        return result

    def _arrive(self, request: SimulatedRequest) -> None:
        request.node = number = self._route(request.chunks)
        self._loads.add(number, 1)
        self._result.arrived_at[request.number] = request.arrived_at
        self._result.node[request.number] = number
        queue = self._nodes[number].queue
        queue.append(request)
        if len(queue) == 1:
            self._start(request.arrived_at, request)

    def _start(self, now: float, request: SimulatedRequest) -> None:
        request.began = now
        request.stages = self._stages(request)
        if self._machines:
            self._advance(now, request)
            return
        for work, least in request.stages:
            request.elapsed += max(work * self._config.compute.slowdown[0], least)
        request.until = now + request.elapsed
        self._wait(request)

    def _step(self) -> tuple[float, bool]:
        """Handle the next event -> its time, and whether an answer ended."""
        now, order, number = heappop(self._events)
        if order < 0:
            if now != self._machines[number].due:
                return now, False  # a stage has begun or ended since this was scheduled
            number = self._machines[number].complete()
            self._schedule(number)
        request = self._nodes[number].queue[0]
        if now < request.until:
            self._wait(request)
        elif not self._machines or self._advance(now, request):
            self._end(now, request)
            return now, True
        return now, False

    def _advance(self, now: float, request: SimulatedRequest) -> bool:
        """Start the next stage on a shared machine -> whether there was none."""
        request.elapsed = now - request.began
        work, least = next(request.stages, (-1.0, 0.0))
        if work < 0:
            return True
        request.until = now + least
        if work:
            self._machines[request.node // self._share].add(now, request.node, work)
            self._schedule(request.node)
        else:
            self._wait(request)
        return False

    def _wait(self, request: SimulatedRequest) -> None:
        heappush(self._events, (request.until, request.number, request.node))

    def _schedule(self, node: int) -> None:
        """The next completion on the node's machine."""
        number = node // self._share
        if (due := self._machines[number].due) < inf:
            heappush(self._events, (due, -1, number))

    def _end(self, now: float, request: SimulatedRequest) -> None:
        """An answer ends; its node starts the next request."""
        node = self._nodes[request.node]
        self._result.finished_at[request.number] = now
        if self._result.found[request.number, COMPUTED]:
            for chunk in request.chunks:
                if chunk not in node.memory and chunk not in node.disk:
                    node.disk.insert(chunk)
                    self._result.sent += chunk not in self._remote and self._remote.insert(chunk)
        self._loads.add(request.node, -1)
        node.queue.popleft()
        if node.queue:
            self._start(now, node.queue[0])

    def _stages(self, request: SimulatedRequest) -> Stages:
        """The stages of an answer; their consumer updates `request.elapsed`."""
        tiers = self._look_up(self._nodes[request.node], request.chunks)
        compute = self._config.compute
        links = self._config.links
        counts = [tiers.count(tier) for tier in range(len(TIERS))]
        self._result.found[request.number] = counts
        _, disk, remote, missing = counts
        tokens = self._config.corpus.chunk_tokens
        yield compute.fixed, 0.0
        if remote:
            fetching = self._link.fetch(request.began + request.elapsed, remote * self._chunk_bytes)
            yield remote * tokens * compute.per_fetched, fetching
        reads_disk = disk and links.disk_rate
        local = links.disk_delay + disk * self._chunk_bytes / links.disk_rate if reads_disk else 0.0
        decoding = (disk + remote) * tokens * compute.per_decoded
        yield self._prefill_s(tuple(tier != COMPUTED for tier in tiers)) + decoding, local
        self._result.ttft[request.number] = request.began + request.elapsed - request.arrived_at
        yield self._config.requests.answer_tokens * compute.per_answer_token, 0.0
        if missing:  # computed alone, in one pass
            yield compute.per_pass + missing * tokens * compute.per_stored, 0.0

    def _look_up(self, node: Node, chunks: Sequence[int]) -> list[int]:
        """The tier of each chunk; hits enter memory. As the engine does: local caches first, then the shared store."""
        memory = node.memory
        disk = node.disk
        tiers = [COMPUTED] * len(chunks)
        for place, chunk in enumerate(chunks):
            if node.admission:
                node.admission.record_access(key_of(chunk))
            on_disk = disk.hit(chunk)
            if memory.hit(chunk):
                tiers[place] = MEMORY
            elif on_disk:
                tiers[place] = DISK
                memory.insert(chunk)
        for place, chunk in enumerate(chunks):
            if tiers[place] == COMPUTED and (self._holds_all or self._remote.hit(chunk)):
                tiers[place] = REMOTE
                memory.insert(chunk)
                disk.insert(chunk)
        return tiers
