"""Engines and requests over a random toy model behind the bundled tokenizer: what tests above the blender start from."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest.mock import Mock

import torch

from blendserve.answer import Answer
from blendserve.config import (
    BlendConfig,
    Config,
    DecodeConfig,
    PromptConfig,
    QualityConfig,
    ServeConfig,
    StoreConfig,
)
from blendserve.core import Passage
from blendserve.engine.batch_engine import BatchEngine
from blendserve.engine.engine import Engine
from blendserve.engine.request import (
    Completed,
    Event,
    Failed,
    Observer,
    Request,
    TextDelta,
    with_options,
)
from blendserve.models.loader import LoadedModel
from blendserve.store import KVStore, MemoryStore
from tests.support.toy import toy_model as load_toy_model

CONTEXT = 1024  # tokens
CONFIG = Config(
    prompt=PromptConfig(system="Be brief.", instruction="Read."),
    store=StoreConfig(location="memory"),
    blend=BlendConfig(method="blend"),
    quality=QualityConfig(check_share=0.0),  # a report does not depend on when a check runs
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


@cache
def toy_model() -> LoadedModel:
    """Tests must not change it."""
    return load_toy_model(CONTEXT)


def toy_engine(
    kv_store: KVStore | None = None,
    config: Config = CONFIG,
    model: LoadedModel | None = None,
    **sections: Any,
) -> Engine:
    """An engine without an index; `sections` change the configuration: `blend={"ratio": 0.5}`."""
    merged = {name: {**getattr(config, name).model_dump(), **part} for name, part in sections.items()}
    return Engine(config.with_values(**merged), model or toy_model(), kv_store or MemoryStore(2**30))


def seen(answer: Answer) -> dict[str, Any]:
    """All but its timings."""
    return {k: v for k, v in answer.to_dict().items() if k != "timings"} | {"ids": answer.token_ids}


@cache
def generated(passages: tuple[Passage, ...], max_new_tokens: int) -> tuple[int, ...]:
    """To the first of QUESTIONS; without the end token."""
    loaded = toy_model()
    prompt = torch.tensor([toy_engine().prompts.build(QUESTIONS[0], passages).ids])
    model: Any = loaded.decoder.reference
    ids = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(loaded.end_tokens),
    )
    return tuple(i for i in ids[0, prompt.shape[1] :].tolist() if i not in loaded.end_tokens)


def toy_batch(engine: Engine) -> BatchEngine:
    """Its scheduler is not started."""
    return BatchEngine(engine, Mock(Observer), ServeConfig(slots=3))


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

    def answer(self) -> Answer:
        """The whole answer; waits for it. Raises the error of a request that failed."""
        while True:
            event = self.next()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Completed):
                pieces = "".join(e.text for e in self.seen if isinstance(e, TextDelta))
                assert pieces == event.answer.text
                return event.answer


def submit(
    batch: BatchEngine, question: str, passages: Sequence[Passage], tenant: str = "", **options: Any
) -> Listener:
    """options: fields of BlendConfig and DecodeConfig."""
    plan = batch.engine.prepare(with_options(Request(question, tuple(passages)), options))
    listener = Listener()
    batch.scheduler.submit(batch.sequence(plan, listener, tenant))
    return listener
