"""Memory hit rate and TTFT against the number of nodes, one line per routing method."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import FuncFormatter, NullLocator

from blendserve.evaluate.plots import COLOURS, svg
from blendserve.simulate.config import ROUTINGS


def by_nodes(metrics: dict[str, Any]) -> bytes:
    """SVG. The mean TTFT is a line, the 95th percentile is dashed."""
    cells = sorted(metrics["cells"], key=lambda cell: int(cell["nodes"]))
    with svg(_title(metrics["settings"]), 9.6, 4.2) as (figure, image):
        hits, ttft = figure.subplots(1, 2)
        for routing, colour in zip(ROUTINGS, COLOURS, strict=False):
            if not (own := [cell for cell in cells if cell["routing"] == routing]):
                continue
            nodes, label = [cell["nodes"] for cell in own], routing.replace("_", " ")
            hits.plot(nodes, [cell["hit_rates"]["memory"] for cell in own], "o-", color=colour, label=label)
            ttft.plot(nodes, [cell["ttft"]["mean"] for cell in own], "o-", color=colour, label=label)
            ttft.plot(nodes, [cell["ttft"]["p95"] for cell in own], "--", color=colour, label=f"{label}, p95")
        hits.set_ylabel("hit rate of the nodes' memory")
        ttft.set_ylabel("time to first token, s")
        for axis in (hits, ttft):
            axis.set_ylim(bottom=0.0)
            axis.set_xscale("log")
            axis.set_xticks(sorted({cell["nodes"] for cell in cells}))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.set_xlabel("nodes")
            axis.legend(frameon=False, fontsize=7)
    return image.getvalue()


def _title(settings: dict[str, Any]) -> str:
    corpus, requests, tiers = settings["corpus"], settings["requests"], settings["tiers"]
    rate = f"{requests['rate']:g} per second and node" if requests["rate"] else "a closed loop"
    return (
        f"Simulated: {corpus['chunks']:,} chunks, Zipf {corpus['zipf']:g}, {requests['chunks']} per request, {rate}, "
        f"{tiers['memory_bytes'] / 1e9:g} GB of memory per node"
    )
