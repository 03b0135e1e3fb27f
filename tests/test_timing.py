"""Stages add up, and on a GPU they do not wait for the device until the seconds are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blendserve.timing import Clock
from tests.support.waiting import ManualClock


def fail_after(time: ManualClock, seconds: float) -> None:
    time.advance(seconds)
    raise KeyError


def test_stages_nest_add_up_and_count_when_they_fail() -> None:
    time = ManualClock(0)
    clock = Clock(now=time)
    for _ in range(2):
        with clock.stage("outer"):
            time.advance(1)
            with clock.stage("inner"):
                time.advance(2)
    with pytest.raises(KeyError), clock.stage("broken"):
        fail_after(time, 4)
    assert dict(clock.seconds) == {"inner": 4, "outer": 6, "broken": 4}
    assert clock.elapsed() == 10
    clock.set_back(5, inner=3)
    assert (clock.elapsed(), clock.seconds["inner"]) == (15, 7)


class Device:
    """A stream on which each mark comes 5 ms after the one before."""

    def __init__(self) -> None:
        self.now_ms, self.waits = 0, 0

    def event(self, enable_timing: bool) -> Any:
        device = self

        class Event:
            def record(self, stream: object) -> None:
                device.now_ms += 5
                self.at = device.now_ms

            def synchronize(self) -> None:
                device.waits += 1

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        assert enable_timing
        return Event()


def test_on_a_gpu_stages_are_marked_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    clock = Clock(torch.device("cuda", 0))
    for _ in range(3):
        with clock.stage("load"):
            pass
    with clock.stage("all"), clock.stage("part"):
        pass
    assert device.waits == 0
    for _ in range(2):  # marks are read once
        assert dict(clock.seconds) == pytest.approx({"load": 0.015, "part": 0.005, "all": 0.015})
        assert device.waits == 5
