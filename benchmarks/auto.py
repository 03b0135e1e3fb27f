"""`python -m benchmarks auto`: is method `auto` ever much slower than the best fixed method?

A grid of chunk counts, chunk lengths and hit rates. Every point prefills one prompt of random tokens by full, prefix,
blend and auto. `excess` is auto's time over the best fixed method's, less one. `slip` is the same of the method that auto
chose, run as a fixed one: where only `excess` is large, it was noise. Full reuse is left out: always fastest, and wrong.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
from pydantic import Field

from blendserve.bench.harness import Case, Group, Metrics, SampleLog, ms, ratio, table
from blendserve.bench.runner import Bench, BenchConfig, open_reader
from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig, Method, Positive, Ratio
from blendserve.core import Chunk, Prompt, TokenIds
from blendserve.models.loader import LoadedModel
from blendserve.store import MemoryStore
from blendserve.timing import Clock

METHODS: tuple[Method, ...] = ("full", "prefix", "blend", "auto")
PREFIX, SUFFIX = 32, 40  # tokens


class AutoConfig(BenchConfig):
    """Method auto against every fixed one."""

    chunks: tuple[Positive, ...] = Field((1, 2, 4, 8, 12), description="Numbers of chunks.")
    chunk_tokens: tuple[Positive, ...] = Field(
        (32, 128, 512, 1024), description="Lengths of a chunk, in tokens."
    )
    hit_rates: tuple[Ratio, ...] = Field((0.0, 0.5, 1.0), description="Fractions of cached chunks.")


def groups(config: AutoConfig, log: SampleLog) -> Iterator[Group]:
    reader = open_reader(config, log)
    rng = np.random.default_rng(config.seed)
    for n, size, hits in product(config.chunks, config.chunk_tokens, config.hit_rates):
        labels = {"chunks": n, "chunk_tokens": size, "hit_rate": hits}
        if PREFIX + n * size + SUFFIX <= reader.adapter.context_limit and not log.done(labels):
            yield _point(reader, rng, labels, n, size, hits)


def _point(
    reader: LoadedModel, rng: np.random.Generator, labels: dict[str, float], n: int, size: int, hits: float
) -> Group:
    chunks = tuple(Chunk(_ids(reader, rng, size)) for _ in range(n))
    prompt = Prompt(_ids(reader, rng, PREFIX), chunks, _ids(reader, rng, SUFFIX))
    blender = Blender(reader.adapter, reader.fingerprint, MemoryStore(2**34), prompt.prefix, prompt.prefix)
    stored = sorted(rng.permutation(n)[: round(hits * n)])
    blender.writer.precompute([prompt.chunks[i].ids for i in stored])
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    chosen: list[str] = []

    def run(method: Method) -> Metrics:
        clock = Clock(reader.adapter.device)
        report = blender.run(prompt, BlendConfig(method=method)).report
        elapsed = clock.elapsed()
        seconds[method].append(elapsed)
        if method == "auto":
            chosen.append(report.method)
        return {"prefill_s": elapsed}

    def facts() -> dict[str, float | str]:
        rounds = {method: times[1:] for method, times in seconds.items()}  # without the warm-up
        return verdict(rounds, chosen[-1])

    return Group(labels, [Case({"method": method}, partial(run, method)) for method in METHODS], facts)


def verdict(rounds: dict[str, list[float]], chosen: str) -> dict[str, float | str]:
    """Of one point: the best fixed method by its median, what auto chose, excess and slip."""
    medians = {method: statistics.median(times) for method, times in rounds.items()}
    best = min(METHODS[:3], key=medians.__getitem__)
    pairs = zip(rounds["auto"], rounds[best], strict=True)
    excess = statistics.median(a / b for a, b in pairs) - 1
    slip = medians[chosen] / medians[best] - 1
    return {"best": best, "chosen": chosen, "excess": excess, "slip": slip, "miss": min(excess, slip)}


def _ids(reader: LoadedModel, rng: np.random.Generator, n: int) -> TokenIds:
    return tuple(rng.integers(3, min(40_000, reader.adapter.vocab_size), size=n).tolist())


TABLE = table("Prefill", ms("ms", "prefill_s"), ratio("/ blend", "prefill_s", method="blend"))
TINY = {"chunks": (1, 3), "chunk_tokens": (20, 200), "hit_rates": (0.0, 1.0)}
BENCH = Bench(AutoConfig, groups, (TABLE,), tiny=TINY)
