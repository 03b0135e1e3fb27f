"""How many threads a compiled kernel runs with: torch's, or fewer where that makes a pass faster (models/threads.py) or
where other threads decode what the pass waits for (blend/loader.py).

Their results do not depend on it. What torch computes itself may, so its own number of threads, which is also by what a
backend is chosen, stays as it is. It holds for the calling thread alone.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


class _Own(threading.local):
    most: int | None = None
    left: int = 0  # cores, to others


_own = _Own()


def size() -> int:
    """Threads of the next call, at least 1."""
    most = torch.get_num_threads()
    return most if _own.most is None else min(most, _own.most)


def leave(cores: int) -> None:
    """From now on passes of few rows by the calling thread leave so many cores to threads that work for it; 0 = none."""
    _own.left = cores


def leaves() -> int:
    """Cores that the calling thread's passes of few rows leave to others."""
    return _own.left


@contextmanager
def at_most(threads: int | None) -> Iterator[None]:
    """Inside, kernels called by this thread run with no more; None = as torch has it."""
    before, _own.most = _own.most, threads
    try:
        yield
    finally:
        _own.most = before


def alone() -> None:
    """From now on the calling thread computes alone, in torch's own loops, too; for threads that work beside others.

    Each thread that enters such a loop has OpenMP make it a team of its own. Several of them on the same cores wait for
    each other, and all of the process's teams give up spinning sooner. Nothing changes where there is no OpenMP to ask.
    """
    torch.get_num_threads()  # a thread's first question sets its number: it is asked before
    with suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).omp_set_num_threads(1)
