"""The driver of every long run: a workload, part by part, and promises that its figures must keep.

    python -m tests.endurance.NAME [--seconds N] [--seed N] [the workload's own options]

Progress goes to stderr. The last line of stdout is JSON; the exit code is 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any

from blendserve import console

Figures = dict[str, Any]
Promises = Mapping[str, Callable[[Figures], object]]
"""by name: whether the figures of a finished run keep it"""
Workload = Generator[tuple[int, int], bool, Figures]
"""yields (parts done, parts in all) before each part, gets whether time is up, and returns its figures"""


def soak(workload: Workload, promises: Promises, seconds: float = float("inf")) -> Figures:
    """Until the end, or the first part that ends after `seconds` -> the figures, `seconds`, `broken` promises."""
    began = time.monotonic()
    with closing(workload), console.progress("Endurance", "parts") as update:
        progress = next(workload)
        while True:
            update(*progress)
            try:
                progress = workload.send(time.monotonic() - began >= seconds)
            except StopIteration as end:
                found: Figures = end.value
                break
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
    return {name: lambda found, name=name: not found[name] for name in names}  # type: ignore[misc]
