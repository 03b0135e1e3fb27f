"""Metrics of a simulated cluster, and all clusters of the settings side by side: table and plot."""

from __future__ import annotations

import sys
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np

from blendserve import console
from blendserve.errors import ConfigError
from blendserve.provenance import versions
from blendserve.simulate import workload
from blendserve.simulate.cluster import TIERS, Cluster, SimulationResult, Update
from blendserve.simulate.config import SimulateConfig

Metrics = dict[str, Any]


def simulate(config: SimulateConfig, update: Update = lambda done, total: None) -> Metrics:
    """Simulate every number of nodes under every routing method. `update(requests done, total)`. Raises ConfigError."""
    number = config.requests.number
    if config.requests.chunks > config.corpus.chunks:
        raise ConfigError(
            f"setting 'simulate.requests.chunks' cannot be {config.requests.chunks}: "
            f"the corpus has {config.corpus.chunks}"
        )
    grid = list(product(config.nodes, config.routing))
    cells: list[Metrics] = []

    def step(done: int, _: int) -> None:
        update(len(cells) * number + done, len(grid) * number)

    for nodes, routing in grid:
        result = Cluster(config, nodes, routing).run(workload.requests(config, nodes), number, step)
        cells.append({"nodes": nodes, "routing": routing, **summary(config, result, nodes)})
    return {
        "simulate": "cluster",
        "versions": versions(),
        "settings": config.model_dump(mode="json"),
        "cells": cells,
        "peak_memory_bytes": _peak_memory_bytes(),
    }


def _peak_memory_bytes() -> int | None:
    """The peak memory of this process so far; None where the system does not tell."""
    with suppress(ImportError):
        import resource  # Unix alone has it

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return None


def summary(config: SimulateConfig, result: SimulationResult, nodes: int) -> Metrics:
    """Metrics of the requests after the warm-up; bytes of all requests, by link."""
    first = round(config.requests.warm_up * len(result.ttft))
    ttft = result.ttft[first:]
    found = result.found[first:]
    span = result.finished_at[first:].max() - result.arrived_at[first:].min()
    chunk_bytes = config.compute.stored_bytes * config.corpus.chunk_tokens
    read = result.found.sum(axis=0) * chunk_bytes
    by_node = np.bincount(result.node[first:], minlength=nodes)
    percentiles = zip(("p50", "p95", "p99"), np.percentile(ttft, [50, 95, 99]).tolist(), strict=True)
    return {
        "requests": len(ttft),
        "hit_rates": {tier: float(n / found.sum()) for tier, n in zip(TIERS, found.sum(axis=0), strict=True)},
        "ttft": {"mean": float(ttft.mean()), **dict(percentiles), "worst": float(ttft.max())},
        "throughput": float(len(ttft) / span) if span else 0.0,
        "bytes": {
            "disk": float(read[1]),
            "from_store": float(read[2]),
            "to_store": float(result.sent * chunk_bytes),
        },
        "most_of_mean": float(by_node.max() / by_node.mean()),
        "simulated_seconds": float(result.finished_at.max()),
        "cpu_seconds": result.cpu_s,
        "chunks_known": result.chunks_held,
    }


def show(metrics: Metrics) -> None:
    """Print the table."""
    corpus = metrics["settings"]["corpus"]
    requests = metrics["settings"]["requests"]
    columns = "nodes, routing|memory disk store none|TTFT ms|p50|p95|p99|worst|a second|GB sent|CPU s"
    rows = [
        [
            f"{cell['nodes']:,} {cell['routing']}",
            "  ".join(f"{rate:.2f}" for rate in cell["hit_rates"].values()),
            *(f"{seconds * 1e3:,.1f}" for seconds in cell["ttft"].values()),
            f"{cell['throughput']:,.1f}",
            f"{cell['bytes']['from_store'] / 1e9:,.1f}",
            f"{cell['cpu_seconds']:.1f}",
        ]
        for cell in metrics["cells"]
    ]
    console.table(
        f"{corpus['chunks']:,} chunks of {corpus['chunk_tokens']} tokens, {requests['chunks']} a request; "
        f"{requests['number']:,} requests, the first {requests['warm_up']:.0%} of them not counted",
        columns.split("|"),
        rows,
    )
    if peak := metrics["peak_memory_bytes"]:
        console.out.print(f"peak memory of this process: {peak / 1e9:.2f} GB")


def plot(metrics: Metrics) -> bytes:
    """SVG: hit rate of memory and TTFT against the number of nodes, one line per routing method."""
    from blendserve.evaluate.plots import Panel, Point, draw  # start-up: matplotlib

    settings = metrics["settings"]
    cells = sorted(metrics["cells"], key=lambda cell: int(cell["nodes"]))
    panels = []
    for label, part, name in (
        ("hit rate of the nodes' memory", "hit_rates", "memory"),
        ("mean time to first token, s", "ttft", "mean"),
        ("p95 time to first token, s", "ttft", "p95"),
    ):
        points = [(cell["routing"], Point(cell["nodes"], *[cell[part][name]] * 3)) for cell in cells]
        lines = {routing: [p for own, p in points if own == routing] for routing in settings["routing"]}
        panels.append(Panel("nodes", label, lines, log="x"))
    corpus = settings["corpus"]
    requests = settings["requests"]
    memory = settings["tiers"]["memory_bytes"]
    rate = f"{requests['rate']:g} per second and node" if requests["rate"] else "a closed loop"
    title = (
        f"Simulated: {corpus['chunks']:,} chunks, Zipf {corpus['zipf']:g}, {requests['chunks']} per request, {rate}, "
        f"{memory / 1e9:g} GB of memory per node"
    )
    return draw(title, panels)
