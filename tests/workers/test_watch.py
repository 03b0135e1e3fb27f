"""A cluster without a machine left is waited for, and not for ever."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest

from blendserve.errors import ClusterUnavailable, StoreError
from blendserve.workers import watch
from blendserve.workers.watch import watched

ROWS: list[dict[str, Any]] = [{"row": n} for n in range(3)]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 0.001)


def waiting(until: Event) -> Iterator[dict[str, Any]]:
    yield ROWS[0]
    until.wait()
    yield from ROWS[1:]


def test_rows_and_errors_come_as_they_are() -> None:
    def failing() -> Iterator[dict[str, Any]]:
        yield ROWS[0]
        raise StoreError("full")

    assert list(watched(iter(ROWS), lambda: False)) == ROWS
    rows = watched(failing(), lambda: True)
    assert next(rows) == ROWS[0]
    with pytest.raises(StoreError, match="full"):
        next(rows)


def test_where_no_machine_is_left_that_is_said_and_then_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "PATIENCE_S", 0.05)
    never = Event()
    rows = watched(waiting(never), lambda: False)
    assert next(rows) == ROWS[0]
    with pytest.raises(ClusterUnavailable, match="the same command goes on"):
        next(rows)
    never.set()
    assert len(caplog.records) == 1


def test_a_machine_that_comes_again_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long rows take while there is one: each look after the second lets the rows go on."""
    monkeypatch.setattr(watch, "PATIENCE_S", 60.0)
    looks, back = iter([False, False, True]), Event()

    def possible() -> bool:
        there = next(looks, True)
        if there:
            back.set()
        return there

    assert list(watched(waiting(back), possible)) == ROWS


def test_slow_rows_are_no_lost_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PATIENCE_S", 0.0)
    looks, back = iter(range(20)), Event()

    def possible() -> bool:
        if next(looks, None) is None:
            back.set()
        return True

    assert list(watched(waiting(back), possible)) == ROWS
