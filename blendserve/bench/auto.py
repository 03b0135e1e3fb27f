"""`blendserve bench auto`: is `method="auto"` ever much slower than the best fixed method?

A grid of chunk counts, chunk sizes and hit rates. Every cell prefills one prompt of random tokens by full, prefix, blend
and auto, interleaved; medians are compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from blendserve.bench.config import AutoBenchConfig
from blendserve.bench.figures import Figures, Update
from blendserve.bench.machine import where
from blendserve.bench.tables import Table
from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig, Method
from blendserve.core import Chunk, Prompt, TokenIds
from blendserve.models.loader import Reader, load_reader
from blendserve.store import MemoryStore

Say = Callable[[str], None]
COUNTS, SIZES, HITS = (1, 2, 4, 8, 12), (32, 128, 512, 1024), (0.0, 0.5, 1.0)
PREFIX, SUFFIX = 32, 40
DOUBT, MOST_ROUNDS = 0.05, 11
METHODS: tuple[Method, ...] = ("full", "prefix", "blend", "auto")


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid: seconds of each method, and what auto chose."""

    chunks: int
    size: int
    hits: float
    seconds: dict[str, list[float]]
    chosen: str

    def median(self, method: str) -> float:
        return statistics.median(self.seconds[method])

    @property
    def best(self) -> str:
        return min(METHODS[:3], key=self.median)

    @property
    def excess(self) -> float:
        """How much slower auto is than the best fixed method: median over rounds of auto / best, minus 1."""
        pairs = zip(self.seconds["auto"], self.seconds[self.best], strict=True)
        return statistics.median(a / b for a, b in pairs) - 1

    @property
    def slip(self) -> float:
        """How much slower the method that auto chose is than the best one, when both are run as fixed methods."""
        return self.median(self.chosen) / self.median(self.best) - 1

    def to_dict(self) -> Figures:
        """Medians, and what follows from all rounds."""
        medians = {method: self.median(method) for method in METHODS}
        about = {"chunks": self.chunks, "size": self.size, "hits": self.hits, "seconds": medians}
        return {**about, "best": self.best, "chosen": self.chosen, "excess": self.excess, "slip": self.slip}


def measure(
    config: AutoBenchConfig, say: Say = lambda text: None, update: Update = lambda done, total: None
) -> Figures:
    """Everything that the bench prints. Raises ModelError."""
    reader = load_reader(config.reader, say)
    rng = np.random.default_rng(config.seed)
    fits = [
        (n, size, hits)
        for n in COUNTS
        for size in SIZES
        for hits in HITS
        if PREFIX + n * size + SUFFIX <= reader.adapter.context_limit
    ]
    measure_cell(reader, rng, 2, 128, 1.0, 1)  # warms up, and measures the machine if need be
    cells: list[Cell] = []
    for n, size, hits in fits:
        cells.append(measure_cell(reader, rng, n, size, hits, config.repeats))
        update(len(cells), len(fits))
    failed = [c for c in cells if c.excess > config.tolerance and c.slip > config.tolerance]
    return {
        "bench": "auto",
        **where(config, reader),
        "worst_excess": round(max(c.excess for c in cells), 4),
        "worst_slip": round(max(c.slip for c in cells), 4),
        "median_excess": round(statistics.median(c.excess for c in cells), 4),
        "failed": [(c.chunks, c.size, c.hits) for c in failed],
        "cells": [c.to_dict() for c in cells],
    }


def tables(figures: Figures) -> list[Table]:
    """A row a cell, in milliseconds."""
    columns = ("", "found", *METHODS, "best fixed", "auto chose", "auto / best")
    rows = []
    for c in figures["cells"]:
        times = [f"{c['seconds'][m] * 1e3:.0f}" for m in METHODS]
        name, found = f"{c['chunks']} x {c['size']}", f"{c['hits']:.0%}"
        rows.append((name, found, *times, c["best"], c["chosen"], f"{c['excess']:+.1%}"))
    return [("Prefill, median ms", columns, rows)]


def measure_cell(
    reader: Reader, rng: np.random.Generator, n: int, size: int, hits: float, repeats: int
) -> Cell:
    prompt = Prompt(
        _ids(reader, rng, PREFIX),
        tuple(Chunk(_ids(reader, rng, size)) for _ in range(n)),
        _ids(reader, rng, SUFFIX),
    )
    blender = Blender(reader.adapter, reader.fingerprint, MemoryStore(2**34), prompt.prefix, prompt.prefix)
    found = rng.permutation(n)[: round(hits * n)]
    blender.precompute([prompt.chunks[i].ids for i in sorted(found)])
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    chosen = ""
    rounds = repeats
    while True:
        for _ in range(rounds):
            for method in METHODS:
                start = time.perf_counter()
                chosen = blender.run(prompt, BlendConfig(method=method)).report.method
                seconds[method].append(time.perf_counter() - start)
        cell = Cell(n, size, hits, seconds, chosen)
        if cell.excess < DOUBT or len(seconds["auto"]) >= MOST_ROUNDS:
            return cell
        rounds = 2  # a cell in doubt is measured longer, whichever way it turns out; all its rounds count


def _ids(reader: Reader, rng: np.random.Generator, n: int) -> TokenIds:
    return tuple(rng.integers(3, min(40_000, reader.adapter.vocab_size), size=n).tolist())
