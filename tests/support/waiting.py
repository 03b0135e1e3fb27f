"""Waiting in tests: one poll, and a clock that stands until a test advances it."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
WAITS = {"wait", "join", "_wait_for_tstate_lock"}  # functions of `threading`; the last is join's before 3.13


def eventually(condition: Callable[[], T], timeout_s: float = 180.0) -> T:
    """The first true value of the condition. Raises AssertionError when none comes within the timeout."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, f"the condition stayed false for {timeout_s:g} s"
        time.sleep(0.001)  # allow: the one poll of the suite
    return value


def is_blocked(thread: threading.Thread) -> bool:
    """Whether the thread waits for a condition, an event or another thread. One that is starting does not."""
    gc.disable()  # before Python 3.12.1 a collection within the next call may never end (gh-106883)
    frame = sys._current_frames().get(thread.ident or 0)  # allow: of Python, not of the package
    gc.enable()
    code = frame.f_code if frame else None
    return code is not None and code.co_filename == threading.__file__ and code.co_name in WAITS


class ManualClock:
    """A clock for any `clock` argument: called, it gives seconds; it has what stores read of `time`, too."""

    def __init__(self, now_ns: int = 1_700_000_000_000_000_000) -> None:
        self._now_ns = now_ns

    @property
    def now(self) -> float:
        """Seconds since 1970."""
        return self._now_ns / 1e9

    def __call__(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return self._now_ns

    def advance(self, seconds: float) -> None:
        self._now_ns += round(seconds * 1e9)

    sleep = advance  # sleeping costs a test no time
