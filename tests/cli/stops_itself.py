"""Runs a script over a random reader and sends itself a SIGINT after some chunks, however fast the machine is."""

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
from tests.support.commands import stand_in


def run(line: Connection, log: Path, puts: int, script: Path, *arguments: str) -> None:
    """In its own process, whose stderr goes to `log`; the put of number `puts` is the last one before SIGINT."""
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

    with log.open("wb") as stderr:
        os.dup2(stderr.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    patch = pytest.MonkeyPatch()
    stand_in(patch.setattr)
    patch.setattr(LMDBStore, "put", counting(LMDBStore.put))
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
