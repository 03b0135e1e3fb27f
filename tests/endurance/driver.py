"""The driver of every long run: a workload, step by step, and promises that its figures must keep.

    python -m tests.endurance.NAME [--seconds N] [--seed N] [the workload's own options]

Progress goes to stderr. The last line of stdout is JSON; the exit code is 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from blendserve import console

Figures = dict[str, Any]
Promises = Mapping[str, Callable[[Figures], object]]
"""by name: whether the figures of a finished run keep it"""


class Workload(Protocol):
    """A context manager that opens what it works on."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> Any: ...

    def step(self) -> tuple[int, int]:
        """Do the next part -> units done, units in all; both are equal after the last part."""
        ...

    def figures(self) -> Figures:
        """Check what is left, and add up. Called once, after the last step."""
        ...


def soak(workload: Workload, promises: Promises, seconds: float = float("inf")) -> Figures:
    """Until the end, or the first step that ends after `seconds` -> the figures, `seconds`, `broken` promises."""
    began, done, total = time.monotonic(), 0, 1
    with workload, console.progress(type(workload).__name__, "units") as update:
        while done < total and time.monotonic() - began < seconds:
            done, total = workload.step()
            update(done, total)
        found = workload.figures()
    broken = [name for name, holds in promises.items() if not holds(found)]
    return {**found, "seconds": round(time.monotonic() - began, 1), "broken": broken}


def main(make: Callable[..., Workload], promises: Promises, *arguments: str, **options: Any) -> int:
    """Run `make(**options)` as a command -> exit code. options: the defaults; `seed` is among them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=float("inf"))
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    asked = vars(parser.parse_args(arguments or None))
    seconds = asked.pop("seconds")
    found = soak(make(**asked), promises, seconds)
    console.print_json({"seed": asked["seed"], **found} if "seed" in asked else found)
    return 1 if found["broken"] else 0


def none(*names: str) -> Promises:
    """One promise for each of these figures: it is 0, or empty."""
    return {name: partial(_is_none, name) for name in names}


def _is_none(name: str, found: Figures) -> bool:
    return not found[name]
