"""A toy server as a process of its own, with its store on disk."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from blendserve.engine.engine import Engine
from blendserve.serve.child import Child
from blendserve.serve.config import ServeConfig
from blendserve.serve.running import run
from blendserve.store import LMDBStore
from tests.engine.helpers import CONFIG, reader
from tests.forked import process
from tests.serve.helpers import library


def serve(line: Connection, folder: Path) -> None:
    """In its process: says where it listens; what it prints goes to the end of `folder`/log."""
    with (folder / "log").open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with Engine(CONFIG, reader(), LMDBStore(folder / "kv", 2**27)) as engine:
        engine.precompute([])  # the prefix
        run(engine, library(folder, engine), ServeConfig(port=0, drain_s=20), line.send)


class ToyServer:
    """`with ToyServer(folder) as server:` it listens at `server.url`; does what a `Child` of serve/child.py does."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._process, line = self._stack.enter_context(process(serve, folder))
        self.pid = self._process.pid
        self.url = str(line.recv()).removeprefix("Listening on ").strip()

    memory_mb = Child.memory_mb

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self._process.kill()
        self._process.join()

    def wait(self) -> int | None:
        """Until it ends -> exit code."""
        self._process.join()
        return self._process.exitcode

    def stop(self) -> int | None:
        """SIGTERM, and wait -> exit code."""
        self.terminate()
        return self.wait()

    def __enter__(self) -> ToyServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
