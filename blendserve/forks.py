"""Objects in a forked child: it has its parent's objects and locks, and none of its threads.

A lock that another thread held is never released there. OpenMP's threads are gone, too: the child's first parallel loop
waits for them forever. So nothing of the parent is used in a child, and a child of a process that computed computes
nothing.
"""

from __future__ import annotations

import os

from blendserve.errors import ModelError

REMEDY = "open it after the fork only, or start processes by spawn"


class Home:
    """The process that made an object."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this process made the object, and did not inherit it by a fork."""
        return os.getpid() == self._pid


_computing: Home | None = None  # the process that computed first, here or before the fork


def is_forked() -> bool:
    """Whether this process was forked from one that computed with models."""
    return _computing is not None and not _computing.is_here


def begin_computing() -> None:
    """Call this before torch computes anything. Raises ModelError in a child of a process that computed."""
    global _computing
    _computing = _computing or Home()
    if is_forked():
        raise ModelError(
            f"process {os.getpid()} was forked from one that had computed with a model, whose threads are not here: no "
            "model, embedder or engine can be used. Use them after the fork only, or start processes by spawn"
        )
