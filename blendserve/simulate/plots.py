"""Memory hit rate and TTFT against the number of nodes, one line per routing method."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from blendserve.evaluate.plots import COLOURS, STYLE
from blendserve.simulate.config import ROUTINGS

LABELS = dict(
    zip(ROUTINGS, ("round robin", "least loaded", "prefix affinity", "chunk affinity"), strict=True)
)


def by_nodes(metrics: dict[str, Any]) -> bytes:
    """SVG. The mean TTFT is a line, the 95th percentile is dashed."""
    cells = sorted(metrics["cells"], key=lambda cell: int(cell["nodes"]))
    with rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.2), layout="constrained")
        hits, ttft = figure.subplots(1, 2)
        for routing, colour in zip(ROUTINGS, COLOURS, strict=False):
            if not (own := [cell for cell in cells if cell["routing"] == routing]):
                continue
            nodes, label = [cell["nodes"] for cell in own], LABELS[routing]
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
        figure.suptitle(_title(metrics["settings"]), fontsize=9)
        buffer = BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()


def _title(settings: dict[str, Any]) -> str:
    corpus, requests, tiers = settings["corpus"], settings["requests"], settings["tiers"]
    rate = f"{requests['rate']:g} a second and node" if requests["rate"] else "a closed loop"
    return (
        f"Simulated: {corpus['chunks']:,} chunks, Zipf {corpus['zipf']:g}, {requests['chunks']} a request, {rate}, "
        f"{tiers['memory_bytes'] / 1e9:g} GB of memory a node"
    )
