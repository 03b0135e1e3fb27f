"""Memory hit rate and TTFT against the number of nodes, one line per routing method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blendserve.evaluate.plots import Panel, Point, draw


def by_nodes(metrics: dict[str, Any]) -> bytes:
    """SVG."""
    cells = sorted(metrics["cells"], key=lambda cell: int(cell["nodes"]))
    figures: dict[str, Callable[[dict[str, Any]], float]] = {
        "hit rate of the nodes' memory": lambda cell: cell["hit_rates"]["memory"],
        "mean time to first token, s": lambda cell: cell["ttft"]["mean"],
        "p95 time to first token, s": lambda cell: cell["ttft"]["p95"],
    }
    panels = []
    for title, value in figures.items():
        lines: dict[str, list[Point]] = {}
        for cell in cells:
            lines.setdefault(cell["routing"], []).append(Point(cell["nodes"], (y := value(cell)), y, y))
        panels.append(Panel("nodes", title, lines, log="x"))
    return draw(_title(metrics["settings"]), panels)


def _title(settings: dict[str, Any]) -> str:
    corpus, requests, tiers = settings["corpus"], settings["requests"], settings["tiers"]
    rate = f"{requests['rate']:g} per second and node" if requests["rate"] else "a closed loop"
    return (
        f"Simulated: {corpus['chunks']:,} chunks, Zipf {corpus['zipf']:g}, {requests['chunks']} per request, {rate}, "
        f"{tiers['memory_bytes'] / 1e9:g} GB of memory per node"
    )
