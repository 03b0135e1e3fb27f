"""Request -> Plan: options checked, passages found, prompt laid out, its length known. Nothing of it runs the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blendserve.blend.policies.base import make_policy
from blendserve.config import BlendConfig, Config, DecodeConfig, changed
from blendserve.core import Passage, Prompt
from blendserve.engine.prompt import PromptBuilder, Turn
from blendserve.errors import ConfigError, InputError, PromptTooLong
from blendserve.models.adapter import Adapter
from blendserve.registry import nearest
from blendserve.timing import Clock

Options = Mapping[str, Any]
Search = Callable[[str, int], Sequence[Passage]]
"""The passages nearest to a question, so many at most."""


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody wants to know. None = as the engine is set up."""

    question: str
    passages: tuple[Passage, ...] | None = None  # the asker's own; None = retrieved
    top_k: int | None = None
    turns: tuple[Turn, ...] = ()  # before the question
    blend: Options = field(default_factory=dict)  # fields of BlendConfig
    decode: Options = field(default_factory=dict)  # fields of DecodeConfig


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that can be answered."""

    prompt: Prompt
    passages: tuple[Passage, ...]
    blend: BlendConfig
    decode: DecodeConfig
    clock: Clock  # since the request came

    @property
    def tokens(self) -> int:
        """Of prompt and answer, at most."""
        return len(self.prompt) + self.decode.max_new_tokens

    def require_room(self, context: int) -> None:
        """Raises PromptTooLong when a reader's context cannot hold prompt and answer."""
        if self.tokens > context:
            raise PromptTooLong(len(self.prompt), context, self.decode.max_new_tokens)


def make_plan(
    request: Request, config: Config, adapter: Adapter, prompts: PromptBuilder, search: Search, clock: Clock
) -> Plan:
    """Raises ConfigError, InputError, and what `search` raises."""
    blend, decode = changed(config.blend, **request.blend), changed(config.decode, **request.decode)
    make_policy(blend).validate(adapter.n_layers)
    if not request.question.strip():
        raise InputError("the question is empty: ask something")
    passages = request.passages
    if passages is None:
        with clock.stage("retrieve"):
            top_k = config.retrieve.top_k if request.top_k is None else request.top_k
            passages = tuple(search(request.question, top_k))
    prompt = prompts.build(request.question, passages, request.turns)
    return Plan(prompt, passages, blend, decode, clock)


def split_options(options: Options) -> tuple[Options, Options]:
    """Options by section, BlendConfig's and DecodeConfig's: a seed serves whatever is random. Raises ConfigError."""
    sections = (BlendConfig.model_fields, DecodeConfig.model_fields)
    known = sorted({name for fields in sections for name in fields})
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}: {nearest(name, known)}")
    blend, decode = ({k: v for k, v in options.items() if k in fields} for fields in sections)
    return blend, decode
