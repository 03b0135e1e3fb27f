"""What a person sees in a terminal: results on stdout; messages, the log and progress bars on stderr."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)
_live: list[Progress] = []  # the bar on the terminal; there is room for one


def note(text: str) -> None:
    """Print a message that is not a result, on stderr."""
    err.print(text, markup=False)


class LogHandler(logging.Handler):
    """Prints the message of a log record on stderr, above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        note(self.format(record))


def show_log(level: int = logging.INFO) -> None:
    """Print this package's log on stderr from this level on, and warnings of other packages."""
    if not any(isinstance(handler, LogHandler) for handler in logging.root.handlers):
        logging.root.addHandler(LogHandler())
    logging.getLogger("blendserve").setLevel(level)


def print_json(value: Any) -> None:
    """One JSON object on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a command: with --json one object, else `show`, a text or a function that prints.

    Without `show`, each value has a line. exit_code: 1 if something is missing or bad.
    """

    values: Mapping[str, Any]
    show: str | Callable[[], None] | None = None
    exit_code: int = 0

    def print(self, json: bool) -> None:
        """Print the result on stdout."""
        if json:
            print_json(self.values)
        elif isinstance(self.show, str):
            out.print(self.show, markup=False)
        elif self.show:
            self.show()
        else:
            width = max(map(len, self.values))
            for name, value in self.values.items():
                shown = f"{value:,}" if isinstance(value, int) else value
                out.print(f"{name:<{width}}  {shown}", markup=False)


def listing(
    name: str, records: Sequence[Mapping[str, Any]], title: str, columns: Sequence[str], none: str = ""
) -> Output:
    """The result {name: records}, shown as a table. columns: FIELD or TITLE=FIELD. none: shown for None."""

    def cell(value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, (list, tuple)):
            return ", ".join(map(str, value))
        return none if value is None else f"{value:,}" if isinstance(value, int) else value

    fields = {column.partition("=")[0]: column.rpartition("=")[2] for column in columns}
    rows = [[cell(record.get(field)) for field in fields.values()] for record in records]
    return Output({name: records}, lambda: table(title, tuple(fields), rows))


@contextmanager
def progress(
    what: str, unit: str, bytes_per_unit: int = 0, refreshes: bool = True
) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr with rate and time left; yields `update(done, total)`. Sizes are shown when a unit has bytes.

    The bar appears with its first update, in place of the one before; so loading a model is not counted as its work.
    refreshes: False = drawn by updates alone, without a thread beside what is timed.
    """
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    ]
    bar = Progress(*columns, console=err, auto_refresh=refreshes)
    task: TaskID | None = None
    first = 0

    def update(done: int, total: int) -> None:
        nonlocal task, first
        if task is None:
            first = done  # done before the clock of the bar starts
            for before in _live:
                before.stop()
            _live[:] = [bar]
            task = bar.add_task(what, total=total, completed=done, rate="")
            bar.start()
        elapsed = bar.tasks[0].elapsed
        speed = (done - first) / elapsed if elapsed else 0.0
        rate = f"{unit}, {speed:,.0f}/s" if speed >= 10 else f"{unit}"
        if bytes_per_unit:
            rate += f", {decimal(done * bytes_per_unit)}"
        bar.update(task, completed=done, total=total, rate=rate, refresh=not refreshes)

    try:
        yield update
    finally:
        with suppress(IndexError):  # Ctrl-C while it started: rich takes back a hook that it had not set yet
            bar.stop()
        err.show_cursor(True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout: the first column to the left, the others to the right."""
    shown = Table(title=title, title_justify="left")
    for n, column in enumerate(columns):
        shown.add_column(column, justify="right" if n else "left", no_wrap=n == 0)
    for row in rows:
        shown.add_row(*row)
    Console(highlight=False, width=None if out.is_terminal else 120).print(shown)
