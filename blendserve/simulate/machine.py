"""Machines whose cores and memory several nodes share: while they compute at once, each is slower (processor sharing).

An answer is a series of stages, each of some seconds of a node's work and of seconds that pass in any case (a fetch, a
disk). All nodes of a machine that compute do so at one rate, which changes when one of them begins or ends; so the work
that each has been given since the machine began tells who is done next, whatever the rate was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

Stages = Iterator[tuple[float, float]]  # seconds of work as alone, and seconds that pass at least


@dataclass(slots=True)
class Request:
    """One that is on its way."""

    number: int
    chunks: Sequence[int]
    came: float
    elapsed: float = 0.0  # seconds since its node began with it, to the end of its last stage


Event = tuple[float, int, int, Request | None]  # when, order of equals, a node (or a machine), what is done


@dataclass(slots=True)
class Answering:
    """A node with what it is at."""

    node: int
    request: Request
    stages: Stages
    began: float
    until: float = 0.0  # its stage takes until then at least


class Machine:
    """Work that is done at once."""

    def __init__(self, slowdown: Sequence[float]) -> None:
        self._slowdown = slowdown
        self._given = self._now = (
            0.0  # seconds of work that each has had who has computed all along, and till when
        )
        self._ends: list[
            tuple[float, int]
        ] = []  # a heap: what will have been given when a node's work is done
        self.due = inf  # when the first of them is done, if nobody comes

    def add(self, now: float, node: int, work: float) -> None:
        """A node begins to compute."""
        if self._ends:
            self._given += (now - self._now) / self._slowdown[len(self._ends) - 1]
        heappush(self._ends, (self._given + work, node))
        self._plan(now)

    def take(self) -> int:
        """The node whose work is done, at the time that is due."""
        self._given, node = heappop(self._ends)
        self._plan(self.due)
        return node

    def _plan(self, now: float) -> None:
        self._now, n = now, len(self._ends)
        self.due = now + (self._ends[0][0] - self._given) * self._slowdown[n - 1] if n else inf


class Machines:
    """All of a cluster's, each with as many nodes as there are slowdowns."""

    def __init__(self, slowdown: Sequence[float], nodes: int, events: list[Event]) -> None:
        """events: a heap of what comes, which this adds to: ends of stages, and of a machine's work."""
        self._share, self._events = len(slowdown), events
        self._machines = [Machine(slowdown) for _ in range(-(-nodes // self._share))]
        self._at: dict[int, Answering] = {}  # by node

    def begin(self, now: float, node: int, request: Request, stages: Stages) -> None:
        """A node begins to answer."""
        self._at[node] = Answering(node, request, stages, now)
        self._go_on(now, self._at[node])

    def step(self, event: Event) -> tuple[int, Request] | None:
        """What comes of an event: the node whose answer ends with it, if one does."""
        now, _, number, request = event
        if request is None:
            if now != self._machines[number].due:
                return None  # somebody has come or gone since that was planned
            answering = self._at[self._machines[number].take()]
            self._expect(number)
            if now < answering.until:
                self._wait(answering)
                return None
        else:
            answering = self._at[number]
        return self._go_on(now, answering)

    def _go_on(self, now: float, answering: Answering) -> tuple[int, Request] | None:
        """The next stage; at the end the node and its request."""
        answering.request.elapsed = now - answering.began
        stage = next(answering.stages, None)
        if stage is None:
            return answering.node, answering.request
        work, least = stage
        answering.until = now + least
        if work:
            number = answering.node // self._share
            self._machines[number].add(now, answering.node, work)
            self._expect(number)
        else:
            self._wait(answering)
        return None

    def _wait(self, answering: Answering) -> None:
        heappush(self._events, (answering.until, answering.request.number, answering.node, answering.request))

    def _expect(self, number: int) -> None:
        due = self._machines[number].due
        if due < inf:
            heappush(self._events, (due, -1, number, None))
