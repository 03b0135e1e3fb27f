"""Machines that several nodes share: nodes that compute at the same time slow each other down (processor sharing).

A request is a series of stages. A stage has seconds of work, and seconds that pass in any case (a fetch, a disk). The
nodes of a machine all compute at one rate, which changes when a stage begins or ends. So the service attained since the
machine started orders their completions, whatever the rate was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

Stages = Iterator[tuple[float, float]]  # seconds of work alone, least seconds


@dataclass(slots=True)
class Request:
    """A request in the cluster."""

    number: int
    chunks: Sequence[int]
    arrived_at: float
    elapsed: float = 0.0  # seconds from its start to the end of its last stage


Event = tuple[float, int, int, Request | None]  # time, order of equals, node; without a request: machine


@dataclass(slots=True)
class _Running:
    node: int
    request: Request
    stages: Stages
    began: float
    until: float = 0.0  # earliest end of the stage


class ProcessorSharing:
    """One machine."""

    def __init__(self, slowdown: Sequence[float]) -> None:
        self._slowdown = slowdown
        self._attained = self._now = (
            0.0  # service of a node that computes all the time, and when it was updated
        )
        self._ends: list[tuple[float, int]] = []  # heap: attained service at which a node's work is done
        self.due = inf  # time of the next completion if no stage begins

    def add(self, now: float, node: int, work: float) -> None:
        """A node starts to compute."""
        if self._ends:
            self._attained += (now - self._now) / self._slowdown[len(self._ends) - 1]
        heappush(self._ends, (self._attained + work, node))
        self._schedule(now)

    def complete(self) -> int:
        """The node that completes at `due`."""
        self._attained, node = heappop(self._ends)
        self._schedule(self.due)
        return node

    def _schedule(self, now: float) -> None:
        self._now, n = now, len(self._ends)
        self.due = now + (self._ends[0][0] - self._attained) * self._slowdown[n - 1] if n else inf


class SharedMachines:
    """All machines of a cluster, each with as many nodes as there are slowdowns."""

    def __init__(self, slowdown: Sequence[float], nodes: int, events: list[Event]) -> None:
        """events: the cluster's heap; ends of stages and completions are pushed to it."""
        self._share, self._events = len(slowdown), events
        self._machines = [ProcessorSharing(slowdown) for _ in range(-(-nodes // self._share))]
        self._running: dict[int, _Running] = {}  # by node

    def begin(self, now: float, node: int, request: Request, stages: Stages) -> None:
        """Start a request on a node."""
        self._running[node] = _Running(node, request, stages, now)
        self._advance(now, self._running[node])

    def step(self, event: Event) -> tuple[int, Request] | None:
        """Handle an event -> the node and its request, if the request ends."""
        now, _, number, request = event
        if request is None:
            machine = self._machines[number]
            if now != machine.due:
                return None  # a stage has begun or ended since this was scheduled
            running = self._running[machine.complete()]
            self._expect(number)
            if now < running.until:
                self._wait(running)
                return None
        else:
            running = self._running[number]
        return self._advance(now, running)

    def _advance(self, now: float, running: _Running) -> tuple[int, Request] | None:
        """Start the next stage; after the last one, the request ends."""
        running.request.elapsed = now - running.began
        stage = next(running.stages, None)
        if stage is None:
            return running.node, running.request
        work, least = stage
        running.until = now + least
        if work:
            number = running.node // self._share
            self._machines[number].add(now, running.node, work)
            self._expect(number)
        else:
            self._wait(running)
        return None

    def _wait(self, running: _Running) -> None:
        heappush(self._events, (running.until, running.request.number, running.node, running.request))

    def _expect(self, number: int) -> None:
        if (due := self._machines[number].due) < inf:
            heappush(self._events, (due, -1, number, None))
