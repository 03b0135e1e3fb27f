"""`python -m benchmarks auto`: is method `auto` ever much slower than the best fixed method?

A grid of chunk counts, chunk lengths and hit rates. Every point prefills one prompt by full, prefix, blend and auto.
`excess` is auto's time over the best fixed method's, less one. `slip` is the same of the method that auto chose, run as
a fixed one: where only `excess` is large, it was noise. Full reuse is left out: always fastest, and wrong.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from functools import partial
from itertools import product

from pydantic import Field

from blendserve.bench.fixture import make_blender, time_prompt
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, ms, ratio, table
from blendserve.bench.runner import Bench, BenchConfig, open_model
from blendserve.bench.workload import Workload, make_workload
from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig, Method, Positive, Ratio
from blendserve.errors import InputError
from blendserve.store import MemoryStore

METHODS: tuple[Method, ...] = ("full", "prefix", "blend", "auto")
SUFFIX = 40  # tokens


class AutoConfig(BenchConfig):
    """Method auto against every fixed one."""

    chunks: tuple[Positive, ...] = Field((1, 2, 4, 8, 12), description="Numbers of chunks.")
    chunk_tokens: tuple[Positive, ...] = Field(
        (32, 128, 512, 1024), description="Lengths of a chunk, in tokens."
    )
    hit_rates: tuple[Ratio, ...] = Field((0.0, 0.5, 1.0), description="Fractions of cached chunks.")


def groups(config: AutoConfig, log: SampleLog) -> Iterator[Group]:
    model, rng = open_model(config, log), random.Random(config.seed)
    for n, size, hits in product(config.chunks, config.chunk_tokens, config.hit_rates):
        try:
            workload = make_workload(model, n, size, SUFFIX, config.seed)
        except InputError:  # longer than the model's context
            continue
        blender = make_blender(model, workload.prompts, MemoryStore(2**34))
        blender.writer.precompute(rng.sample(workload.chunks, round(hits * n)))
        seconds: dict[str, list[float]] = {method: [] for method in METHODS}
        chosen: list[str] = []
        run = partial(_run, blender, workload, seconds, chosen)
        cases = [Case({"method": method}, partial(run, method)) for method in METHODS]
        labels = {"chunks": n, "chunk_tokens": size, "hit_rate": hits}
        yield Group(labels, cases, partial(verdict, seconds, chosen))


def _run(
    blender: Blender, workload: Workload, seconds: dict[str, list[float]], chosen: list[str], method: Method
) -> Metrics:
    metrics, done = time_prompt(blender, workload, BlendConfig(method=method, ratio=0.05))
    seconds[method].append(metrics["prefill_s"])
    if method == "auto":
        chosen.append(done.report.method)
    return {"prefill_s": metrics["prefill_s"]}


def verdict(seconds: dict[str, list[float]], chosen: list[str]) -> dict[str, float | str]:
    """Of one point: the best fixed method by its median, what auto chose at last, excess and slip."""
    rounds = {method: times[1:] for method, times in seconds.items()}  # without the warm-up
    medians = {method: statistics.median(times) for method, times in rounds.items()}
    best = min(METHODS[:3], key=medians.__getitem__)
    pairs = zip(rounds["auto"], rounds[best], strict=True)
    excess = statistics.median(a / b for a, b in pairs) - 1
    slip = medians[chosen[-1]] / medians[best] - 1
    return {"best": best, "chosen": chosen[-1], "excess": excess, "slip": slip, "miss": min(excess, slip)}


TABLE = table("Prefill", ms("ms", "prefill_s"), ratio("/ blend", "prefill_s", method="blend"))
TINY = {"chunks": (1, 3), "chunk_tokens": (20, 200), "hit_rates": (0.0, 1.0)}
BENCH = Bench(AutoConfig, groups, (TABLE,), tiny=TINY)
