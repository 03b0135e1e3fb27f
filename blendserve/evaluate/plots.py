"""The plots of a run: fidelity and score against TTFT, and size of stored KV against fidelity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from itertools import cycle
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from blendserve.evaluate.methods import EXACT
from blendserve.evaluate.tasks import PERPLEXITY

Methods = Mapping[str, Mapping[str, Any]]

# Okabe and Ito's colours, which most eyes can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F5F3F", "#666666", "#9A9A00")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "blendserve",  # equal data, equal files
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
}
MARKERS = {"full": "*", "prefix": "P", "reuse": "X", "transformers": "d"}
SIZES = (1, 2, 3, 5, 8, 12, 16, 20, 30, 50, 100)


@contextmanager
def svg(title: str, width: float, height: float) -> Iterator[tuple[Figure, BytesIO]]:
    """A figure to draw on, and its SVG after the block. Sizes in inches."""
    with rc_context(STYLE):
        figure, image = Figure(figsize=(width, height), layout="constrained"), BytesIO()
        yield figure, image
        figure.suptitle(title, fontsize=9)
        figure.savefig(image, format="svg", metadata={"Date": None})


def pareto(methods: Methods, title: str, metric: str) -> bytes:
    """SVG: a line for each series of methods, a point for each ratio; bars are 95% intervals."""
    better = "lower" if metric == PERPLEXITY else "higher"
    panels = {
        "mean_kl_share": "mean KL to full prefill, full reuse = 1   (lower is better)",
        "score": f"{metric}   ({better} is better)",
    }
    with svg(title, 11, 4.6) as (figure, image):
        axes = figure.subplots(1, len(panels))
        for axis, (field, label) in zip(axes, panels.items(), strict=True):
            _draw_series(axis, methods, field)
            axis.set_title(label, fontsize=9)
            _log_axis(axis, LogLocator(subs=(1.0, 2.0, 5.0)), "")
            axis.set_xlabel("time to first token, median, ms")
            if field != "score" or metric != PERPLEXITY:
                axis.set_ylim(bottom=0)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return image.getvalue()


def codecs(methods: Methods, title: str) -> bytes:
    """SVG: a panel for each method that ran over codecs, a line for each codec."""
    panels = list(dict.fromkeys(m["uncoded"] for m in methods.values() if m["codec"]))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    with svg(title, max(6.5, 4.6 * columns), 4.4 * rows) as (figure, image):
        for n, uncoded in enumerate(panels, start=1):
            axis = figure.add_subplot(rows, columns, n)
            _draw_codecs(axis, methods, uncoded)
            axis.set_xlim(left=1)
            _log_axis(axis, FixedLocator(SIZES), "x")
            axis.set_xlabel("uncoded bytes / bytes of the records")
            axis.set_ylabel("mean KL to full prefill, full reuse = 1")
            axis.set_title(uncoded, fontsize=9)
            axis.set_ylim(bottom=0)
            axis.legend(frameon=False, fontsize=8)
    return image.getvalue()


def _draw_series(axis: Axes, methods: Methods, field: str) -> None:
    series: dict[str, list[Mapping[str, Any]]] = {}
    for method in methods.values():
        if method["kind"] != EXACT and method[field] is not None:  # the time of `exact` means nothing
            series.setdefault(method["series"], []).append(method)
    colours = cycle(COLOURS)
    for name, points in series.items():
        points.sort(key=lambda m: m["ratio"] or 0.0)
        ttft = [1e3 * m["seconds"]["ttft"]["median"] for m in points]
        mean, low, high = ([m[field][part] for m in points] for part in ("mean", "low", "high"))
        bars = [[max(0.0, a - b) for a, b in zip(*pair, strict=True)] for pair in ((mean, low), (high, mean))]
        colour = next(colours) if points[0]["kind"] == "blend" else "black"
        look: dict[str, Any] = {
            "marker": MARKERS.get(points[0]["kind"], "o"),
            "markersize": 5,
            "linewidth": 1.4,
        }
        axis.errorbar(ttft, mean, bars, label=name, color=colour, clip_on=False, elinewidth=0.5, **look)
        for m, x, y in zip(points, ttft, mean, strict=True):
            if m["ratio"] is not None:
                axis.annotate(
                    f"{m['ratio']:.0%}", (x, y), (3, 3), textcoords="offset points", fontsize=6, color=colour
                )


def _draw_codecs(axis: Axes, methods: Methods, uncoded: str) -> None:
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for m in methods.values():
        if m["codec"] and m["uncoded"] == uncoded and m["mean_kl_share"]:
            name, _, level = m["codec"].partition("@")
            lines.setdefault(name, []).append((m["kv_smaller"], m["mean_kl_share"]["mean"], level))
    look: dict[str, Any] = {"marker": "o", "markersize": 5, "linewidth": 1.4, "clip_on": False}
    for (name, points), colour in zip(sorted(lines.items()), cycle(COLOURS), strict=False):
        smaller, share, _ = zip(*sorted(points), strict=True)
        axis.plot(smaller, share, label=name, color=colour, **look)
        for x, y, level in points:
            axis.annotate(level, (x, y), (4, 3), textcoords="offset points", fontsize=7, color=colour)
    plain = methods.get(uncoded)
    if plain is not None and plain["mean_kl_share"]:
        level = plain["mean_kl_share"]["mean"]
        axis.axhline(level, color="black", linewidth=0.8, linestyle=":", label="uncoded")


def _log_axis(axis: Axes, ticks: Any, unit: str) -> None:
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(ticks)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}{unit}"))
