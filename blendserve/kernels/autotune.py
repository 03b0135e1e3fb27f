"""Which backend serves a class of shapes on this CPU: times of each, and the choice by them.

A thread that waits for a core takes milliseconds, so times on a busy machine say nothing about a kernel. A run counts
only if no thread of this process waited for a core, which Linux reports. If too few runs count within BUDGET_S,
nothing is chosen and the order of the table holds.

Times are kept in the user's cache, so that a machine computes the same bits in every process. There is a file for each
CPU with its cap, number of threads, torch version and kernels: operation -> class of shapes -> backend -> seconds of each
sample.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from blendserve import cpu_cap
from blendserve.kernels import team
from blendserve.kernels.cpu import isa
from blendserve.paths import cache_folder

TIE = 1.05  # of a time: what is closer counts as equal
RUNS, BUDGET_S = 4, 0.5  # runs of each that count, and the time after which they must be complete
MAX_WAIT_SHARE = 0.05  # of a run: its threads may have waited for a core for so long
LOCK_S = 2  # for another process that writes the file
NOT_TUNED = "not measured: the machine was busy"
TASKS = Path("/proc/self/task")
SOURCES = Path(__file__).parent

busy = threading.Event()  # measuring failed once: this process does not try again

Times = dict[str, list[float]]  # seconds of a call by backend, one for each sample
Calls = Sequence[Sequence[tuple[Any, ...]]]  # the samples: arguments of a few calls each


def choose(times: Times, native: Sequence[str]) -> str:
    """The backend that serves. Native backends come first in the table's order, then torch's.

    Of torch's, the fastest over all samples is a candidate. A native one is a candidate if it is at most TIE times slower
    than that on every sample. The first candidate whose total is at most TIE times the least serves.
    """
    total = {name: sum(found) for name, found in times.items()}
    torchs = [name for name in times if name not in native]
    fastest = min(torchs, key=total.__getitem__, default=None)
    bounds = [inf] * len(next(iter(times.values()))) if fastest is None else [TIE * t for t in times[fastest]]
    candidates = [
        name
        for name in times
        if name == fastest
        or (name in native and all(t <= bound for t, bound in zip(times[name], bounds, strict=True)))
    ]
    least = min(total[name] for name in candidates)
    return next(name for name in candidates if total[name] <= TIE * least)


def times(
    operation: str, shapes: str, runs: Mapping[str, Callable[..., object]], calls: Calls
) -> Times | None:
    """Of all these backends, from the cache or measured and kept; None where the machine is too busy."""
    found = load(operation, shapes, list(runs))
    if found is not None or busy.is_set():
        return found
    found = measure(runs, calls)
    if found is None:
        busy.set()
        return None
    return save(operation, shapes, found)


def measure(runs: Mapping[str, Callable[..., object]], calls: Calls) -> Times | None:
    """The least time of each backend and sample over interleaved runs; None where too few of them count."""
    found: dict[str, list[list[float]]] = {name: [[] for _ in calls] for name in runs}
    start = time.perf_counter()
    with team.at_most(None):  # all threads, as torch's own backends have them
        while min(len(sample) for samples in found.values() for sample in samples) < RUNS:
            if time.perf_counter() - start > BUDGET_S:
                return None
            for name, run in runs.items():
                for sample, sums in zip(calls, found[name], strict=True):
                    if len(sums) < RUNS:
                        sums.extend(timed(run, sample))
    return {name: [min(sample) for sample in samples] for name, samples in found.items()}


def timed(run: Callable[..., object], sample: Sequence[tuple[Any, ...]]) -> list[float]:
    """Seconds of a call; none where a thread waited for a core."""
    waited, start = run_queue_wait_seconds(), time.perf_counter()
    for args in sample:
        run(*args)
    seconds = time.perf_counter() - start
    counts = run_queue_wait_seconds() - waited <= MAX_WAIT_SHARE * seconds
    return [seconds / len(sample)] if counts else []


def run_queue_wait_seconds() -> float:
    """Seconds that all threads of this process have waited for a core so far; 0 on systems that do not report it."""
    total = 0
    with suppress(OSError):
        for task in os.scandir(TASKS):
            with suppress(OSError, ValueError, IndexError), open(f"{task.path}/schedstat", "rb") as file:
                total += int(file.read().split()[1])  # a thread that has just ended has none
    return 1e-9 * total


# The cache


def machine() -> str:
    """A digest of all that a time on this CPU depends on, but for other work."""
    return _machine(torch.get_num_threads(), isa.allowed())


@cache
def _machine(threads: int, sets: tuple[str, ...]) -> str:
    libraries = torch.backends.cpu.get_cpu_capability(), *map(os.environ.get, cpu_cap.LIBRARIES)
    about = repr((isa.cpu_name(), sets, libraries, threads, torch.__version__))
    folders = SOURCES, SOURCES / "cpu"
    files = sorted(file for folder in folders for file in folder.iterdir() if file.is_file())
    parts = (about.encode(), *(file.read_bytes() for file in files))
    return hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def cache_file() -> Path:
    """The file of this machine."""
    return cache_folder() / "kernels" / f"{machine()}.json"


def load(operation: str, shapes: str, backends: Sequence[str]) -> Times | None:
    """Kept times of all these backends, in their order; None if one is missing or is no time."""
    of_operation = _read(cache_file()).get(operation)
    kept = of_operation.get(shapes) if isinstance(of_operation, dict) else None
    if not isinstance(kept, dict) or not all(_are_times(kept.get(name)) for name in backends):
        return None
    found = {name: kept[name] for name in backends}
    return found if len(set(map(len, found.values()))) == 1 else None


def save(operation: str, shapes: str, found: Times) -> Times:
    """Keep these times, or return those that another process has kept meanwhile. Ignores a cache that it cannot write."""
    file = cache_file()
    with suppress(OSError, Timeout):
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock"), timeout=LOCK_S):
            if (kept := load(operation, shapes, list(found))) is not None:
                return kept
            table = _read(file)
            of_operation = table.get(operation)
            table[operation] = {**(of_operation if isinstance(of_operation, dict) else {}), shapes: found}
            made = file.with_suffix(f".{os.getpid()}")
            made.write_text(json.dumps(table, indent=1))
            made.replace(file)
    return found


def _read(file: Path) -> dict[str, Any]:
    """Empty for a file that is missing or damaged."""
    try:
        table = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def _are_times(found: object) -> bool:
    return (
        isinstance(found, list)
        and len(found) > 0
        and all(isinstance(t, float) and isfinite(t) and t > 0 for t in found)
    )
