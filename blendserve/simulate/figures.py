"""What a simulated cluster's requests tell together, and the clusters side by side."""

from __future__ import annotations

import resource
import sys
from typing import Any

import numpy as np

from blendserve import console
from blendserve.errors import ConfigError
from blendserve.provenance import versions
from blendserve.simulate import draw
from blendserve.simulate.cluster import TIERS, Cluster, Trace, Update
from blendserve.simulate.config import SimulateConfig

Figures = dict[str, Any]


def simulate(config: SimulateConfig, update: Update = lambda done, total: None) -> Figures:
    """Every number of nodes by every way of routing. `update(requests done, in all)`. Raises ConfigError."""
    number, cells = config.requests.number, []
    if config.requests.chunks > config.corpus.chunks:
        raise ConfigError(
            f"setting 'simulate.requests.chunks' cannot be {config.requests.chunks}: "
            f"the corpus has {config.corpus.chunks}"
        )
    plan = [(nodes, routing) for nodes in config.nodes for routing in config.routing]
    for done, (nodes, routing) in enumerate(plan):
        cluster = Cluster(config, nodes, routing)
        trace = cluster.run(
            draw.requests(config, nodes),
            number,
            lambda n, _, before=done * number: update(before + n, len(plan) * number),  # type: ignore[misc]
        )
        cells.append({"nodes": nodes, "routing": routing, **summary(config, trace, nodes)})
    return {
        "simulate": "cluster",
        "versions": versions(),
        "settings": config.model_dump(mode="json"),
        "cells": cells,
        "peak_memory_bytes": _peak_memory(),
    }


def summary(config: SimulateConfig, trace: Trace, nodes: int) -> Figures:
    """Of the requests behind the warm-up; bytes of all of them, by link."""
    first = round(config.requests.warm_up * len(trace.ttft))
    ttft, found = trace.ttft[first:], trace.found[first:]
    asked = found.sum()
    span = trace.left[first:].max() - trace.came[first:].min()
    p50, p95, p99 = np.percentile(ttft, [50, 95, 99])
    stored = config.compute.stored_bytes * config.corpus.chunk_tokens
    everything = trace.found.sum(axis=0)
    each = np.bincount(trace.node[first:], minlength=nodes)
    return {
        "requests": len(ttft),
        "hit_rates": {tier: float(n / asked) for tier, n in zip(TIERS, found.sum(axis=0), strict=True)},
        "ttft": {
            **{"mean": float(ttft.mean()), "p50": float(p50), "p95": float(p95), "p99": float(p99)},
            "worst": float(ttft.max()),
        },
        "throughput": float(len(ttft) / span) if span else 0.0,
        "bytes": {
            "disk": float(everything[1] * stored),
            "from_store": float(everything[2] * stored),
            "to_store": float(trace.sent * stored),
        },
        "most_of_mean": float(each.max() / each.mean()),
        "simulated_seconds": float(trace.left.max()),
        "took_seconds": trace.seconds[0],
        "cpu_seconds": trace.seconds[1],
        "chunks_known": trace.chunks_known,
    }


def show(figures: Figures) -> None:
    """The table for people."""
    settings = figures["settings"]
    corpus, requests = settings["corpus"], settings["requests"]
    console.table(
        f"{corpus['chunks']:,} chunks of {corpus['chunk_tokens']} tokens, {requests['chunks']} a request; "
        f"{requests['number']:,} requests, the first {requests['warm_up']:.0%} of them not counted",
        (
            *("nodes, routing", "memory disk store none"),
            *("TTFT ms", "p50", "p95", "p99", "worst", "a second", "GB sent", "CPU s"),
        ),
        [_row(cell) for cell in figures["cells"]],
    )
    console.out.print(f"peak memory of this process: {figures['peak_memory_bytes'] / 1e9:.2f} GB")


def _row(cell: Figures) -> list[str]:
    ttft = [f"{cell['ttft'][name] * 1e3:,.1f}" for name in ("mean", "p50", "p95", "p99", "worst")]
    return [
        f"{cell['nodes']:,} {cell['routing']}",
        "  ".join(f"{cell['hit_rates'][tier]:.2f}" for tier in TIERS),
        *ttft,
        f"{cell['throughput']:,.1f}",
        f"{cell['bytes']['from_store'] / 1e9:,.1f}",
        f"{cell['cpu_seconds']:.1f}",
    ]


def _peak_memory() -> int:
    """Bytes that this process had at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
