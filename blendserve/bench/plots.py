"""Plots of a bench's result: a line with error bars for each series, or the distribution of a metric."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import cycle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # start-up: matplotlib
    from matplotlib.axes import Axes

Points = dict[str, dict[Any, list[float]]]  # series -> x -> values


@dataclass(frozen=True)
class Plot:
    """What is drawn. Without `x`: the cumulative distribution of `y`."""

    y: str  # a metric
    series: str  # a label
    x: str | None = None  # a label; numbers make a line, words make groups
    unit: str = "s"
    log: bool = True

    def draw(self, result: Mapping[str, Any]) -> bytes:
        """SVG. Bars are the least and the most of the rounds."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        from blendserve.evaluate.plots import STYLE

        with rc_context(STYLE):
            figure = Figure(figsize=(7.6, 4.6), layout="constrained")
            axis = figure.subplots()
            if self.x is None:
                self._distribution(axis, self._points(result))
            else:
                self._lines(axis, self._points(result))
            machine = result["environment"]["machine"]
            axis.set_title(f"{result['bench']}: {machine['cpu']}, {machine['threads']} threads", fontsize=9)
            axis.legend(frameon=False, fontsize=8)
            buffer = BytesIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None})
            return buffer.getvalue()

    def _points(self, result: Mapping[str, Any]) -> Points:
        points: Points = defaultdict(lambda: defaultdict(list))
        for group in result["groups"]:
            for labels, _, metrics in group["samples"]:
                if self.y in metrics and (self.x is None or self.x in labels):
                    points[str(labels.get(self.series, ""))][self.x and labels[self.x]].append(
                        metrics[self.y]
                    )
        return points

    def _lines(self, axis: Axes, points: Points) -> None:
        from blendserve.evaluate.plots import COLOURS

        xs = list(dict.fromkeys(x for by_x in points.values() for x in by_x))
        numbers = all(isinstance(x, (int, float)) for x in xs)
        for n, ((name, by_x), colour) in enumerate(zip(points.items(), cycle(COLOURS), strict=False)):
            at = sorted(by_x) if numbers else [x for x in xs if x in by_x]
            middle = [statistics.median(by_x[x]) for x in at]
            below = [m - min(by_x[x]) for x, m in zip(at, middle, strict=True)]
            above = [max(by_x[x]) - m for x, m in zip(at, middle, strict=True)]
            places = at if numbers else [xs.index(x) + 0.08 * (n - len(points) / 2) for x in at]
            form = "o-" if numbers else "o"
            axis.errorbar(places, middle, (below, above), fmt=form, markersize=4, label=name, color=colour)
        if not numbers:
            axis.set_xticks(range(len(xs)), [str(x) for x in xs], rotation=30, fontsize=8)
        if self.log:
            axis.set_yscale("log")
        axis.set_xlabel(str(self.x))
        axis.set_ylabel(f"{self.y.removesuffix('_s')}, {self.unit} (median, min-max)")

    def _distribution(self, axis: Axes, points: Points) -> None:
        from blendserve.evaluate.plots import COLOURS

        for (name, by_x), colour in zip(points.items(), cycle(COLOURS), strict=False):
            values = sorted(by_x[None])
            axis.step(values, [(n + 1) / len(values) for n in range(len(values))], label=name, color=colour)
        axis.set_xlabel(f"{self.y.removesuffix('_s')}, {self.unit}")
        axis.set_ylabel("cumulative share")
