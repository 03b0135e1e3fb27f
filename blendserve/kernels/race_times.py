"""What races have measured on this machine, kept in the user's cache: what one process finds, the next one goes by.

So a machine computes the same bits today and tomorrow. A file for each CPU with its cap, number of threads, torch and
kernels: operation -> class of shapes -> backend -> seconds of each sample. A file that cannot be read, or says something
else, is none; one that cannot be written costs the next process the same milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from blendserve import cpu_cap
from blendserve.kernels.cpu import isa
from blendserve.kernels.race import Times
from blendserve.paths import cache_folder

WAIT_SECONDS = 2  # for another process that is writing
SOURCES = Path(__file__).parent


def machine() -> str:
    """A word for all that a time measured on this CPU depends on, but for what else runs there."""
    return _machine(torch.get_num_threads(), isa.allowed())


@cache
def _machine(threads: int, sets: tuple[str, ...]) -> str:
    libraries = torch.backends.cpu.get_cpu_capability(), *map(os.environ.get, cpu_cap.LIBRARIES)
    about = repr((isa.cpu_name(), sets, libraries, threads, torch.__version__))
    parts = (about.encode(), *(file.read_bytes() for file in _sources()))
    return hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def _sources() -> list[Path]:
    """Everything that computes on a CPU, and what is tried of it."""
    return sorted(
        file for folder in (SOURCES, SOURCES / "cpu") for file in folder.iterdir() if file.is_file()
    )


def recall(operation: str, shapes: str, backends: Sequence[str]) -> Times | None:
    """What is kept of all these backends, in their order; None if anything is missing or no time."""
    found = _read(file_of_machine()).get(operation)
    times = found.get(shapes) if isinstance(found, dict) else None
    if not isinstance(times, dict) or not all(_are_times(times.get(name)) for name in backends):
        return None
    asked = {name: times[name] for name in backends}
    return asked if len(set(map(len, asked.values()))) == 1 else None


def keep(operation: str, shapes: str, times: Times) -> Times:
    """Write it down, unless another process was first: then what that one found is returned instead."""
    file = file_of_machine()
    with suppress(OSError, Timeout):
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock"), timeout=WAIT_SECONDS):
            theirs = recall(operation, shapes, list(times))
            if theirs is not None:
                return theirs
            table = _read(file)
            of_operation = table.get(operation)
            table[operation] = {**(of_operation if isinstance(of_operation, dict) else {}), shapes: times}
            made = file.with_suffix(f".{os.getpid()}")
            made.write_text(json.dumps(table, indent=1))
            made.replace(file)
    return times


def file_of_machine() -> Path:
    """Where the times of this machine are kept."""
    return cache_folder() / "kernels" / f"{machine()}.json"


def _read(file: Path) -> dict[str, Any]:
    try:
        table = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def _are_times(found: object) -> bool:
    return (
        isinstance(found, list)
        and len(found) > 0
        and all(isinstance(took, float) and isfinite(took) and took > 0 for took in found)
    )
