"""Runs a script over the real store and a random reader, and sends itself a SIGINT as soon as so many chunks are stored.

Where it stops does not depend on the speed of the machine.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from blendserve.store import LMDBStore
from tests.cli.stand_in import stand_in


def stop_after(puts: int) -> None:
    """From now on, the put of this number is the last one before SIGINT, which the main thread receives."""
    done = 0

    def counting(put: Callable[..., bool]) -> Callable[..., bool]:
        def counted(*args: Any, **options: Any) -> bool:
            nonlocal done
            stored = put(*args, **options)
            done += 1
            if done == puts:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return stored

        return counted

    LMDBStore.put = counting(LMDBStore.put)  # type: ignore[method-assign]
    LMDBStore.put_uncoded = counting(LMDBStore.put_uncoded)  # type: ignore[method-assign]


def run(line: Connection, log: Path, puts: int, script: Path, *arguments: str) -> None:
    """In a process of its own, whose errors go to `log`."""
    with log.open("wb") as told:
        os.dup2(told.fileno(), 2)
    # A shell's background jobs ignore it, and all they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stand_in(pytest.MonkeyPatch().setattr)
    stop_after(puts)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
