"""Stages add up, and on a GPU nobody waits for it until the seconds are asked for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from blendserve.timing import Clock


def test_stages_nest_and_add_up() -> None:
    clock = Clock()
    for _ in range(2):
        with clock.stage("outer"), clock.stage("inner"):
            time.sleep(0.01)
    assert clock.elapsed() >= clock.seconds["outer"] >= clock.seconds["inner"] >= 0.02
    assert clock.seconds["never"] == 0


def test_a_stage_that_fails_counts_too() -> None:
    clock = Clock()
    with pytest.raises(KeyError), clock.stage("broken"):
        raise KeyError
    assert clock.seconds["broken"] > 0


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
    assert dict(clock.seconds) == pytest.approx({"load": 0.015, "part": 0.005, "all": 0.015})
    assert device.waits == 5
    clock.seconds["all"] -= 0.005
    assert clock.seconds["all"] == pytest.approx(0.01)
    assert device.waits == 5
