"""Silence of a link: told from a slow connection, a slow service and a slow machine."""

from __future__ import annotations

import threading
from itertools import count, repeat

import pytest

from blendserve.store.kdn.guard import FIRST, NAME, STEPS, Guard

LONG = 60.0


def test_where_nothing_comes_the_transfers_are_cut() -> None:
    cut = threading.Event()
    guard = Guard(lambda: 7, lambda: 0.01)
    with guard.transfer(cut.set):
        assert cut.wait(LONG)
    assert guard.silent


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("before", [0, 1, 5])
def test_as_many_steps_without_a_byte_are_silence_more_before_the_first_and_beside_a_prefill(
    before: int, busy: bool
) -> None:
    looks, cut = count(), threading.Event()

    def arrived() -> int:
        return min(next(looks), before)

    guard = Guard(arrived, lambda: 0.001)
    guard.busy = busy
    with guard.transfer(cut.set):
        assert cut.wait(LONG)
    assert next(looks) == 1 + before + (STEPS if before and not busy else FIRST)


def test_while_something_comes_at_every_look_nothing_is_cut() -> None:
    looks, enough, cut = count(), threading.Event(), threading.Event()

    def arrived() -> int:
        if (n := next(looks)) >= 3 * FIRST:
            enough.set()
        return n

    guard = Guard(arrived, lambda: 0.001)
    with guard.transfer(cut.set):
        assert enough.wait(LONG)
    assert not guard.silent
    assert not cut.is_set()


def test_what_ends_is_not_watched_any_more() -> None:
    looks = iter(repeat(0, 1))  # a second look would be an error
    guard = Guard(lambda: next(looks), lambda: LONG)
    before = set(threading.enumerate())
    with guard.transfer(lambda: None), guard.transfer(lambda: None):
        (watching,) = (t for t in threading.enumerate() if t.name == NAME and t not in before)
    watching.join(LONG)
    assert not watching.is_alive()
    assert not guard.silent
