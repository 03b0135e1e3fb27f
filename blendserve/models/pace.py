"""How many threads a pass of few rows runs with: all of them, unless others' work makes that slower than fewer.

Such a pass, a decoding step for one, is a hundred small loops, and each ends when its last thread does. Where somebody
else has that thread's core, everybody waits for it, a hundred times; a thread alone waits for nobody. Nothing tells when
that begins or ends (who asks for no second core does not see it free), so it is tried, within the pass: layers are alike.

    all threads     when WINDOW layers left the caller waiting: the next ones run with half, or less; what is faster stays
    fewer           every PAUSE seconds the next layers run with twice as many, which stay if that is faster

A trial ends as soon as it has taken as long as what it is compared with. Only compiled kernels take part
(kernels/team.py), whose results do not depend on threads; so no bits depend on what is found here.
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

ROWS = 64  # of a pass, at most: longer loops are worth all threads beside others' work, too
WINDOW = 6  # layers that are compared
WORKED = 0.85  # of a window's time: a caller that computes for less of it was kept waiting
PAUSE = 0.25  # seconds between trials that nothing called for

RULE = (
    f"passes of up to {ROWS} rows use fewer threads while other processes make that faster, tried every "
    f"{PAUSE:g} s"
)


class Pacer:
    """What one thread has found so far."""

    def __init__(
        self,
        all_threads: Callable[[], int],
        clock: Seconds = time.perf_counter,
        cpu: Seconds = time.thread_time,
    ) -> None:
        """clock, cpu: seconds that went by, and those of them in which the calling thread computed."""
        self.all_threads, self.clock, self.cpu = all_threads, clock, cpu
        self.threads = all_threads()
        self.not_before = -float("inf")  # on `clock`: the next trial

    def pass_of(self, rows: int) -> Pace | None:
        """For a pass that begins with so many rows; None where there is nothing to choose."""
        most = self.all_threads()
        self.threads = min(self.threads, most)
        return Pace(self) if most > 1 and rows <= ROWS else None


class Pace:
    """One pass's layers, timed. Passes may be nested between layers; each compares its own alone."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._window: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # seconds gone and computed, by layer
        self._with = pacer.threads  # threads in the window
        self._trial = 0  # threads that are tried; 0 = none are
        self._tried: list[float] = []

    def layer(self, run: Callable[[], T]) -> T:
        """One layer, with as many threads as it is its turn for."""
        pacer = self._pacer
        if left := team.leaves():  # nothing is learnt of it: it has what others leave
            with team.at_most(max(1, pacer.all_threads() - left)):
                return run()
        if self._with != pacer.threads:  # a pass in between has found something
            self._with, self._trial, self._tried = pacer.threads, 0, []
            self._window.clear()
        with team.at_most(self._trial or self._with):
            began, computed = pacer.clock(), pacer.cpu()
            done = run()
            self._note(pacer.clock() - began, pacer.cpu() - computed)
        return done

    def _note(self, gone: float, computed: float) -> None:
        if self._trial:
            self._tried.append(gone)
            self._judge(sum(gone for gone, _ in self._window))
        else:
            self._window.append((gone, computed))
            if len(self._window) == WINDOW and self._pacer.clock() >= self._pacer.not_before:
                self._trial = self._other()

    def _other(self) -> int:
        """Threads to try now; 0 = none."""
        most = self._pacer.all_threads()
        if self._with < most:
            return min(most, 2 * self._with)
        gone, computed = map(sum, zip(*self._window, strict=True))
        return self._with // 2 if computed < WORKED * gone else 0

    def _judge(self, usual: float) -> None:
        """End a trial that is lost or won; `usual`: seconds of the window before it."""
        is_lost = sum(self._tried) >= usual
        if not is_lost and len(self._tried) < WINDOW:
            return
        pacer, tried, self._trial, self._tried = self._pacer, self._trial, 0, []
        if is_lost and 1 < tried < pacer.threads:
            self._trial = tried // 2  # a core more or less that somebody has may make no difference
        elif is_lost or tried < pacer.threads:
            pacer.not_before = pacer.clock() + PAUSE  # a won one with more threads may be luck: see at once
        if not is_lost:
            pacer.threads = tried


class _Own(threading.local):
    def __init__(self) -> None:
        self.pacer = Pacer(torch.get_num_threads)


_own = _Own()


def pass_of(rows: int, device: torch.device) -> Pace | None:
    """For a pass of the calling thread; None where there is nothing to choose."""
    return _own.pacer.pass_of(rows) if device.type == "cpu" else None


def as_found(rows: int, device: torch.device) -> AbstractContextManager[None]:
    """Inside, kernels run with as many threads as the calling thread's last passes of so few rows were left with."""
    return team.at_most(_own.pacer.threads if rows <= ROWS and device.type == "cpu" else None)


class StepThreads:
    """How many threads a step takes: all, or fewer while other processes make that faster.

    Every PAUSE seconds one step runs with half or twice as many, and the faster number stays. No result depends on it.
    """

    PAUSE = 0.25  # seconds between trials
    GAIN = 0.95  # of the usual time that a trial must take at most

    def __init__(
        self, all_threads: Callable[[], int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._all, self._clock = all_threads, clock
        self.threads = all_threads()
        self._recent: deque[float] = deque(maxlen=5)
        self._trial_at = clock() + self.PAUSE
        self._tries_more = False

    def run(self, step: Callable[[], Tensor]) -> Tensor:
        """One step, with the threads that serve now or with those that are tried."""
        most, began = self._all(), self._clock()
        self.threads = min(self.threads, most)
        is_trial = len(self._recent) == self._recent.maxlen and began >= self._trial_at and most > 1
        threads = self._tried(most) if is_trial else self.threads
        with team.at_most(threads):
            out = step()
        elapsed = self._clock() - began
        if not is_trial:
            self._recent.append(elapsed)
            return out
        self._trial_at = self._clock() + self.PAUSE
        if elapsed < self.GAIN * sorted(self._recent)[len(self._recent) // 2]:
            self.threads = threads
            self._recent.clear()
        return out

    def _tried(self, most: int) -> int:
        """Half and twice as many in turns, where there are such."""
        self._tries_more = self.threads == 1 or (self.threads < most and not self._tries_more)
        return min(most, self.threads * 2) if self._tries_more else self.threads // 2
