"""Engines and requests over a random toy model behind the bundled tokenizer: what tests above the blender start from."""

from __future__ import annotations

import queue
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import Mock

import torch

from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.prefix_cache import PrefixCache
from blendserve.config import BlendConfig, Config, DecodeConfig, Method, PromptConfig, StoreConfig, changed
from blendserve.core import Answer, Chunk, Passage, Prompt, Steps, run
from blendserve.engine.batch_engine import BatchEngine
from blendserve.engine.engine import Engine
from blendserve.engine.generate import AnswerStream, Sequence, prefill
from blendserve.engine.request import (
    Event,
    Failed,
    Finished,
    Observer,
    PreparedRequest,
    Request,
    TextDelta,
    split_options,
)
from blendserve.models.loader import LoadedModel
from blendserve.models.model import DecoderModel
from blendserve.models.runner import Runner
from blendserve.store import KVStore, MemoryStore
from blendserve.timing import Clock
from tests.support.blending import PREFIX, some_ids, tiny_blender
from tests.support.models import tiny_model
from tests.support.tokenizers import bundled_tokenizer
from tests.support.toy import toy_reader as load_toy_reader

CONTEXT = 1024  # tokens
CONFIG = Config(
    prompt=PromptConfig(system="Be brief.", instruction="Read."),
    store=StoreConfig(location="memory"),
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


@cache
def toy_reader() -> LoadedModel:
    """Tests must not change it."""
    return load_toy_reader(CONTEXT)


def toy_engine(kv_store: KVStore | None = None, config: Config = CONFIG, **sections: Any) -> Engine:
    """An engine without an index; `sections` change the configuration: `blend={"ratio": 0.5}`."""
    merged = {name: {**getattr(config, name).model_dump(), **part} for name, part in sections.items()}
    return Engine(changed(config, **merged), toy_reader(), kv_store or MemoryStore(2**30))


def seen(answer: Answer) -> dict[str, Any]:
    """All but its timings."""
    return {k: v for k, v in answer.to_dict().items() if k != "timings"} | {"ids": answer.token_ids}


@cache
def generated(passages: tuple[Passage, ...], max_new_tokens: int) -> tuple[int, ...]:
    """To the first of QUESTIONS; without the end token."""
    reader = toy_reader()
    prompt = torch.tensor([toy_engine().prompts.build(QUESTIONS[0], passages).ids])
    model: Any = reader.adapter.reference
    ids = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(reader.end_tokens),
    )
    return tuple(i for i in ids[0, prompt.shape[1] :].tolist() if i not in reader.end_tokens)


def toy_batch(engine: Engine, **options: Any) -> BatchEngine:
    """Its scheduler is not started. options: arguments of BatchEngine, in place of these."""
    ours: dict[str, Any] = {
        "observer": Mock(Observer),
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

    def answer(self) -> Answer:
        """The whole answer; waits for it. Raises the error of a request that failed."""
        while True:
            event = self.next()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                pieces = "".join(e.text for e in self.seen if isinstance(e, TextDelta))
                assert pieces == event.answer.text
                return event.answer


def queued(
    batch: BatchEngine, question: str, passages: GenericSequence[Passage], tenant: str = "", **options: Any
) -> tuple[Sequence, Listener]:
    """options: fields of BlendConfig and DecodeConfig."""
    blend, decode = split_options(options)
    plan = batch.engine.prepare(Request(question, tuple(passages), blend=blend, decode=decode))
    listener = Listener()
    return batch.sequence(plan, listener, tenant), listener


def submit(batch: BatchEngine, *asked: Any, **options: Any) -> Listener:
    request, listener = queued(batch, *asked, **options)
    batch.scheduler.submit(request)
    return listener


# A tiny model

SUFFIX = some_ids(4, 1)
CHUNKS = [Chunk(some_ids(n, 2)) for n in (9, 3, 14, 6)]


class FaultyModel(DecoderModel):
    """A model whose next forward raises `fault`."""

    fault: Exception | None = None

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        fault, self.fault = self.fault, None
        if fault:
            raise fault
        return super().embed(ids)


@cache
def tiny_reader() -> LoadedModel:
    return LoadedModel(
        "tiny", FaultyModel.of(tiny_model("llama")), bundled_tokenizer(), "tiny", frozenset({2})
    )


@cache
def tiny_store() -> MemoryStore:
    made = MemoryStore(2**26)
    tiny_blender(made, *(chunk.ids for chunk in CHUNKS))
    return made


@cache
def tiny_prefixes() -> PrefixCache:
    """With the prefix of every question, computed by a model that never fails."""
    prefixes = tiny_blender(tiny_store()).prefixes
    run(prefixes.get("", PREFIX))
    return prefixes


def tiny_prefill(sequence: Sequence, blender: Blender) -> Steps[Prefilled]:
    blender.prefixes = tiny_prefixes()
    return prefill(sequence, blender)


@dataclass(frozen=True)
class Question:
    """Equal questions have equal answers."""

    chunks: tuple[int, ...] = (0, 1)
    method: Method = "blend"
    max_new_tokens: int = 3
    temperature: float = 0.0

    def prepared(self, clock: Clock) -> PreparedRequest:
        prompt = Prompt(PREFIX, tuple(CHUNKS[i] for i in self.chunks), SUFFIX)
        decode = DecodeConfig(max_new_tokens=self.max_new_tokens, temperature=self.temperature, seed=7)
        return PreparedRequest(prompt, (), BlendConfig(method=self.method, ratio=0.5), decode, clock)


@cache
def alone(question: Question) -> Answer:
    reader, plan = tiny_reader(), question.prepared(Clock())
    sequence = Sequence(plan, reader, partial(tiny_prefill, blender=tiny_blender(tiny_store())))
    prefilled = run(sequence.steps)
    cache = prefilled.result.cache
    runner = Runner.over(reader.adapter, cache, len(plan.prompt), question.max_new_tokens)
    return AnswerStream(sequence, prefilled, runner.step).answer()
