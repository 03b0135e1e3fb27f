"""The plot of a bench: a line with error bars for each series."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Plot:
    """A metric over a label, with a line for each value of another label."""

    x: str  # a label; numbers make a line, words make groups
    y: str  # a metric in seconds
    series: str  # a label

    def draw(self, result: Mapping[str, Any]) -> bytes:
        """SVG. Bars are the minimum and maximum of the rounds."""
        from blendserve.evaluate.plots import Panel, Point, draw  # start-up: matplotlib

        values: dict[str, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
        for group in result["groups"]:
            for labels, _, metrics in group["samples"]:
                if self.y in metrics and self.x in labels:
                    values[str(labels.get(self.series, ""))][labels[self.x]].append(metrics[self.y])
        xs = list(dict.fromkeys(x for by_x in values.values() for x in by_x))
        words = [] if all(isinstance(x, (int, float)) for x in xs) else [str(x) for x in xs]
        lines = {
            name: sorted(
                Point(xs.index(x) if words else x, statistics.median(seconds), min(seconds), max(seconds))
                for x, seconds in by_x.items()
            )
            for name, by_x in values.items()
        }
        label = f"{self.y.removesuffix('_s')}, s (median, min-max)"
        machine = result["environment"]["machine"]
        title = f"{result['bench']}: {machine['cpu']}, {machine['threads']} threads"
        return draw(title, [Panel(self.x, label, lines, log="y", words=words)])
