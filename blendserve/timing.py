"""The only place that reads a clock or waits for a device."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Adds up the seconds spent in named stages of one request.

    On a GPU the stages of a layer must not wait for it: their ends are marked in its stream, and looked at when the
    seconds are asked for.
    """

    def __init__(
        self, device: torch.device | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._cuda = device is not None and device.type == "cuda"
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)
        self._marked: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []  # not added up yet
        self._now = now
        self._start = now()

    def set_back(self, seconds: float, **stages: float) -> None:
        """So much had gone by elsewhere when this was made; of it, so much in these stages."""
        self._start -= seconds
        for name, spent in stages.items():
            self._seconds[name] += spent

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Stages may nest; each counts its own whole time."""
        if self._cuda:
            start = self._mark()
            try:
                yield
            finally:
                self._marked.append((name, start, self._mark()))
        else:
            began = self._now()
            try:
                yield
            finally:
                self._seconds[name] += self._now() - began

    @property
    def seconds(self) -> dict[str, float]:
        """By stage, of those that have ended; waits until the device has ended them too."""
        for name, start, end in self._marked:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1e3
        self._marked.clear()
        return self._seconds

    def elapsed(self) -> float:
        """Seconds since the clock was made, the device's work included."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        return self._now() - self._start

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
