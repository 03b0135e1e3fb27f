"""The Pareto plot: fidelity and the data's own score against time to first token; a line a policy, a point a ratio."""

from __future__ import annotations

from collections.abc import Mapping
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

# Okabe and Ito's colours, told apart by most eyes; the baselines are black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F5F3F", "#666666", "#9A9A00")
MARKERS = {"full": "*", "prefix": "P", "reuse": "X", "transformers": "d"}
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "blendserve",  # equal figures, equal files
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
}


def pareto(methods: Methods, title: str, format: str = "svg", metric: str = "F1") -> bytes:
    """`methods` and `metric` as in metrics.json -> an image; bars are 95% intervals."""
    better = "lower" if metric == PERPLEXITY else "higher"
    panels = {
        "mean_kl_share": "mean KL to full prefill, full reuse = 1   (lower is nearer)",
        "score": f"{metric}   ({better} is better)",
    }
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        axes = figure.subplots(1, len(panels))
        for axis, (field, label) in zip(axes, panels.items(), strict=True):
            _panel(axis, methods, field)
            axis.set_title(label, fontsize=9)
            if field != "score" or metric != PERPLEXITY:
                axis.set_ylim(bottom=0)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
        figure.suptitle(title, fontsize=10)
        return _image(figure, format)


def coded(methods: Methods, title: str, format: str = "svg") -> bytes:
    """Size against fidelity: a panel for each method that was run over codecs, in it a line for each codec."""
    panels = dict.fromkeys(figures["uncoded"] for figures in methods.values() if figures["codec"])
    with rc_context(STYLE):
        columns = min(3, len(panels))
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(max(6.5, 4.6 * columns), 4.4 * rows), layout="constrained")
        for n, uncoded in enumerate(panels, start=1):
            axis = figure.add_subplot(rows, columns, n)
            _coded_panel(axis, methods, uncoded)
            axis.set_ylabel("mean KL to full prefill, full reuse = 1")
        figure.suptitle(title, fontsize=10)
        return _image(figure, format)


def _coded_panel(axis: Axes, methods: Methods, uncoded: str) -> None:
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for figures in methods.values():
        if figures["codec"] and figures["uncoded"] == uncoded and figures["mean_kl_share"]:
            name, _, level = figures["codec"].partition("@")
            point = (figures["kv_smaller"], figures["mean_kl_share"]["mean"], level)
            lines.setdefault(name, []).append(point)
    for (name, points), colour in zip(sorted(lines.items()), cycle(COLOURS), strict=False):
        smaller, share, _ = zip(*sorted(points), strict=True)
        axis.plot(
            smaller, share, label=name, color=colour, marker="o", markersize=5, linewidth=1.4, clip_on=False
        )
        for x, y, level in points:
            axis.annotate(level, (x, y), (4, 3), textcoords="offset points", fontsize=7, color=colour)
    if (plain := methods.get(uncoded)) is not None and plain["mean_kl_share"]:
        axis.axhline(
            plain["mean_kl_share"]["mean"], color="black", linewidth=0.8, linestyle=":", label="uncoded"
        )
    axis.set_xscale("log")
    axis.set_xlim(left=1)
    axis.xaxis.set_major_locator(FixedLocator([1, 2, 3, 5, 8, 12, 16, 20, 30, 50, 100]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axis.set_xlabel("smaller than uncoded, every byte of a record counted")
    axis.set_title(uncoded, fontsize=9)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8)


def _panel(axis: Axes, methods: Methods, field: str) -> None:
    colours = cycle(COLOURS)
    for curve, names in _curves(methods).items():
        points = [p for name in names if (p := _point(methods[name], field)) is not None]
        if not points:
            continue
        kind = methods[names[0]]["kind"]
        colour = next(colours) if kind == "blend" else "black"
        ttft, mean, below, above = zip(*points, strict=True)
        axis.errorbar(
            ttft,
            mean,
            (below, above),
            label=curve,
            color=colour,
            marker=MARKERS.get(kind, "o"),
            markersize=5,
            elinewidth=0.5,
            clip_on=False,
            linewidth=1.4,
        )
        for name, x, y in zip(names, ttft, mean, strict=False):
            if (ratio := methods[name]["ratio"]) is not None:
                axis.annotate(
                    f"{ratio:.0%}", (x, y), (3, 3), textcoords="offset points", fontsize=6, color=colour
                )
    _time_axis(axis)


def _curves(methods: Methods) -> dict[str, list[str]]:
    """Methods by what they are but for their ratio, in order of ratio; none that is exact, whose time is nobody's."""
    curves: dict[str, list[str]] = {}
    for name, figures in methods.items():
        if figures["kind"] == EXACT:
            continue
        curves.setdefault(figures["series"], []).append(name)
    return {
        curve: sorted(names, key=lambda name: methods[name]["ratio"] or 0.0)
        for curve, names in curves.items()
    }


def _point(figures: Mapping[str, Any], field: str) -> tuple[float, float, float, float] | None:
    """Milliseconds, mean, and how far its interval reaches below and above."""
    interval = figures[field]
    if interval is None:
        return None
    mean = interval["mean"]
    return (
        1e3 * figures["seconds"]["ttft"]["median"],
        mean,
        max(0.0, mean - interval["low"]),
        max(0.0, interval["high"] - mean),
    )


def _time_axis(axis: Axes) -> None:
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_xlabel("time to first token, median, ms")


def _image(figure: Figure, format: str) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format=format, metadata={"Date": None} if format == "svg" else None, dpi=150)
    return buffer.getvalue()
