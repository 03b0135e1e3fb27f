"""Is `method="auto"` ever much slower than the best fixed method? A grid of chunk counts, chunk sizes and hit rates.

    python scripts/bench_profit.py [--model smollm2-135m] [--repeats 3] [--json]

Every cell prefills one prompt of random tokens by full, prefix, blend and auto, interleaved; medians are compared. Full
reuse is left out: it is always the fastest, and wrong. Exit code 1 if anywhere auto is slower than the best fixed method
by more than --tolerance, and the method that it chose is so too when run as a fixed one (else it was noise). The last
line is one JSON object.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import typer

from blendserve import console
from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig, Method, ReaderConfig
from blendserve.core import Chunk, Prompt, TokenIds
from blendserve.models.adapter import Adapter
from blendserve.models.loader import load_reader
from blendserve.store import MemoryStore

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


def main(
    model: Annotated[str, typer.Option(help="Reader.")] = ReaderConfig().model,
    repeats: Annotated[int, typer.Option(help="Rounds a cell.")] = 3,
    tolerance: Annotated[float, typer.Option(help="Slower than the best by at most this share.")] = 0.10,
    json: Annotated[bool, typer.Option("--json", help="Only the JSON line.")] = False,
) -> None:
    """Run the grid."""
    reader = load_reader(ReaderConfig(model=model), console.say)
    rng = np.random.default_rng(0)
    fits = [
        (n, size, hits)
        for n in COUNTS
        for size in SIZES
        for hits in HITS
        if PREFIX + n * size + SUFFIX <= reader.adapter.context_limit
    ]
    cells: list[Cell] = []
    _cell(
        reader.adapter, reader.fingerprint, rng, 2, 128, 1.0, 1
    )  # warms up, and measures the machine if need be
    with console.progress("Grid", "cells") as update:
        for done, (n, size, hits) in enumerate(fits):
            cells.append(_cell(reader.adapter, reader.fingerprint, rng, n, size, hits, repeats))
            update(done + 1, len(fits))
    if not json:
        _print(cells)
    failed = [c for c in cells if c.excess > tolerance and c.slip > tolerance]
    worst = max(cells, key=lambda c: c.excess)
    console.print_json(
        {
            "cells": len(cells),
            "worst_excess": round(worst.excess, 4),
            "worst_slip": round(max(c.slip for c in cells), 4),
            "median_excess": round(statistics.median(c.excess for c in cells), 4),
            "failed": [(c.chunks, c.size, c.hits) for c in failed],
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
        }
    )
    sys.exit(1 if failed else 0)


def _cell(
    adapter: Adapter, fingerprint: str, rng: np.random.Generator, n: int, size: int, hits: float, repeats: int
) -> Cell:
    prompt = Prompt(_ids(rng, PREFIX), tuple(Chunk(_ids(rng, size)) for _ in range(n)), _ids(rng, SUFFIX))
    blender = Blender(adapter, fingerprint, MemoryStore(2**34), prompt.prefix, prompt.prefix)
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


def _ids(rng: np.random.Generator, n: int) -> TokenIds:
    return tuple(rng.integers(3, 40_000, size=n).tolist())


def _print(cells: list[Cell]) -> None:
    rows = []
    for c in cells:
        times = [f"{c.median(m) * 1e3:.0f}" for m in METHODS]
        rows.append((f"{c.chunks} x {c.size}", f"{c.hits:.0%}", *times, c.best, c.chosen, f"{c.excess:+.1%}"))
    console.table(
        "Prefill, median ms", ("chunks", "found", *METHODS, "best fixed", "auto chose", "auto / best"), rows
    )


if __name__ == "__main__":
    typer.run(main)
