"""Cases that run interleaved, samples that survive a kill, and one table for every bench.

    groups (a generator) -> measure -> SampleLog (a JSON line for each group) -> tables, a plot

A slow second of the machine slows both sides of one round. So a ratio is computed in each round, and the median of these
is shown; a ratio of medians would move.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from blendserve.errors import InputError
from blendserve.evaluate.run_dir import read_lines

Labels = Mapping[str, Any]  # values are str, int or float
Metrics = Mapping[str, float]
# {bench, config, environment, groups: [{group, facts, samples: [[labels, round, metrics]]}]}
Result = dict[str, Any]
Update = Callable[[int, int], None]
ANY = "*"


@dataclass(frozen=True)
class Case:
    """One thing to measure. `run` does one repetition; `prepare` runs before each, untimed."""

    labels: Labels
    run: Callable[[], Metrics]
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Group:
    """Cases that are compared with each other: they run interleaved."""

    labels: Labels  # the grid point, and the key for resuming
    cases: Sequence[Case]
    facts: Callable[[], Mapping[str, Any]] = dict  # called after the last round
    repeats: int | None = None  # in place of the bench's
    warm_up: bool = True


class Sample(NamedTuple):
    """One repetition of one case."""

    labels: dict[str, Any]  # the group's and the case's
    round: int
    metrics: dict[str, float]


class SampleLog:
    """The measured groups of one run. A killed run resumes from FILE.part, which becomes FILE after the last group."""

    def __init__(self, header: Mapping[str, Any], file: Path | None = None) -> None:
        """Raises InputError when the file holds a run with other settings."""
        self._file = file
        self._part = file and file.with_name(f"{file.name}.part")
        self.is_complete = file is not None and file.exists()
        source = file if self.is_complete else self._part
        self.header, *self.groups = (read_lines(source) if source else []) or [dict(header)]
        if (self.header["bench"], self.header["config"]) != (header["bench"], header["config"]):
            raise InputError(
                f"{source} holds a run of {self.header['bench']} with other settings: give another --out"
            )

    def note(self, **facts: Any) -> None:
        """Add facts to the environment, such as the model; before the first group is added."""
        self.header["environment"] = {**self.header["environment"], **facts}

    def add(self, group: Group, samples: Sequence[Sample]) -> None:
        line = {"group": dict(group.labels), "facts": dict(group.facts()), "samples": samples}
        if self._part is not None:
            self._part.parent.mkdir(parents=True, exist_ok=True)
            with self._part.open("a", encoding="utf-8") as out:
                lines = [line] if self.groups else [self.header, line]
                out.write("".join(json.dumps(part) + "\n" for part in lines))
        self.groups.append(json.loads(json.dumps(line)))  # as the file is read

    def complete(self) -> None:
        """Every group is measured."""
        if self._file is not None and self._part is not None and self.groups:
            self._part.replace(self._file)

    @property
    def result(self) -> Result:
        return {**self.header, "groups": self.groups}


def read_result(file: Path) -> Result:
    """The file of a run's --out. Raises InputError."""
    header, *groups = read_lines(file)
    return {**header, "groups": groups}


def rotated(cases: Sequence[Case], n: int) -> Iterator[Case]:
    """The order of round n: each begins with the next case, every other one goes backwards from there.

    No case always follows the same one: after an idle phase a core is faster.
    """
    first = max(n, 0) % len(cases)
    begin, *others = [*cases[first:], *cases[:first]]
    yield begin
    yield from reversed(others) if n > 0 and n % 2 else others


def measure(
    groups: Iterable[Group], repeats: int, log: SampleLog, update: Update = lambda done, total: None
) -> None:
    """One warm-up round of each group, then `repeats` rounds, while the generator keeps the group's stores open."""
    known = [group["group"] for group in log.groups]
    for group in groups:
        if dict(group.labels) in known:
            continue
        samples: list[Sample] = []
        rounds = group.repeats or repeats
        for n in range(-1 if group.warm_up else 0, rounds):
            for case in rotated(group.cases, n):
                case.prepare()
                metrics = dict(case.run())
                if n >= 0:
                    samples.append(Sample({**group.labels, **case.labels}, n, metrics))
            update(n + 1, rounds)
        log.add(group, samples)
    log.complete()


class Summary(NamedTuple):
    """A metric over the rounds."""

    median: float
    low: float
    high: float


def summarize(values: Sequence[float]) -> Summary:
    return Summary(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Column:
    """A metric of a row; with `baseline`, compared with the same round's case whose labels differ by these.

    In `baseline`, None is a label that the other case does not have. ANY is any value: the least of those cases counts,
    the row's own included, as an oracle that chooses after the fact.
    """

    title: str
    metric: str
    scale: float = 1.0
    digits: int = 2
    baseline: Labels | None = None
    compare: Literal["speedup", "ratio"] = "speedup"  # baseline / this one, or this one / baseline
    spread: bool = True  # shows min and max beside the median

    def values(self, samples: Sequence[Sample], row: Labels) -> list[float]:
        """One value a round of the samples with exactly these labels; none for the baseline itself."""
        measured = [s for s in samples if self.metric in s.metrics]
        own = {s.round: s.metrics[self.metric] for s in measured if s.labels == row}
        if self.baseline is None:
            return [value * self.scale for value in own.values()]
        other = {name: value for name, value in {**row, **self.baseline}.items() if value is not None}
        bases: dict[int, list[float]] = {}
        for s in measured:
            if (s.labels != row or ANY in other.values()) and _matches(s.labels, other):
                bases.setdefault(s.round, []).append(s.metrics[self.metric])
        pairs = [(min(bases[n]), value) for n, value in own.items() if n in bases]
        return [
            base / value if self.compare == "speedup" else value / base
            for base, value in pairs
            if base and value
        ]

    def text(self, samples: Sequence[Sample], row: Labels) -> str:
        values = self.values(samples, row)
        if not values:
            return ""
        middle, low, high = (f"{value:,.{self.digits}f}" for value in summarize(values))
        return f"{middle} ({low}-{high})" if self.spread and low != high else middle


def ms(title: str, metric: str, spread: bool = True) -> Column:
    """Seconds, shown in milliseconds."""
    return Column(title, metric, 1e3, 1, spread=spread)


def count(title: str, metric: str, scale: float = 1.0, digits: int = 0) -> Column:
    """The median alone."""
    return Column(title, metric, scale, digits, spread=False)


def speedup(title: str, metric: str, **baseline: Any) -> Column:
    return Column(title, metric, baseline=baseline)


def ratio(title: str, metric: str, **baseline: Any) -> Column:
    return Column(title, metric, baseline=baseline, compare="ratio")


Rendered = tuple[str, list[str], list[list[str]]]
"""title, columns, rows"""


@dataclass(frozen=True)
class Table:
    """A row for each combination of labels that includes `where`, a column for each metric."""

    title: str
    columns: tuple[Column, ...]
    where: Labels

    def render(self, samples: Sequence[Sample]) -> Rendered | None:
        """Labels that all rows share stand in the title, and empty columns are left out. None without a row."""
        found = [(row, [c.text(samples, row) for c in self.columns]) for row in _rows(samples, self.where)]
        rows = [(row, cells) for row, cells in found if any(cells)]
        if not rows:
            return None
        names = list(dict.fromkeys(name for row, _ in rows for name in row))
        shown = [n for n in names if len({str(row.get(n)) for row, _ in rows}) > 1] or names[-1:]
        used = [i for i in range(len(self.columns)) if any(cells[i] for _, cells in rows)]
        shared = [f"{n} {rows[0][0][n]}" for n in names if n not in shown]
        lines = [[*(f"{row.get(n, '')}" for n in shown), *(cells[i] for i in used)] for row, cells in rows]
        return ", ".join([self.title, *shared]), [*shown, *(self.columns[i].title for i in used)], lines


def table(title: str, *columns: Column, **where: Any) -> Table:
    return Table(title, columns, where)


def render(tables: Sequence[Table], result: Result) -> list[Rendered]:
    """Tables of metrics, then the facts that are one number or one word."""
    samples = samples_of(result)
    facts = [
        [", ".join(f"{k} {v}" for k, v in group["group"].items()), name, f"{value}"]
        for group in result["groups"]
        for name, value in group["facts"].items()
        if isinstance(value, (str, int, float))
    ]
    found = [rendered for table in tables if (rendered := table.render(samples))]
    return [*found, *([("Facts", ["group", "fact", "value"], facts)] if facts else [])]


def samples_of(result: Result) -> list[Sample]:
    return [Sample(*sample) for group in result["groups"] for sample in group["samples"]]


def select(result: Result, column: Column, where: Labels) -> list[float]:
    """The values of the one row that includes `where` and has any. Raises InputError where there is none, or several."""
    samples = samples_of(result)
    found = [values for row in _rows(samples, where) if (values := column.values(samples, row))]
    if len(found) != 1:
        raise InputError(
            f"{len(found)} rows of {result['bench']} have {dict(where)} and {column.metric}: 1 is needed"
        )
    return found[0]


def _matches(labels: Labels, wanted: Labels) -> bool:
    return labels.keys() == wanted.keys() and all(wanted[name] in (ANY, labels[name]) for name in wanted)


def _rows(samples: Sequence[Sample], where: Labels) -> list[dict[str, Any]]:
    """The combinations of labels that include `where`."""
    every = {json.dumps(s.labels, sort_keys=True): s.labels for s in samples}
    return [row for row in every.values() if where.items() <= row.items()]
