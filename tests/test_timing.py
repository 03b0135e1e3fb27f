"""Stages add up, and on a GPU they do not wait for the device until the seconds are read."""

from __future__ import annotations

import pickle
from contextlib import suppress

from blendserve.timing import Clock
from tests.support.waiting import ManualClock


def test_stages_nest_add_up_and_count_when_they_fail() -> None:
    time = ManualClock(0)
    clock = Clock(now=time)
    for _ in range(2):
        with clock.stage("outer"):
            time.advance(1)
            with clock.stage("inner"):
                time.advance(2)
    with suppress(KeyError), clock.stage("broken"):
        time.advance(4)
        raise KeyError
    assert dict(clock.seconds) == {"inner": 4, "outer": 6, "broken": 4}
    assert clock.elapsed() == 10
    copy = pickle.loads(pickle.dumps(clock))
    assert copy.elapsed() >= 10
    assert copy.seconds == clock.seconds
