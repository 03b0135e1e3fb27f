"""SVG plots: a panel for each figure, a line for each series, a bar for each interval.

Used by evaluations, benches and the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from itertools import cycle
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

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
KL_SHARE = "mean KL to full prefill, full reuse = 1   (lower is better)"


class Point(NamedTuple):
    """A value with its interval, and a note beside it."""

    x: float
    y: float
    low: float
    high: float
    note: str = ""


class Panel(NamedTuple):
    """One pair of axes."""

    x: str
    y: str
    lines: Mapping[str, Sequence[Point]]  # by the name of the series
    log: str = ""  # axes with a logarithmic scale, such as "xy"
    words: Sequence[str] = ()  # at x = 0, 1, ... in place of numbers


def draw(title: str, panels: Sequence[Panel]) -> bytes:
    """The plot as SVG."""
    columns = min(3, len(panels))
    image = BytesIO()
    rows = -(-len(panels) // columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(max(7.6, 5.2 * columns), 4.4 * rows), layout="constrained")
        for n, panel in enumerate(panels, 1):
            _draw(figure.add_subplot(rows, columns, n), panel)
        figure.suptitle(title, fontsize=9)
        figure.savefig(image, format="svg", metadata={"Date": None})
    return image.getvalue()


def pareto(methods: Methods, title: str, metric: str) -> bytes:
    """Fidelity and score against TTFT: a line for each series of methods, a point for each ratio."""
    better = "lower" if metric == PERPLEXITY else "higher"
    panels = []
    for field, label in {"mean_kl_share": KL_SHARE, "score": f"{metric}   ({better} is better)"}.items():
        shown = [
            (m["series"], _point(m, 1e3 * m["seconds"]["ttft"]["median"], field))
            for m in methods.values()
            if m["kind"] != EXACT and m[field]  # the time of `exact` means nothing
        ]
        log = "xy" if label.startswith(PERPLEXITY) else "x"
        panels.append(Panel("time to first token, median, ms", label, _by_series(shown), log))
    return draw(title, panels)


def codecs(methods: Methods, title: str) -> bytes:
    """Size of stored KV against fidelity: a panel for each method that ran over codecs, a line for each codec."""
    panels = []
    for method in dict.fromkeys(m["uncoded"] for m in methods.values() if m["codec"]):
        over = [m for m in methods.values() if m["codec"] and m["uncoded"] == method and m["mean_kl_share"]]
        shown = [(m["codec"].partition("@")[0], _point(m, m["kv_smaller"], "mean_kl_share")) for m in over]
        if method in methods and methods[method]["mean_kl_share"]:
            shown.append(("uncoded", _point(methods[method], 1.0, "mean_kl_share")))
        x = f"{method}: uncoded bytes / bytes of the records"
        panels.append(Panel(x, KL_SHARE, _by_series(shown), log="x"))
    return draw(title, panels)


def _point(method: Mapping[str, Any], x: float, field: str) -> Point:
    mean, low, high = (method[field][part] for part in ("mean", "low", "high"))
    ratio = "" if method["ratio"] is None else f"{method['ratio']:.0%}"
    return Point(x, mean, low, high, (method["codec"] or "").partition("@")[2] or ratio)


def _by_series(shown: Iterable[tuple[str, Point]]) -> dict[str, list[Point]]:
    lines: dict[str, list[Point]] = {}
    for series, point in sorted(shown):
        lines.setdefault(series, []).append(point)
    return lines


def _draw(axis: Axes, panel: Panel) -> None:
    for (name, points), colour in zip(panel.lines.items(), cycle(COLOURS), strict=False):
        xs = [p.x for p in points]
        ys = [p.y for p in points]
        bars = [max(0.0, p.y - p.low) for p in points], [max(0.0, p.high - p.y) for p in points]
        form: dict[str, Any] = {"fmt": "o" if panel.words else "o-", "markersize": 4, "linewidth": 1.4}
        axis.errorbar(xs, ys, bars, label=name, color=colour, elinewidth=0.5, clip_on=False, **form)
        for p in points:
            axis.annotate(p.note, (p.x, p.y), (3, 3), textcoords="offset points", fontsize=6, color=colour)
    for letter, own in (("x", axis.xaxis), ("y", axis.yaxis)):
        if letter in panel.log:
            getattr(axis, f"set_{letter}scale")("log")
            own.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            own.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            own.set_minor_formatter(NullFormatter())
    if "y" not in panel.log:
        axis.set_ylim(bottom=0)
    if panel.words:
        axis.set_xticks(range(len(panel.words)), panel.words, rotation=30, fontsize=8)
    axis.set_xlabel(panel.x)
    axis.set_ylabel(panel.y)
    axis.legend(frameon=False, fontsize=7)
