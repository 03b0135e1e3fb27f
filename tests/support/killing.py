"""Processes that are killed at a chosen moment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from tests.support.forked import process


def run_and_kill(
    work: Callable[..., None], *args: Any, when: Callable[[list[Any]], bool], delay_s: float = 0.0
) -> tuple[list[Any], int | None]:
    """Run `work(connection, *args)` in a process of its own, and kill it `delay_s` after its messages satisfy `when`.

    Returns all of its messages and its exit code; it ends on its own where `when` never holds.
    """
    heard: list[Any] = []
    with process(work, *args) as (running, line):
        with contextlib.suppress(EOFError, OSError):
            while True:  # until the process ends, and the connection with it
                heard.append(line.recv())
                if when(heard):
                    time.sleep(delay_s)  # allow: the moment of a real kill
                    running.kill()
        running.join()
        return heard, running.exitcode
