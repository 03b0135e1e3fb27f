"""Engines and requests over a random toy model behind the bundled tokenizer: what tests above the blender start from.

toy_reader()            the model and its tokenizer, loaded once for each process; tests must not change it
toy_engine()            an Engine over it, with KV in memory; `with` closes its store
toy_batch(engine)       a BatchEngine over an engine, whose scheduler is not started
queued(batch, ...)      a question as the scheduler takes it, and the Listener that collects its events
submit(batch, ...)      the same, submitted
seen(answer)            an answer as a dictionary, without its timings
CONFIG                  of every toy engine unless told otherwise: method `blend`, as `auto` measures the machine first
PASSAGES, QUESTIONS     six titled passages, four questions; `passages_of(turn)` are those of a conversation's turn
EMPTY_PASSAGES          passages without text: one has a title
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from functools import cache
from typing import Any

from blendserve.config import BlendConfig, Config, DecodeConfig, PromptConfig, StoreConfig, changed
from blendserve.core import Answer, BlendReport, Passage
from blendserve.engine.batching import BatchEngine
from blendserve.engine.engine import Engine
from blendserve.engine.queued import Event, Failed, Finished, Piece, QueuedRequest
from blendserve.engine.request import Request, split_options
from blendserve.models.loader import Reader
from blendserve.models.toy import toy_reader as load_toy_reader
from blendserve.store import KVStore, MemoryStore

CONTEXT = 1024  # tokens
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
EMPTY_PASSAGES = (Passage("", "Empty but for its title"), Passage("  "))
QUESTIONS = (
    "Who sat on the mat?",
    "What did the dog do in the morning?",
    "Where did the snow fall, and who came?",
    "What is bread made of?",
)


def passages_of(turn: int) -> list[Passage]:
    """Two passages for a turn of a conversation, of which no two of six turns have the same."""
    return [PASSAGES[turn % 6], PASSAGES[(turn + 2) % 6]]


@cache
def toy_reader() -> Reader:
    return load_toy_reader(CONTEXT)


def toy_engine(store: KVStore | None = None, config: Config = CONFIG, **sections: Any) -> Engine:
    """An engine without an index; `sections` change the configuration: `blend={"ratio": 0.5}`."""
    merged = {name: {**getattr(config, name).model_dump(), **part} for name, part in sections.items()}
    return Engine(changed(config, **merged), toy_reader(), store or MemoryStore(2**30))


def seen(answer: Answer) -> dict[str, Any]:
    return {k: v for k, v in answer.to_dict().items() if k != "timings"} | {"ids": answer.token_ids}


class Silent:
    """An Observer of a scheduler that keeps nothing."""

    def dequeued(self, method: str, seconds: float) -> None: ...

    def prefilled(self, report: BlendReport, loading: float) -> None: ...

    def step(self, batch: int) -> None: ...

    def token(self, method: str, seconds: float, first: bool) -> None: ...


def toy_batch(engine: Engine, **options: Any) -> BatchEngine:
    """options: arguments of BatchEngine, in place of these."""
    ours: dict[str, Any] = {
        "observer": Silent(),
        "slots": 3,
        "slot_tokens": None,
        "queue": 100,
        "gap_s": 0.0,
        "prefill_share": 0.0,
        "share_bytes": 2**20,
        "prefix_bytes": 2**20,
        "job_share": 0.5,
    }
    return BatchEngine(engine, **{**ours, **options})


class Listener:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.seen: list[Event] = []

    def __call__(self, event: Event) -> None:
        self._events.put(event)

    def next(self) -> Event:
        """The next event; waits for it."""
        self.seen.append(self._events.get(timeout=300))
        return self.seen[-1]

    def so_far(self) -> list[Event]:
        """All events until now."""
        while not self._events.empty():
            self.next()
        return self.seen

    def answer(self) -> Answer:
        """The whole answer; waits for it. Raises the error of a request that failed."""
        while True:
            event = self.next()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                pieces = "".join(e.text for e in self.seen if isinstance(e, Piece))
                assert pieces == event.answer.text
                return event.answer


def queued(
    batch: BatchEngine,
    question: str,
    passages: Sequence[Passage],
    tenant: str = "",
    **options: Any,
) -> tuple[QueuedRequest, Listener]:
    """options: fields of BlendConfig and DecodeConfig."""
    blend, decode = split_options(options)
    plan = batch.engine.plan(Request(question, tuple(passages), blend=blend, decode=decode))
    listener = Listener()
    return batch.queued(plan, listener, tenant), listener


def submit(
    batch: BatchEngine,
    question: str,
    passages: Sequence[Passage],
    tenant: str = "",
    **options: Any,
) -> Listener:
    request, listener = queued(batch, question, passages, tenant, **options)
    batch.scheduler.submit(request)
    return listener
