"""Notices that a link has died under a request's transfers: when nothing has come over any of them for a while.

One connection may well be silent while others' bytes come first, and a process that was itself held up finds what came
meanwhile when it goes on. So it is looked at in steps, at all transfers together, and only as many steps in which nothing
came are silence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NAME = "blendserve-guard"
STEPS = 4  # of the patience
FIRST = (
    4 * STEPS
)  # before anything has come, and beside a prefill, which keeps the cores busy and hides some waiting


class Guard:
    """Of one request. Safe to share between threads."""

    def __init__(self, arrived: Callable[[], int], patience: Callable[[], float]) -> None:
        """arrived: bytes so far, of all transfers. patience: seconds of silence that are worth waiting."""
        self._arrived, self._patience = arrived, patience
        self._under_way = 0
        self._rest = threading.Event()  # set while nothing is under way
        self._lock = threading.Lock()
        self.silent = False  # it has died
        self.busy = False  # somebody computes meanwhile

    @contextmanager
    def transfer(self, cut: Callable[[], None]) -> Iterator[None]:
        """One of them is under way, inside. cut: ends all of them."""
        with self._lock:
            self._under_way += 1
            if self._under_way == 1:
                self._rest = threading.Event()
                threading.Thread(target=self._watch, args=(self._rest, cut), name=NAME, daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                if not self._under_way:
                    self._rest.set()

    def _watch(self, rest: threading.Event, cut: Callable[[], None]) -> None:
        before, steps, most = self._arrived(), 0, FIRST
        while steps < (FIRST if self.busy else most):
            if rest.wait(self._patience() / STEPS):
                return
            now = self._arrived()
            steps, most = (steps + 1, most) if now == before else (0, STEPS)
            before = now
        self.silent = True
        cut()
