"""What may be waited in one request: moments in which several threads wait count once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Deadline:
    """So many seconds of waiting. Safe to share between threads."""

    def __init__(self, seconds: float, now: Callable[[], float] | None = None) -> None:
        """now: a clock; default: time.monotonic."""
        self._seconds, self._waited, self._now = seconds, 0.0, now or time.monotonic
        self._waiting, self._since = 0, 0.0  # threads, and when the first of them began
        self._lock = threading.Lock()

    @property
    def waited(self) -> float:
        """Seconds in which somebody waited."""
        with self._lock:
            return self._waited + (self._now() - self._since if self._waiting else 0.0)

    @property
    def left(self) -> float:
        """Seconds; 0 when it is over."""
        return max(0.0, self._seconds - self.waited)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """This thread waits, inside."""
        with self._lock:
            if not self._waiting:
                self._since = self._now()
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self._waited += self._now() - self._since
