"""A process that answers one request after the other: `start` gets its task, and returns what answers the requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from blendserve.errors import BlendserveError, InputError

W = TypeVar("W", bound="WorkerProcess")
Start = Callable[[Any], tuple[Any, Callable[[Any], Any]]]
"""task -> the first answer, and the function that answers each request"""
SPAWN = get_context("spawn")


class WorkerProcess:
    """A fresh process, killed at the end; it ends with its parent, too. A context manager."""

    def __init__(self, start: Start, task: Any) -> None:
        """start: a function of a module. Raises BlendserveError as it does, InputError when the process ends."""
        self._lock = threading.Lock()
        self._line, there = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_serve, args=(there, start), daemon=True)
        self._process.start()
        there.close()
        self.pid = int(self._process.pid or 0)
        self.about: Any = self.call(task)

    def call(self, request: Any) -> Any:
        """The answer to one request; safe to call from several threads. Raises BlendserveError."""
        try:
            with self._lock:
                self._line.send(request)
                answer = self._line.recv()
        except (EOFError, OSError):
            raise InputError("a measured process ended early: see its traceback above") from None
        if isinstance(answer, BlendserveError):
            raise answer
        return answer

    def __enter__(self: W) -> W:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _serve(line: Connection, start: Start) -> None:
    """All of the process."""
    try:
        about, answer = start(line.recv())
        line.send(about)
        with suppress(EOFError):
            while True:
                line.send(answer(line.recv()))
    except BlendserveError as error:
        line.send(error)
