"""Stages add up, and on a GPU they do not wait for the device until the seconds are read."""

from __future__ import annotations

import pickle

import pytest

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
    copy = pickle.loads(pickle.dumps(clock))
    assert copy.elapsed() >= 10
    assert copy.seconds == clock.seconds
