"""How many threads passes of few rows use: all, or fewer while other processes make that faster.

Such a pass, a decoding step for one, is a hundred small parallel loops, and each ends with its slowest thread. Where
another process has that thread's core, all threads wait for it, a hundred times. The system does not say when that
begins or ends, so it is tried. Layers of a pass, and decoding steps, are alike and can be compared.

    layers   after WINDOW layers in which the caller waited, the next ones run with half the threads; while it has fewer
             than all, every PAUSE_S seconds with twice as many. What is faster stays. A trial ends once it is slower.
    steps    every PAUSE_S seconds one step runs with half or twice as many; what is clearly faster stays

Only compiled kernels take part (kernels/team.py). Their results do not depend on threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from blendserve.kernels import team

T = TypeVar("T")
Seconds = Callable[[], float]

MAX_ROWS = 64  # of a pass: longer loops are worth all threads also beside other processes
WINDOW = 6  # layers that are compared
MIN_BUSY = 0.85  # share of a window's time that the caller computes; below it, it waited for other threads
PAUSE_S = 0.25  # between trials that no wait asked for
RECENT = 5  # steps whose median a trial is compared with
GAIN = 0.95  # of that median that a step's trial may take at most

RULE = (
    f"passes of up to {MAX_ROWS} rows use fewer threads while other processes make that faster, tried every "
    f"{PAUSE_S:g} s"
)


class LayerThreads:
    """The number of threads that one thread's passes use now."""

    def __init__(
        self,
        all_threads: Callable[[], int],
        clock: Seconds = time.perf_counter,
        cpu: Seconds = time.thread_time,
    ) -> None:
        """clock, cpu: seconds elapsed, and those in which the calling thread computed."""
        self.all_threads, self.clock, self.cpu = all_threads, clock, cpu
        self.threads = all_threads()
        self.not_before = -float("inf")  # on `clock`: the next trial

    def pass_of(self, n_rows: int) -> LayerPassThreads | None:
        """For a pass that begins with this many rows; None where there is no choice."""
        most = self.all_threads()
        self.threads = min(self.threads, most)
        return LayerPassThreads(self) if most > 1 and n_rows <= MAX_ROWS else None


class LayerPassThreads:
    """One pass's layers, timed. Passes may be nested between layers; each compares its own layers alone."""

    def __init__(self, shared: LayerThreads) -> None:
        self._shared = shared
        self._window: deque[tuple[float, float]] = deque(
            maxlen=WINDOW
        )  # seconds elapsed and computed, by layer
        self._threads = shared.threads  # of the layers in the window
        self._trial = 0  # threads that are tried; 0 = none
        self._trial_s: list[float] = []

    def layer(self, run: Callable[[], T]) -> T:
        """Run one layer with the threads that serve or are tried now."""
        shared = self._shared
        if reserved := team.leaves():  # nothing is learned from it: it has what other work leaves
            with team.at_most(max(1, shared.all_threads() - reserved)):
                return run()
        if self._threads != shared.threads:  # a nested pass changed it
            self._threads, self._trial, self._trial_s = shared.threads, 0, []
            self._window.clear()
        with team.at_most(self._trial or self._threads):
            began, computed = shared.clock(), shared.cpu()
            result = run()
            self._note(shared.clock() - began, shared.cpu() - computed)
        return result

    def _note(self, elapsed: float, computed: float) -> None:
        if self._trial:
            self._trial_s.append(elapsed)
            self._judge(sum(elapsed for elapsed, _ in self._window))
            return
        self._window.append((elapsed, computed))
        if len(self._window) == WINDOW and self._shared.clock() >= self._shared.not_before:
            self._trial = self._next_trial()

    def _next_trial(self) -> int:
        """Threads to try now; 0 = none."""
        most = self._shared.all_threads()
        if self._threads < most:
            return min(most, 2 * self._threads)
        elapsed, computed = map(sum, zip(*self._window, strict=True))
        return self._threads // 2 if computed < MIN_BUSY * elapsed else 0

    def _judge(self, usual_s: float) -> None:
        """End a trial that is lost or won. usual_s: of the window before it."""
        is_lost = sum(self._trial_s) >= usual_s
        if not is_lost and len(self._trial_s) < WINDOW:
            return
        shared, tried, self._trial, self._trial_s = self._shared, self._trial, 0, []
        if is_lost and 1 < tried < shared.threads:
            self._trial = tried // 2  # one core more or less may make no difference
        elif is_lost or tried < shared.threads:
            shared.not_before = (
                shared.clock() + PAUSE_S
            )  # a won trial with more threads may be luck: look again at once
        if not is_lost:
            shared.threads = tried


class _OfThisThread(threading.local):
    def __init__(self) -> None:
        self.layers = LayerThreads(torch.get_num_threads)


_of_this_thread = _OfThisThread()


def threads_of_pass(n_rows: int, device: torch.device) -> LayerPassThreads | None:
    """For a pass of the calling thread; None where there is no choice."""
    return _of_this_thread.layers.pass_of(n_rows) if device.type == "cpu" else None


def limit_threads(n_rows: int, device: torch.device) -> AbstractContextManager[None]:
    """Inside, kernels for few rows run with the threads that the calling thread's last passes ended with."""
    is_limited = n_rows <= MAX_ROWS and device.type == "cpu"
    return team.at_most(_of_this_thread.layers.threads if is_limited else None)


class StepThreads:
    """The number of threads of native decoding steps."""

    def __init__(self, all_threads: Callable[[], int], clock: Seconds = time.perf_counter) -> None:
        self._all, self._clock = all_threads, clock
        self.threads = all_threads()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._trial_at = clock() + PAUSE_S
        self._tries_more = False

    def run(self, step: Callable[[], Tensor]) -> Tensor:
        """One step with the threads that serve or are tried now."""
        most, began = self._all(), self._clock()
        self.threads = min(self.threads, most)
        is_trial = len(self._recent) == RECENT and began >= self._trial_at and most > 1
        threads = self._tried(most) if is_trial else self.threads
        with team.at_most(threads):
            out = step()
        elapsed = self._clock() - began
        if not is_trial:
            self._recent.append(elapsed)
            return out
        self._trial_at = self._clock() + PAUSE_S
        if elapsed < GAIN * sorted(self._recent)[RECENT // 2]:
            self.threads = threads
            self._recent.clear()
        return out

    def _tried(self, most: int) -> int:
        """Half and twice as many in turns, where that is possible."""
        self._tries_more = self.threads == 1 or (self.threads < most and not self._tries_more)
        return min(most, self.threads * 2) if self._tries_more else self.threads // 2
