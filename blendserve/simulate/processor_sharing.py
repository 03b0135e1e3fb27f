"""A machine that several nodes share: nodes that compute at the same time slow each other down (processor sharing).

All of them compute at one rate, which changes when one begins or ends. So the service attained since the machine started
orders their completions, whatever the rate was.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf


class Machine:
    """The nodes of one machine that compute."""

    def __init__(self, slowdown: Sequence[float]) -> None:
        """slowdown: the n-th is the factor while n nodes compute."""
        self._slowdown = slowdown
        self._attained = self._now = (
            0.0  # service of a node that always computes, and the time of its last update
        )
        self._ends: list[tuple[float, int]] = []  # heap: attained service at which a node's work is done
        self.due = inf  # time of the next completion if no node begins

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
