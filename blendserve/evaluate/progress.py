"""What a person sees while a run goes on: questions done, and the running means of every method."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from blendserve import console
from blendserve.evaluate.folder import Line
from blendserve.evaluate.methods import FULL, REUSE, MethodSpec


@contextmanager
def watching(
    questions: int, variants: Sequence[MethodSpec], before: Iterable[Line]
) -> Iterator[Callable[[Line | None], None]]:
    """A bar over a table on stderr; yields what the runner tells: a prediction, or None at a question's end.

    Drawn only in between measurements: no thread of its own takes a core from what is timed.
    """
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bar = Progress(TextColumn("Questions"), *columns, auto_refresh=False)
    task, means = bar.add_task("", total=questions), Means([v.name for v in variants])
    for line in before:
        means.add(line)
    with Live(console=console.err, auto_refresh=False, transient=True) as live:

        def watch(line: Line | None) -> None:
            if line is None:
                bar.advance(task)
            else:
                means.add(line)
            if console.err.is_terminal:
                live.update(Group(bar, means.table()), refresh=True)

        yield watch


class Means:
    """Running means by method."""

    def __init__(self, methods: Sequence[str]) -> None:
        self._methods = methods
        self._seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, line: Line) -> None:
        seen = self._seen[line["method"]]
        for name in ("f1", "agreement", "mean_kl"):
            seen[name].append(float(line[name]))
        seen["ttft"].append(line["seconds"]["ttft"])

    def table(self) -> Table:
        shown = Table("method", "F1", "agreement", "KL / reuse's", "TTFT ms", "faster", box=None)
        unit, full = self._mean(REUSE, "mean_kl"), self._ttft(FULL)
        for method in self._methods:
            if self._seen[method]["f1"]:
                kl, ttft = self._mean(method, "mean_kl"), self._ttft(method)
                ratios = f"{kl / unit:.2f}" if unit else "", f"{full / ttft:.1f}x" if full else ""
                means = (f"{self._mean(method, name):.3f}" for name in ("f1", "agreement"))
                shown.add_row(method, *means, ratios[0], f"{ttft * 1e3:.0f}", ratios[1])
        return shown

    def _mean(self, method: str, name: str) -> float:
        values: Any = self._seen[method][name]
        return statistics.fmean(values) if values else 0.0

    def _ttft(self, method: str) -> float:
        values = self._seen[method]["ttft"]
        return statistics.median(values) if values else 0.0
