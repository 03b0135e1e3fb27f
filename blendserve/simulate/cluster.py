"""Discrete events of a cluster.

    arrival -> router -> node's queue -> look-up -> fetch -> prefill, with local reads -> first token -> answer

A node answers one request at a time. A request looks its chunks up in prompt order when its turn comes. Hits enter the
node's memory, fetched chunks its disk; computed chunks enter its disk and the shared store after the answer. A chunk
that was never requested has no state, so memory does not grow with the corpus.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from time import perf_counter, process_time

import numpy as np

from blendserve.registry import ADMISSIONS
from blendserve.simulate.cache import Cache, Listener, key_of
from blendserve.simulate.config import Routing, SimulateConfig, TiersConfig
from blendserve.simulate.network import StoreLink
from blendserve.simulate.processor_sharing import Event, Request, SharedMachines, Stages
from blendserve.simulate.routing import ChunkDirectory, Loads, make_router
from blendserve.simulate.service_time import ServiceTime
from blendserve.simulate.workload import Floats, Ints
from blendserve.store.policies import Admission, Always

TIERS = ("memory", "disk", "remote", "computed")
MEMORY, DISK, REMOTE, COMPUTED = range(len(TIERS))
Update = Callable[[int, int], None]


@dataclass(slots=True)
class Node:
    """A node's caches and queue."""

    memory: Cache
    disk: Cache
    admission: Admission | None
    queue: deque[Request] = field(default_factory=deque)
    is_busy: bool = False


@dataclass(frozen=True)
class SimulationResult:
    """Every request, by number [R]."""

    arrived_at: Floats
    ttft: Floats
    finished_at: Floats  # when its node was free again
    node: Ints
    found: Ints  # [R, len(TIERS)] chunks
    sent: int  # chunks written to the shared store
    seconds: tuple[float, float]  # wall and CPU time of the simulation
    chunks_held: int  # in caches and stores at the end


class Cluster:
    """Nodes under one routing method."""

    def __init__(self, config: SimulateConfig, nodes: int, routing: Routing) -> None:
        self._config, compute, tiers = config, config.compute, config.tiers
        self._chunk_bytes = compute.stored_bytes * config.corpus.chunk_tokens
        self._holds_all = tiers.precomputed and tiers.remote_bytes == "all"
        self._remote = _remote(tiers, self._chunk_bytes)
        self._prefill_s = cache(ServiceTime(compute, config.corpus, config.requests).prefill)
        directory = ChunkDirectory()
        self._loads, self._link = Loads(nodes, config.bound), StoreLink(config.links)
        listeners = (directory.add, directory.remove) if routing == "chunks" else ()
        self._nodes = [_node(config, number, listeners) for number in range(nodes)]
        self._route = make_router(routing, self._loads, directory)
        self._events: list[Event] = []
        shares = len(compute.slowdown) > 1
        self._machines = SharedMachines(compute.slowdown, nodes, self._events) if shares else None
        self._sent = 0

    def run(
        self,
        blocks: Iterable[tuple[Floats, Ints]],
        number: int,
        update: Update = lambda done, total: None,
    ) -> SimulationResult:
        """Run all `number` requests of the blocks. Without a rate in the settings, in a closed loop."""
        began, events = (perf_counter(), process_time()), self._events
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
        held = sum(len(node.memory) + len(node.disk) for node in self._nodes) + len(self._remote)
        seconds = perf_counter() - began[0], process_time() - began[1]
        requests = self._arrived_at, self._ttft, self._finished_at, self._node, self._found
        return SimulationResult(*requests, self._sent, seconds, held)

    def _arrive(self, request: Request) -> None:
        number = self._route(request.chunks)
        self._loads.add(number, 1)
        self._arrived_at[request.number], self._node[request.number] = request.arrived_at, number
        if self._nodes[number].is_busy:
            self._nodes[number].queue.append(request)
        else:
            self._start(request.arrived_at, number, request)

    def _step(self) -> tuple[float, bool]:
        """Handle the next event -> its time, and whether an answer ended."""
        event = heappop(self._events)
        now, _, number, request = event
        if self._machines:
            ended = self._machines.step(event)
            if ended is None:
                return now, False
            number, request = ended
        assert request
        self._end(now, number, request)
        return now, True

    def _end(self, now: float, number: int, request: Request) -> None:
        """An answer ends; its node starts the next request."""
        self._finished_at[request.number] = now
        self._store_computed(number, request)
        self._loads.add(number, -1)
        node = self._nodes[number]
        node.is_busy = False
        if node.queue:
            self._start(now, number, node.queue.popleft())

    def _start(self, now: float, number: int, request: Request) -> None:
        self._nodes[number].is_busy = True
        stages = self._stages(now, number, request)
        if self._machines:
            self._machines.begin(now, number, request, stages)
            return
        for work, least in stages:
            request.elapsed += max(work * self._config.compute.slowdown[0], least)
        heappush(self._events, (now + request.elapsed, request.number, number, request))

    def _stages(self, now: float, number: int, request: Request) -> Stages:
        """The stages of an answer that starts now; their consumer updates `request.elapsed`."""
        tiers = self._look_up(self._nodes[number], request.chunks)
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

    def _store_computed(self, number: int, request: Request) -> None:
        if self._found[request.number, COMPUTED]:
            node = self._nodes[number]
            for chunk in request.chunks:
                if chunk not in node.memory and chunk not in node.disk:
                    node.disk.insert(chunk)
                    self._sent += chunk not in self._remote and self._remote.insert(chunk)


def _node(config: SimulateConfig, number: int, listeners: tuple[Listener, ...]) -> Node:
    tiers, compute, tokens = config.tiers, config.compute, config.corpus.chunk_tokens
    policy = ADMISSIONS.load(tiers.admission)
    admission = None if policy is Always else policy(config.seed)
    memory = Cache(int(tiers.memory_bytes // (compute.raw_bytes * tokens)), admission, number, *listeners)
    disk = Cache(int(tiers.disk_bytes // (compute.stored_bytes * tokens)), admission, number)
    return Node(memory, disk, admission)


def _remote(tiers: TiersConfig, chunk_bytes: int) -> Cache:
    return Cache(1 << 62 if tiers.remote_bytes == "all" else int(float(tiers.remote_bytes) // chunk_bytes))
