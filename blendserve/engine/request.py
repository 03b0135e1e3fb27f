"""Request -> Plan: options and lengths checked, passages found, prompt laid out. Nothing of it runs the model.

What is too long is refused as soon as that is certain: by its characters before anything is tokenised, by the tokens of
the frame (turns and question) before anything is searched for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, TypeVar

from blendserve.blend.policies.base import make_policy
from blendserve.config import BlendConfig, Config, DecodeConfig, changed
from blendserve.core import Answer, BlendReport, Chunk, Explanation, Passage, Prompt
from blendserve.engine.prompt import PromptBuilder, PromptFrame, Turn
from blendserve.errors import ConfigError, InputError, PromptTooLong
from blendserve.registry import nearest
from blendserve.timing import Clock

Options = Mapping[str, Any]
Search = Callable[[str, int], Sequence[Passage]]
"""(question, top_k) -> the `top_k` nearest passages."""

AnyRequest = TypeVar("AnyRequest", bound="Request")

MAX_PARTS = 1000  # chunks that a separator may cut one question into


@dataclass(frozen=True, slots=True)
class Request:
    """A question and its options. None = the engine's setting."""

    question: str
    passages: tuple[Passage, ...] | None = None  # the asker's own; None = retrieved
    top_k: int | None = None
    turns: tuple[Turn, ...] = ()  # before the question
    blend: Options = field(default_factory=dict)  # fields of BlendConfig
    decode: Options = field(default_factory=dict)  # fields of DecodeConfig

    def split(self: AnyRequest, separator: str) -> AnyRequest:
        """Cut a question that contains `prompt.separator`: its last part is the question, the others are passages.

        Parts that hold only white space are dropped. The others follow the request's own passages, in order, and
        nothing is retrieved. A second call changes nothing: the last part contains no separator. Earlier turns are
        not cut. Raises InputError for an empty last part and for more than MAX_PARTS parts.
        """
        if not separator or separator not in self.question:
            return self
        *parts, question = self.question.split(separator, MAX_PARTS)
        if separator in question:
            raise InputError(
                f"the separator {separator!r} cuts the question into more than {MAX_PARTS} chunks",
                setting="question",
            )
        if not question.strip():
            message = f"the question is empty: put it behind the last separator {separator!r}"
            raise InputError(message, setting="question")
        passages = tuple(Passage(part.strip()) for part in parts if part.strip())
        return replace(self, question=question, passages=(*(self.passages or ()), *passages))


class Limits(Protocol):
    """What of a reader a plan has to know: an DecoderModel has it."""

    @property
    def n_layers(self) -> int: ...

    @property
    def context_limit(self) -> int: ...


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
        _Space(context, self.decode.max_new_tokens).require(len(self.prompt))


def make_plan(
    request: Request,
    config: Config,
    reader: Limits,
    prompts: PromptBuilder,
    search: Search,
    clock: Clock,
    room: int | None = None,
) -> Plan:
    """room: tokens for prompt and answer; the reader's context if none is given.

    Raises ConfigError, InputError, PromptTooLong, and what `search` raises.
    """
    blend, decode = changed(config.blend, **request.blend), changed(config.decode, **request.decode)
    request = request.split(config.prompt.separator)
    make_policy(blend).validate(reader.n_layers)
    if not request.question.strip():
        raise InputError("the question is empty: ask something", setting="question")
    space = _Space(room or reader.context_limit, decode.max_new_tokens)
    if least := prompts.at_least(_texts(request), max(0, space.left)):
        space.require(least, at_least=True)
    frame = prompts.frame(request.question, request.turns)
    space.require(len(frame), at_least=bool(request.passages))
    passages = request.passages
    if passages is None:
        with clock.stage("retrieve"):
            top_k = config.retrieve.top_k if request.top_k is None else request.top_k
            passages = tuple(search(request.question, top_k))
    prompt = frame.with_chunks(_chunks(passages, prompts, frame, space))
    return Plan(prompt, passages, blend, decode, clock)


@dataclass(frozen=True, slots=True)
class _Space:
    """What a prompt may take."""

    room: int  # tokens of prompt and answer
    reserved: int  # of those, the answer's

    @property
    def left(self) -> int:
        return self.room - self.reserved

    def require(self, tokens: int, at_least: bool = False) -> None:
        """Raises PromptTooLong. at_least: there may be more tokens."""
        if tokens > self.left:
            raise PromptTooLong(tokens, self.room, self.reserved, at_least)


def _texts(request: Request) -> list[str]:
    """All texts of a request."""
    passages = [text for passage in request.passages or () for text in (passage.title, passage.text)]
    return [request.question, *(turn.text for turn in request.turns), *passages]


def _chunks(
    passages: Sequence[Passage], prompts: PromptBuilder, frame: PromptFrame, space: _Space
) -> Iterator[Chunk]:
    """One after the other, as long as they fit. Raises PromptTooLong."""
    tokens = len(frame)
    for left, passage in zip(reversed(range(len(passages))), passages, strict=True):
        chunk = prompts.chunk(passage)
        tokens += len(chunk)
        space.require(tokens, at_least=left > 0)
        yield chunk


def split_options(options: Options) -> tuple[Options, Options]:
    """Options by section, BlendConfig's and DecodeConfig's. Raises ConfigError."""
    sections = (BlendConfig.model_fields, DecodeConfig.model_fields)
    known = sorted({name for fields in sections for name in fields})
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}: {nearest(name, known)}", setting=name)
    blend, decode = ({k: v for k, v in options.items() if k in fields} for fields in sections)
    return blend, decode


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """Prefill is done."""

    cached: int  # tokens of the prompt whose KV was there already
    report: BlendReport
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Some more of the text."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The whole answer."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request that cannot be answered."""

    error: Exception


Event: TypeAlias = "PrefillDone | TextDelta | Finished | Failed"


class Observer(Protocol):
    """Called on the model's thread, with the method that answers a request, and seconds of that request.

    dequeued: its time in the queue. step: number of requests that make a token. token: time since the last token, or of
    the first one since the request.
    """

    def dequeued(self, method: str, seconds: float) -> None: ...

    def prefilled(self, report: BlendReport, loading: float) -> None: ...

    def step(self, batch: int) -> None: ...

    def token(self, method: str, seconds: float, first: bool) -> None: ...
