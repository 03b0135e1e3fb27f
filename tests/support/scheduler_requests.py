"""Requests to a scheduler whose model is real, and may fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Literal

import torch
from hypothesis import strategies as st

from blendserve.answer import Answer
from blendserve.blend.blender import Prefilled
from blendserve.config import BlendConfig, DecodeConfig, Method
from blendserve.core import Chunk, Prompt, Steps
from blendserve.engine.generate import AnswerStream, TokenSequence, prefill
from blendserve.engine.request import PreparedRequest
from blendserve.models.loader import LoadedModel
from blendserve.models.model import DecoderModel, States
from blendserve.store import MemoryStore
from blendserve.timing import Clock
from tests.support.blending import PREFIX, some_ids, tiny_blender
from tests.support.models import tiny_decoder, tiny_model
from tests.support.tokenizers import bundled_tokenizer

REFINING = 8  # layers of the scoring pass and the blending pass
LAYER_S, SLOT_TOKENS, SHARED_BYTES, TENANTS = 1.0, 96, 30_000, "abc"
SUFFIX, CHUNKS = some_ids(4, 1), [Chunk(some_ids(n, 2)) for n in (9, 3, 14, 6)]


class FaultyModel(DecoderModel):
    """A model whose next forward raises `fault`."""

    fault: Exception | None = None

    def embed(self, ids: torch.Tensor) -> States:
        fault, self.fault = self.fault, None
        if fault:
            raise fault
        return super().embed(ids)


@cache
def model() -> LoadedModel:
    model = FaultyModel.of(tiny_model("llama"))
    return LoadedModel("tiny", model, bundled_tokenizer(), "tiny", frozenset({2}))


@cache
def filled_store() -> MemoryStore:
    made = MemoryStore(2**26)
    tiny_blender(made, *(chunk.ids for chunk in CHUNKS))
    return made


@dataclass(frozen=True)
class Question:
    """Equal questions have equal answers."""

    chunks: tuple[int, ...] = (0, 1)
    method: Method = "blend"
    max_new_tokens: int = 3
    temperature: float = 0.0
    refine: float = 0.0

    def prepared(self, clock: Clock) -> PreparedRequest:
        prompt = Prompt(PREFIX, tuple(CHUNKS[i] for i in self.chunks), SUFFIX)
        decode = DecodeConfig(max_new_tokens=self.max_new_tokens, temperature=self.temperature, seed=7)
        blend = BlendConfig(method=self.method, ratio=0.5, refine=self.refine)
        return PreparedRequest(prompt, (), blend, decode, clock)


ANY = Question((2, 3))  # its answer has as many tokens as asked for


@cache
def alone(question: Question) -> Answer:
    """Of a model that never fails."""
    steady = replace(model(), decoder=tiny_decoder("llama"))
    steps = partial(prefill, blender=tiny_blender(filled_store()))
    return AnswerStream(TokenSequence(question.prepared(Clock()), steady, steps)).answer()


@dataclass(eq=False)
class Sent:
    """A submitted request."""

    tenant: str
    question: Question
    cost: float
    # the layer of its prefill before which it is cancelled; from REFINING on, of its refining
    cancel_at: int | None
    turn: int  # the number of admissions before it was submitted
    request: WatchedSequence = field(init=False)
    state: Literal["waits", "prefills", "runs", "ended"] = "waits"
    preempted_cost: float = 0.0  # of requests that were prefilled within its prefill


QUESTION = st.builds(
    Question,
    st.lists(st.integers(0, 3), max_size=3, unique=True).map(tuple),
    st.sampled_from(["blend", "full", "reuse"]),
    st.integers(1, 5) | st.just(SLOT_TOKENS),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 1.0]),
)


class WatchedSequence(TokenSequence):
    """Has its refining watched."""

    watch: Callable[[Steps[Prefilled]], Steps[Prefilled]]

    def refine(self) -> Steps[Prefilled]:
        return self.watch(super().refine())
