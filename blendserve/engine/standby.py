"""Requests go first: how long the work that nobody waits for stands back while any is in flight.

That is the work of jobs and what is written back to the store: documents cut, tokenised and embedded on the retrieval
thread, chunks computed on the model's. Such work comes in small units, a layer or a passage. While a request is planned,
waits, is prefilled or decodes, each unit is followed by a rest in which requests have the cores, of such a length that
the work keeps its share of the time: it ends under any load. A rest ends with the last request.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.1  # of the time, while requests are in flight
CREDIT = 0.5  # seconds of rest: what was longer, as one long request, is not made up for by more work at once
LOOK = 0.01  # seconds after which who rests looks again whether a request is in flight


class Standby:
    """The rests of one thread's work."""

    def __init__(self, share: float = SHARE, clock: Callable[[], float] = time.perf_counter) -> None:
        """share: of the time, that the work keeps at least while requests are in flight."""
        self._times, self._clock = 1 / share - 1, clock
        self._since = clock()
        self.rest = 0.0  # seconds for which the work is to stand back yet

    def begin(self) -> None:
        """A unit begins."""
        self._since = self._clock()

    def worked(self, in_flight: bool) -> None:
        """A unit has ended: what it took is to be rested for, unless nobody was in its way."""
        took = self._lap()
        self.rest = self.rest + self._times * took if in_flight else 0.0

    def rested(self) -> None:
        """Some of the rest is over."""
        self.rest = max(-CREDIT, self.rest - self._lap())

    def _lap(self) -> float:
        before, self._since = self._since, self._clock()
        return self._since - before
