"""A forked child lacks its parent's threads: what the parent has opened fails there at once, and nothing waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch

from blendserve.config import ModelConfig
from blendserve.engine.engine import Engine
from blendserve.errors import ModelError, StoreUnavailable
from blendserve.fetch.write_queue import WriteQueue
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import load_model
from blendserve.models.runner import append
from blendserve.retrieve.embedder import Embedder
from tests.support.engines import PASSAGES, QUESTIONS, toy_engine, toy_model
from tests.support.forked import process

MOST_S = 20  # that a call in a child may take; the kernel ends the child then
SOME = list(PASSAGES[:2])
CHUNK = b"c" * 32


def queueing() -> Callable[[], object]:
    queue = WriteQueue()
    queue.add(CHUNK, 1, lambda: None)
    queue.flush()  # its thread has run a task
    return lambda: queue.add(CHUNK, 1, lambda: None)


# By name: what a parent makes and uses, and what its child does with it.
USES: dict[str, Callable[[], Callable[[], object]]] = {
    "answer": lambda: engine_call(lambda engine: engine.answer(QUESTIONS[0], SOME)),
    "answer of a stream": lambda: streaming(),
    "precompute": lambda: engine_call(lambda engine: engine.precompute(list(PASSAGES))),
    "missing": lambda: engine_call(lambda engine: engine.missing(SOME)),
    "calibrate": lambda: engine_call(lambda engine: engine.calibrate()),
    "tenant": lambda: engine_call(lambda engine: engine.tenant("a").answer(QUESTIONS[0], SOME)),
    "model": lambda: engine_call(
        lambda engine: append(engine.model.decoder, KVCache(engine.model.decoder, 64), 0, [1] * 64)
    ),
    "new model": lambda: engine_call(lambda _: load_model(ModelConfig(name="random:tiny"))),
    "new embedder": lambda: engine_call(lambda _: Embedder.load()),
    "embedder": lambda: embedding(),
    "store": lambda: engine_call(lambda engine: engine.store.stats()),
    "queue of writes": lambda: queueing(),
}


def engine_call(use: Callable[[Engine], object]) -> Callable[[], object]:
    engine = toy_engine()
    engine.precompute(SOME)
    engine.answer(QUESTIONS[0], SOME, max_new_tokens=2)
    return lambda: use(engine)


def streaming() -> Callable[[], object]:
    stream = toy_engine().stream(QUESTIONS[0], SOME)
    return lambda: list(stream)


def embedding() -> Callable[[], object]:
    embedder = Embedder.load()
    embedder.embed_question(QUESTIONS[0])
    return lambda: embedder.embed_question(QUESTIONS[0])


def use_in_children(connection: Connection) -> None:
    """Send by name how each child ended: 0 for the right error."""
    torch.set_num_threads(2)  # a team of OpenMP's, which the child lacks
    toy_model()
    connection.send({name: ending_of(make()) for name, make in USES.items()})


def ending_of(use: Callable[[], object]) -> int:
    torch.ones(1 << 20).add(1).sum()
    child = os.fork()
    if child == 0:
        signal.alarm(MOST_S)
        status = 1
        try:
            use()
        except (ModelError, StoreUnavailable):
            status = 0
        finally:
            os._exit(status)  # allow: the child of a fork must not run what its parent does at its end
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only Unix forks")
def test_what_a_parent_used_fails_at_once_in_its_child() -> None:
    with process(use_in_children) as (_, connection):
        assert connection.poll(240)
        assert connection.recv() == dict.fromkeys(USES, 0)
