"""Which backend is the fastest on this CPU: measured once for each operation, dtype and kind of rows.

One backend serves a kind of rows, whatever the model's sizes, and native backends give a row the same bits whatever the
other rows. So a kind decides which results are equal to the bit. Contiguous rows are one kind: a prompt's first chunk has
the same KV, computed alone or as a part of the prompt. Up to FEW rows of a linear layer are one, the steps of one answer
and of several; larger numbers are another.

A thread that waits for a core takes milliseconds, so a run counts only if no thread of this process waited for one, which
Linux reports. A process measures for BUDGET_S at most. What was not measured by then is not measured again, and the order
of the table holds.

Times are kept in the user's cache, so that a machine computes the same bits in every process. There is a file for each
CPU with its cap, number of threads, torch version and kernels: kind -> backend -> seconds of each sample.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blendserve import cpu_cap
from blendserve.kernels import cases, team
from blendserve.kernels.cases import Draw
from blendserve.kernels.cpu import isa
from blendserve.kernels.cpu.bindings import FEW
from blendserve.kernels.rows import AttentionPlan
from blendserve.kernels.types import AttentionSpec
from blendserve.paths import cached_path, read_cached, write_cached
from blendserve.provenance import code_digest, cpu_name

TIE = 1.05  # of a time: what is closer counts as equal
RUNS = 4  # of each backend and sample that must count
BUDGET_S = 2.0  # for all measurements of a process
MAX_WAIT_SHARE = 0.05  # of a run: its threads may have waited for a core for so long
NOT_TUNED = "not measured: the machine was busy or slow"
TASKS = Path("/proc/self/task")

Times = dict[str, list[float]]  # seconds of a call by backend, one for each sample
Calls = Sequence[Sequence[tuple[Any, ...]]]  # the samples: arguments of a few calls each


@dataclass(frozen=True, slots=True)
class TuningResult:
    """The measurement of a backend for a kind of rows."""

    operation: str
    shapes: str
    backend: str
    milliseconds: tuple[float, ...]  # of a call of each sample; empty: not measured
    note: str  # "serves", or why it does not

    def cells(self) -> tuple[str, ...]:
        """Backend, time and note, for a table."""
        return self.backend, " | ".join(f"{ms:.3g}" for ms in self.milliseconds), self.note


FOUND: dict[str, list[TuningResult]] = {}  # by kind of rows, of this process
SPENT_S: dict[str, float] = {}


def results() -> list[TuningResult]:
    """Return times, and why backends do not serve, of all kinds of rows that this process has met on the CPU."""
    return [result for found in list(FOUND.values()) for result in found]


# Kinds of rows, and the calls that are measured for each


def attention_rows(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> str:
    if q.device.type != "cpu":
        return ""
    return "one row" if q.shape[1] == 1 else "contiguous rows" if plan.is_contiguous else "scattered rows"


def scored_rows(q: Tensor, *_: object) -> str:
    return "scored rows" if q.device.type == "cpu" else ""


def linear_rows(x: Tensor, *_: object) -> str:
    """Name the kind of rows, of bf16 alone: other dtypes have no native backend."""
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.device.type != "cpu":
        return ""
    return "few rows" if x.shape[0] <= FEW else "many rows"


def _attention(*rows: Sequence[int], **options: Any) -> Callable[[Draw], Calls]:
    """9 heads of 64 over 3, behind 512 keys."""
    return lambda draw: [[cases.attention(draw, at, n_kv=3, group=3, **options)] for at in rows]


def _linear(n_layers: int, *rows: int) -> Callable[[Draw], Calls]:
    """576 to 1,536. Times do not depend on values."""

    def calls(draw: Draw) -> Calls:
        weights = torch.full((n_layers, 1536, 576), 0.5, dtype=draw.dtype)
        return [[(torch.ones(n, 576, dtype=draw.dtype), weight, None) for weight in weights] for n in rows]

    return calls


SAMPLES: dict[str, Callable[[Draw], Calls]] = {
    "one row": _attention([511]),
    "contiguous rows": _attention(range(480, 512), range(256)),
    "scattered rows": _attention(range(130, 512, 3)),
    "scored rows": _attention(range(480, 512), absent=1 / 3),
    "few rows": _linear(10, 1, 4),  # 17 MB of weights: more than a core's cache, as in a model
    "many rows": _linear(1, 32, 256),
}


# The choice


@torch.inference_mode()
def fastest_first(operation: str, rows: str, dtype: torch.dtype, backends: Sequence[Any]) -> list[Any]:
    """The backends in the order of use for a kind of rows."""
    shapes = f"{str(dtype).removeprefix('torch.')}, {rows}"
    kind = f"{operation}, {shapes}"
    calls = SAMPLES[rows](Draw(dtype, fill=0.0))
    candidates = [b for b in backends if b.supports(*calls[0][0])]
    notes = {b.name: b.unavailable_reason(*calls[0][0]) for b in candidates}
    runs = {b.name: b.run for b in candidates if not notes[b.name]}
    times = _times(kind, runs, calls) if len(runs) > 1 else None
    first = choose(times) if times else next(iter(runs))
    notes |= dict.fromkeys(runs, "slower" if times else NOT_TUNED) | {first: "serves"}
    FOUND[kind] = [
        TuningResult(operation, shapes, name, tuple(1e3 * t for t in (times or {}).get(name, ())), note)
        for name, note in notes.items()
    ]
    return sorted(backends, key=lambda b: b.name != first)


def choose(times: Times) -> str:
    """The first backend whose worst sample, relative to the best time of that sample, is at most TIE times the least."""
    best = [min(sample) for sample in zip(*times.values(), strict=True)]
    worst = {name: max(t / b for t, b in zip(found, best, strict=True)) for name, found in times.items()}
    return next(name for name in worst if worst[name] <= TIE * min(worst.values()))


def _times(kind: str, runs: Mapping[str, Callable[..., object]], calls: Calls) -> Times | None:
    """Times of all these backends, from the cache or measured and kept; None where the machine is too busy or slow."""
    found = load(kind, list(runs))
    left_s = BUDGET_S - sum(SPENT_S.values())
    start = time.perf_counter()
    if found is None and left_s > 0:
        found = measure(runs, calls, left_s)
        if found:
            save(kind, found)
        SPENT_S[kind] = time.perf_counter() - start if found else left_s
    return found


def measure(
    runs: Mapping[str, Callable[..., object]], calls: Calls, budget_s: float = BUDGET_S
) -> Times | None:
    """The least time of each backend and sample over interleaved runs; None where too few of them count in time."""
    found: dict[str, list[list[float]]] = {name: [[] for _ in calls] for name in runs}
    start = time.perf_counter()
    with team.at_most(None):  # all threads, as torch's own backends have them
        while min(len(sample) for samples in found.values() for sample in samples) < RUNS:
            for name, run in runs.items():
                for sample, sums in zip(calls, found[name], strict=True):
                    if time.perf_counter() - start > budget_s:
                        return None
                    if len(sums) < RUNS:
                        sums.extend(timed(run, sample))
    return {name: [min(sample) for sample in samples] for name, samples in found.items()}


def timed(run: Callable[..., object], sample: Sequence[tuple[Any, ...]]) -> list[float]:
    """Seconds of a call; none where a thread waited for a core."""
    waited = run_queue_wait_seconds()
    start = time.perf_counter()
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
    about = repr((cpu_name(), sets, libraries, threads, torch.__version__, code_digest("kernels")))
    return hashlib.blake2b(about.encode(), digest_size=12).hexdigest()


def cache_file() -> Path:
    """The file of this machine."""
    return cached_path("kernels", f"{machine()}.json")


def _kept() -> dict[str, Any]:
    """What the file holds; nothing of a file that is missing or damaged."""
    try:
        return dict(json.loads(read_cached(cache_file())))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def load(kind: str, backends: Sequence[str]) -> Times | None:
    """Kept times of all these backends, in their order; None if one is missing or is no time."""
    try:
        kept = _kept()[kind]
        found = {name: [float(t) for t in kept[name]] for name in backends}
    except (ValueError, LookupError, TypeError):
        return None
    n_samples = set(map(len, found.values()))
    are_times = all(0 < t < inf for times in found.values() for t in times)
    return found if are_times and len(n_samples) == 1 and n_samples != {0} else None


def save(kind: str, found: Times) -> None:
    """Keep these times."""
    write_cached(cache_file(), json.dumps({**_kept(), kind: found}, indent=1))
