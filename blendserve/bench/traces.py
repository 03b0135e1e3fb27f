"""Links whose rate changes: what each lets through when, from the beginning of a request on."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from blendserve.bench.link import Weather
from blendserve.bench.link_process import LinkProcess

DEAD = 0.0
GBIT = 1e9 / 8
STEPS = 200  # of a trace that repeats nothing


@dataclass(frozen=True, slots=True)
class Trace:
    """Rates in bytes a second, each for so long; the last one stays."""

    name: str
    steps: tuple[tuple[float, float], ...]  # (seconds, rate)

    @property
    def changes(self) -> bool:
        return len(self.steps) > 1

    @property
    def beginning(self) -> Trace:
        """As it begins, and no change."""
        return Trace(self.name, self.steps[:1])

    def rate(self, seconds: float) -> float:
        """At this time."""
        for end, (_, rate) in zip(accumulate(s for s, _ in self.steps), self.steps, strict=True):
            if seconds < end:
                return rate
        return self.steps[-1][1]


def constant(gbit: float) -> Trace:
    return Trace(f"{gbit:g} Gbit/s", ((1.0, gbit * GBIT),))


def changing(seed: int) -> Mapping[str, Trace]:
    """By name."""
    dice = random.Random(seed)
    teeth = [(0.02, (3.0 - 0.29 * (n % 11)) * GBIT) for n in range(STEPS)]
    walk, at = [], 0.3
    for _ in range(STEPS):
        at = min(1.5, max(0.02, at * dice.lognormvariate(0.0, 0.5)))
        walk.append((0.05, at * GBIT))
    return {
        trace.name: trace
        for trace in (
            Trace("down", ((0.05, 3 * GBIT), (1.0, 0.1 * GBIT))),
            Trace("up", ((0.1, 0.1 * GBIT), (1.0, 3 * GBIT))),
            Trace("sawtooth", tuple(teeth)),
            Trace("mobile", tuple(walk)),
            Trace("dead", ((0.02, 1 * GBIT), (1.0, DEAD))),
        )
    }


@contextmanager
def played(trace: Trace, link: LinkProcess, round_trip_s: float) -> Iterator[None]:
    """The link is so, meanwhile; afterwards it is perfect."""
    over = threading.Event()

    def set_to(rate: float) -> None:
        link.set_to(Weather(bytes_per_s=rate, delay_s=round_trip_s / 2, dead=rate == DEAD))

    def play() -> None:
        start = time.monotonic()
        for end, (_, rate) in zip(accumulate(s for s, _ in trace.steps), trace.steps, strict=True):
            set_to(rate)
            if over.wait(max(0.0, start + end - time.monotonic())):
                return

    set_to(trace.steps[0][1])
    player = threading.Thread(target=play, daemon=True)
    player.start()
    try:
        yield
    finally:
        over.set()
        player.join()
        link.set_to(Weather())
