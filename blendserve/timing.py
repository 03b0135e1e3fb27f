"""The only place that reads a clock or waits for a device."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Clock:
    """Adds up the seconds spent in named stages of one request.

    On a GPU, a stage's begin and end are events in the stream, so that the host does not wait for the device.
    """

    def __init__(
        self, device: torch.device | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._cuda = device is not None and device.type == "cuda"
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []  # not added up yet
        self._now = now
        self._start = now()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process goes on from the time of pickling, as a clock of the host."""
        return _resumed, (self.elapsed(), dict(self.seconds))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure a block. Stages may nest; the outer one includes the inner one."""
        if self._cuda:
            start = self._mark()
            try:
                yield
            finally:
                self._pending.append((name, start, self._mark()))
        else:
            began = self._now()
            try:
                yield
            finally:
                self._seconds[name] += self._now() - began

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage, of ended stages. Waits for the device."""
        for name, start, end in self._pending:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1e3
        self._pending.clear()
        return self._seconds

    def elapsed(self) -> float:
        """Seconds since the clock was made. Waits for the device."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        return self._now() - self._start

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _resumed(elapsed_s: float, seconds: dict[str, float]) -> Clock:
    clock = Clock()
    clock._start -= elapsed_s
    clock._seconds.update(seconds)
    return clock
