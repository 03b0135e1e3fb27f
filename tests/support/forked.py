"""Processes forked from one that has imported what most of them need, and used nothing of it: each starts at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "blendserve.engine.engine",
        "blendserve.serve.server",
        "transformers.models.llama.modeling_llama",  # takes longer than all others together
        "tests.support.stores",
    ]
)


@contextmanager
def process(work: Callable[..., None], *args: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """Runs `work(connection, *args)`; killed at the end if it still runs."""
    here, there = CONTEXT.Pipe()
    running = CONTEXT.Process(target=work, args=(there, *args))
    running.start()
    there.close()
    try:
        yield running, here
    finally:
        running.kill()
        running.join()


def run(work: Callable[..., None], *args: Any) -> None:
    """Run it to its end in another process."""
    with process(work, *args) as (running, _):
        running.join()
        assert running.exitcode == 0
