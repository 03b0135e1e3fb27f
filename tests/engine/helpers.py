"""A toy engine: a random reader, passages of its own, KV in memory."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from functools import cache

from blendserve.config import BlendConfig, Config, DecodeConfig, PromptConfig, StoreConfig
from blendserve.core import Answer, Passage
from blendserve.engine.engine import Engine
from blendserve.engine.queued import Event, Failed, Finished, Piece
from blendserve.models.loader import Reader
from blendserve.models.toy import toy_reader
from blendserve.store import MemoryStore

CONTEXT = 1024
CONFIG = Config(
    prompt=PromptConfig(system="Be brief.", instruction="Read."),
    store=StoreConfig(kind="memory"),
    blend=BlendConfig(method="blend"),
    decode=DecodeConfig(max_new_tokens=12),
)
PASSAGES = tuple(
    Passage(text, title)
    for title, text in (
        ("Cats", "The cat sat on the mat and looked at the moon, which was round."),
        ("Dogs", "A dog barked at the mailman all morning long, and then it slept."),
        ("Snow", "Snow fell on the hills, and nobody came to the house by the river."),
        ("Bread", "Bread is made of flour, water and salt; it rises when yeast is at work."),
        ("Ships", "The ship left the harbour with nine sailors and a load of timber."),
        ("Clocks", "A clock that has stopped is right twice a day, or so they say."),
    )
)
QUESTIONS = (
    "Who sat on the mat?",
    "What did the dog do in the morning?",
    "Where did the snow fall, and who came?",
    "What is bread made of?",
)


@cache
def reader() -> Reader:
    return toy_reader(CONTEXT)


def engine(config: Config = CONFIG) -> Engine:
    return Engine(config, reader(), MemoryStore(2**30))


class Listener:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.seen: list[Event] = []

    def __call__(self, event: Event) -> None:
        self._events.put(event)

    def next(self) -> Event:
        self.seen.append(self._events.get(timeout=300))
        return self.seen[-1]

    def answer(self) -> Answer:
        """The end of it; raises what failed."""
        while True:
            event = self.next()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                pieces = "".join(e.text for e in self.seen if isinstance(e, Piece))
                assert pieces == event.answer.text
                return event.answer


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not come about within 30 s")
