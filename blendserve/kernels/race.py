"""Who serves a class of shapes on this machine: the rule, and the times that it asks for.

A class is one or a few samples, each a piece of work that every backend does. Backends are ours, which are compiled, or
torch's own; they come in their table's order, ours first. All samples of a class are settled together, as the compiled
kernels give a row the same bits whatever comes with it: that holds for all shapes that one backend serves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

SWITCH = "BLENDSERVE_RACE"  # "0" in the environment: nothing is measured, the table's order holds

MARGIN = 1.05  # of a time: what is closer than this counts as equal
ROUNDS = 20  # at most; the least time of them counts, as what else runs on the machine only ever adds
ENOUGH = 0.01  # seconds for all backends together, after which fewer rounds do
PATIENCE = 0.1  # seconds where torch's own leads, as one who was held up may have lost for that
HOPELESS = 3.0  # times the least: not tried a third time

Times = dict[str, list[float]]  # seconds by backend, one for each sample
Runs = dict[str, Sequence[Callable[[], object]]]  # the samples' work by every backend


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
    bounds = [MARGIN * min((times[name][n] for name in torchs), default=inf) for n in range(_samples(times))]
    able = [name for name in times if name in ours and _within(times[name], bounds)]
    if torchs:
        able.append(min(torchs, key=lambda name: sum(times[name])))
    able = [name for name in times if name in able]
    least = min(sum(times[name]) for name in able)
    winner = next(name for name in able if sum(times[name]) <= MARGIN * least)
    barred = "slower than torch's own"
    return Verdict(winner, {name: "slower" if name in able else barred for name in times if name != winner})


def measure(runs: Runs, ours: Sequence[str]) -> Times:
    """Everybody's least time for each sample, taken in turns."""
    times: Times = {name: [inf] * len(works) for name, works in runs.items()}
    began = time.perf_counter()
    for turn in range(ROUNDS):
        for name in runs if turn % 2 else reversed(runs):
            if turn < 2 or sum(times[name]) <= HOPELESS * min(map(sum, times.values())):
                _once(runs[name], times[name])
        spent = time.perf_counter() - began
        if turn and spent > (ENOUGH if not ours or settle(times, ours).winner in ours else PATIENCE):
            break
    return times


def _once(works: Sequence[Callable[[], object]], least: list[float]) -> None:
    for n, work in enumerate(works):
        start = time.perf_counter()
        work()
        least[n] = min(least[n], time.perf_counter() - start)


def _samples(times: Times) -> int:
    return len(next(iter(times.values())))


def _within(seconds: Sequence[float], bounds: Sequence[float]) -> bool:
    return all(took <= bound for took, bound in zip(seconds, bounds, strict=True))
