"""A process that answers requests, both as lines of JSON: the module that runs in it ends with `serve(start)`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from blendserve.errors import BlendserveError, InputError

W = TypeVar("W", bound="WorkerProcess")
ROOT = Path(__file__).parents[2]


class WorkerProcess:
    """Starts `python -m MODULE`, and sends it its task. A context manager; the process is killed at the end."""

    def __init__(
        self,
        module: str,
        task: Any,
        log: Path,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> None:
        """log: file of its stderr. launcher: words before the command. Raises InputError when it ends at once."""
        self._log, self._lock = log, threading.Lock()
        inherited = os.environ if environment is None else environment
        path = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH", "")]))
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [*launcher, sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**inherited, "PYTHONPATH": path},
            )
        self.pid = self._process.pid
        self.about: Any = self.call(task)

    def call(self, request: Any) -> Any:
        """The answer to one request; safe to call from several threads. Raises InputError when the process has ended."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            with self._lock:
                print(json.dumps(request), file=self._process.stdin, flush=True)
                answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            why = (self._log.read_text().strip() or f"exit code {self._process.wait()}").splitlines()[-1]
            raise InputError(f"a measured process ended early: {why}")
        return json.loads(answer)

    def __enter__(self: W) -> W:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def serve(start: Callable[[Any], tuple[Any, Callable[[Any], Any]]]) -> None:
    """All of the process: `start` gets the task -> the first answer, and the function that answers each request."""
    try:
        about, answer = start(json.loads(sys.stdin.readline()))
        print(json.dumps(about), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), flush=True)
    except BlendserveError as error:
        sys.exit(f"{error}")
