"""The old names of tests/support/engines.py, until the last room imports from there."""

from __future__ import annotations

from blendserve.config import Config
from blendserve.engine.engine import Engine
from tests.support.engines import CONFIG, CONTEXT, PASSAGES, QUESTIONS, Listener, toy_engine
from tests.support.engines import toy_reader as reader
from tests.support.waiting import eventually as wait_for

__all__ = ["CONFIG", "CONTEXT", "PASSAGES", "QUESTIONS", "Listener", "engine", "reader", "wait_for"]


def engine(config: Config = CONFIG) -> Engine:
    return toy_engine(config=config)
