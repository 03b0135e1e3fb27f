"""Who serves a class of shapes on this machine: the rule, and the times that it asks for.

A class is one or a few samples, each a piece of work that every backend does. Backends are ours, which are compiled, or
torch's own; they come in their table's order, ours first. All samples of a class are settled together, as the compiled
kernels give a row the same bits whatever comes with it: that holds for all shapes that one backend serves.

Beside other work the fastest looks like any other: a thread that waits for a core of its own takes milliseconds, whatever
it does. So a time counts only where none of this process's threads had to wait, which Linux tells; where that does not
come about soon, nothing is settled and the table's order serves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

SWITCH = "BLENDSERVE_RACE"  # "0" in the environment: nothing is measured, the table's order holds

MARGIN = 1.05  # of a time: what is closer than this counts as equal
ENOUGH, MORE = 4, 12  # times of each that count; more of them where torch's own leads
LEAST = 2  # with which a race that has lasted PATIENCE is settled
HOPELESS = 3.0  # times the least after LEAST tries: no further ones
PATIENCE, ROUNDS = 0.5, 200  # seconds and turns, after which it ends in any case
WAITED = 0.05  # of a time: its threads may have waited for cores for so long

TASKS = Path("/proc/self/task")

Times = dict[str, list[float]]  # seconds by backend, one for each sample
Work = Callable[[], object]
Runs = dict[str, Sequence[Work]]  # the samples' work by every backend


class Verdict(NamedTuple):
    """The backend that serves, and why not the others."""

    winner: str
    reasons: dict[str, str]


def is_on() -> bool:
    return os.environ.get(SWITCH) != "0"


def settle(times: Times, ours: Sequence[str]) -> Verdict:
    """The rule. Of torch's own, the fastest over all samples may serve; of ours, whoever is on no sample slower than
    MARGIN times the fastest of torch's own on that one. The first of these in the table's order that takes at most
    MARGIN times what the fastest of them takes over all samples does.
    """
    torchs = [name for name in times if name not in ours]
    n_samples = len(next(iter(times.values())))
    bounds = [MARGIN * min((times[name][n] for name in torchs), default=inf) for n in range(n_samples)]
    fastest = min(torchs, key=lambda name: sum(times[name]), default=None)
    able = [
        name
        for name in times
        if (name in ours and all(took <= bound for took, bound in zip(times[name], bounds, strict=True)))
        or name == fastest
    ]
    least = min(sum(times[name]) for name in able)
    winner = next(name for name in able if sum(times[name]) <= MARGIN * least)
    return Verdict(winner, {name: _reason(name, able, ours) for name in times if name != winner})


def _reason(loser: str, able: Sequence[str], ours: Sequence[str]) -> str:
    return "slower than torch's own" if loser in ours and loser not in able else "slower"


def measure(runs: Runs, ours: Sequence[str]) -> Times | None:
    """Everybody's least time for each sample, taken in turns; None where the machine was too busy to tell."""
    race = _Race(runs)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        race.turn()
        enough = race.times(ENOUGH)
        if enough and (race.times(MORE) or not ours or settle(enough, ours).winner in ours):
            return enough
        if time.perf_counter() - began > PATIENCE:
            break
    return race.times(LEAST)


class _Race:
    """The times so far that count."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._found: dict[str, list[list[float]]] = {
            name: [[] for _ in works] for name, works in runs.items()
        }

    def turn(self) -> None:
        """Everybody once, but for those who have lost."""
        for name, works in self._runs.items():
            if not self._is_hopeless(name):
                for work, found in zip(works, self._found[name], strict=True):
                    found.extend(timed(work))

    def times(self, needed: int) -> Times | None:
        """The least, if each has been timed so often, or has lost."""
        if not all(self._count(name) >= needed or self._is_hopeless(name) for name in self._runs):
            return None
        return {name: [min(found) for found in samples] for name, samples in self._found.items()}

    def _count(self, name: str) -> int:
        return min(map(len, self._found[name]))

    def _is_hopeless(self, name: str) -> bool:
        sums = {other: self._sum(other) for other in self._runs if self._count(other) >= LEAST}
        return name in sums and sums[name] > HOPELESS * min(sums.values())

    def _sum(self, name: str) -> float:
        return sum(map(min, self._found[name]))


def timed(work: Work) -> list[float]:
    """The seconds that it takes; nothing where it had to wait for a core."""
    before = waited()
    start = time.perf_counter()
    work()
    took = time.perf_counter() - start
    return [took] if waited() - before <= WAITED * took else []


def waited() -> float:
    """Seconds for which this process's threads together have stood in line for a core; 0 where nobody tells."""
    total = 0
    try:
        for task in os.scandir(TASKS):
            try:
                with open(f"{task.path}/schedstat", "rb") as file:
                    total += int(file.read().split()[1])
            except (OSError, ValueError, IndexError):  # a thread that has just ended
                continue
    except OSError:
        return 0.0
    return 1e-9 * total
