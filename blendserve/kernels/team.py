"""The number of threads of compiled kernels: torch's, or fewer where that makes a pass faster (models/thread_tuner.py) or
where other threads decode layers that the pass waits for (blend/loader.py).

Results of compiled kernels do not depend on it. Torch's own results may, so torch's number of threads stays as it is.
The number is that of the calling thread alone.
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
    """Leave this number of cores to helper threads in all later passes of few rows by the calling thread."""
    _own.left = cores


def leaves() -> int:
    """Cores that the calling thread's passes of few rows leave to its helper threads."""
    return _own.left


@contextmanager
def at_most(threads: int | None) -> Iterator[None]:
    """Inside, kernels called by this thread run with no more; None = as torch has it."""
    before = _own.most
    _own.most = threads
    try:
        yield
    finally:
        _own.most = before


def alone() -> None:
    """Let the calling thread compute alone from now on, in torch's own loops, too; for helper threads.

    OpenMP makes a team for each thread that enters a parallel loop. Several teams on the same cores wait for each other.
    Without OpenMP nothing changes.
    """
    torch.get_num_threads()  # a thread's first call sets its number: it must come before ours
    with suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).omp_set_num_threads(1)
