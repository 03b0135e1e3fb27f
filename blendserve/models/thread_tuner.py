"""How many threads passes of few rows use: all, or fewer while other processes make that faster.

Such a pass, a decoding step for one, is a hundred small parallel loops, and each ends with its slowest thread. Where
another process has that thread's core, all threads wait for it, a hundred times. The system does not say when that
begins or ends, so it is tried, on work that can be compared: layers of one pass, or native decoding steps.

After WINDOW such units in which the caller waited, the next ones run with half the threads; while fewer than all serve,
every PAUSE_S seconds with twice as many. The faster number stays. A trial ends as soon as it is slower.

Only compiled kernels take part (kernels/team.py). Their results do not depend on threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

from blendserve.kernels import team

T = TypeVar("T")
Seconds = Callable[[], float]

MAX_ROWS = 64  # of a pass: longer loops are worth all threads also beside other processes
WINDOW = 6  # units that are compared
MIN_BUSY = 0.85  # share of a window's time that the caller computes; below it, it waited for other threads
PAUSE_S = 0.25  # between trials that no wait asked for

RULE = (
    f"passes of up to {MAX_ROWS} rows use fewer threads while other processes make that faster, tried every "
    f"{PAUSE_S:g} s"
)


class ThreadTuner(threading.local):
    """The number of threads for the calling thread's work of few rows: each thread that shares it has its own."""

    def __init__(
        self,
        all_threads: Callable[[], int] = torch.get_num_threads,
        clock: Seconds = time.perf_counter,
        cpu: Seconds = time.thread_time,
    ) -> None:
        """clock, cpu: seconds elapsed, and those in which the calling thread computed."""
        self.all_threads = all_threads
        self.clock = clock
        self.cpu = cpu
        self.threads = all_threads()
        self.not_before = -float("inf")  # on `clock`: the next trial
        self.tries_more = False  # the last trial was of more threads


class Series(threading.local):
    """Units that cost alike, timed. Series may be nested between units; each compares its own units alone.

    Threads may share it: each has its own window and trial.
    """

    def __init__(self, tuner: ThreadTuner) -> None:
        self._tuner = tuner
        self._window = deque[tuple[float, float]](maxlen=WINDOW)  # seconds elapsed and computed, by unit
        self._threads = tuner.threads  # of the units in the window
        self._trial = 0  # threads that are tried; 0 = none
        self._trial_s: list[float] = []

    def run(self, unit: Callable[[], T]) -> T:
        """Run one unit with the current number of threads, or with the one on trial."""
        tuner = self._tuner
        most = tuner.all_threads()
        if reserved := team.leaves():  # other work has these cores: its times say nothing
            with team.at_most(max(1, most - reserved)):
                return unit()
        tuner.threads = min(tuner.threads, most)
        if self._threads != tuner.threads:  # a nested series changed it
            self._threads = tuner.threads
            self._trial = 0
            self._trial_s = []
            self._window.clear()
        with team.at_most(self._trial or self._threads):
            began = tuner.clock()
            computed = tuner.cpu()
            result = unit()
            self._note(tuner.clock() - began, tuner.cpu() - computed, most)
        return result

    def _note(self, elapsed: float, computed: float, most: int) -> None:
        if self._trial:
            self._trial_s.append(elapsed)
            self._judge(sum(elapsed for elapsed, _ in self._window))
            return
        self._window.append((elapsed, computed))
        if len(self._window) == WINDOW and self._tuner.clock() >= self._tuner.not_before:
            self._trial = self._next_trial(most)

    def _next_trial(self, most: int) -> int:
        """Threads to try now; 0 = none. Where both could be better, more and fewer in turns."""
        tuner = self._tuner
        threads = self._threads
        elapsed, computed = map(sum, zip(*self._window, strict=True))
        can_be_fewer = threads > 1 and computed < MIN_BUSY * elapsed
        tuner.tries_more = threads < most and not (can_be_fewer and tuner.tries_more)
        if tuner.tries_more:
            return min(most, 2 * threads)
        return threads // 2 if can_be_fewer else 0

    def _judge(self, usual_s: float) -> None:
        """End a trial that is lost or won. usual_s: of the window before it. A trial may be behind by one unit."""
        n = len(self._trial_s)
        is_lost = sum(self._trial_s) >= usual_s * min(n + 1, WINDOW) / WINDOW
        if not is_lost and n < WINDOW:
            return
        tuner = self._tuner
        tried = self._trial
        self._trial = 0
        self._trial_s = []
        if is_lost and 1 < tried < tuner.threads:
            self._trial = tried // 2  # one core more or less may make no difference
        elif (
            is_lost or tried < tuner.threads
        ):  # a won trial with more threads may be luck: look again at once
            tuner.not_before = tuner.clock() + PAUSE_S
        if not is_lost:
            tuner.threads = tried


_tuner = ThreadTuner()


def layer_series(n_rows: int, device: torch.device) -> Series | None:
    """A series for the layers of a pass of the calling thread, which begins with this many rows; None: no choice."""
    has_choice = device.type == "cpu" and n_rows <= MAX_ROWS and torch.get_num_threads() > 1
    return Series(_tuner) if has_choice else None
