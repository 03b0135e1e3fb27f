"""The plot of a bench: a line with error bars for each series."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # start-up: matplotlib
    from matplotlib.axes import Axes

Points = dict[str, dict[Any, list[float]]]  # series -> x -> values


@dataclass(frozen=True)
class Plot:
    """A metric over a label, with a line for each value of another label."""

    x: str  # a label; numbers make a line, words make groups
    y: str  # a metric in seconds
    series: str  # a label

    def draw(self, result: Mapping[str, Any]) -> bytes:
        """SVG. Bars are the minimum and maximum of the rounds."""
        from blendserve.evaluate.plots import svg  # start-up: matplotlib

        machine = result["environment"]["machine"]
        title = f"{result['bench']}: {machine['cpu']}, {machine['threads']} threads"
        with svg(title, 7.6, 4.6) as (figure, image):
            axis = figure.subplots()
            self._lines(axis, self._points(result))
            axis.set_yscale("log")
            axis.set_xlabel(self.x)
            axis.set_ylabel(f"{self.y.removesuffix('_s')}, s (median, min-max)")
            axis.legend(frameon=False, fontsize=8)
        return image.getvalue()

    def _points(self, result: Mapping[str, Any]) -> Points:
        points: Points = defaultdict(lambda: defaultdict(list))
        for group in result["groups"]:
            for labels, _, metrics in group["samples"]:
                if self.y in metrics and self.x in labels:
                    points[str(labels.get(self.series, ""))][labels[self.x]].append(metrics[self.y])
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
