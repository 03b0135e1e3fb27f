"""Prepares a request: checks options and lengths, retrieves passages, lays out the prompt. Runs no language model.

A prompt that is too long is refused early: by its characters before anything is tokenised, and by the tokens of history
and question before the search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Protocol, TypeAlias, TypeVar

from blendserve.answer import Answer, TokenLogprob
from blendserve.blend.policies import validate_blend
from blendserve.config import ANSWER_TOKENS, BlendConfig, Config, DecodeConfig, RetrieveConfig
from blendserve.core import BlendReport, Chunk, Passage, PassageFilter, Prompt, TokenIds
from blendserve.engine.chat import Chat
from blendserve.engine.grammar import Grammar
from blendserve.engine.prompt import ChatMessage, PromptBuilder
from blendserve.errors import ConfigError, InputError, PromptTooLong
from blendserve.models.kv_model import ModelLayers
from blendserve.quality.control import Choice
from blendserve.registry import nearest
from blendserve.timing import Clock

Options = Mapping[str, Any]
Search = Callable[[str, int, PassageFilter], Sequence[Passage]]
"""(question, top_k, selection) -> the `top_k` best passages of those selected."""

AnyRequest = TypeVar("AnyRequest", bound="Request")

MAX_LOGPROBS = 20  # likeliest tokens; as OpenAI's API has it
MAX_BEFORE = 500  # last characters of a message that the next one may refer to
MAX_PARTS = 1000  # chunks that a separator may cut one question into


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What one request asks of its answer beyond the settings (DecodeConfig).

    logprobs: how many likeliest tokens get log probabilities beside each chosen one; None: no token does.
    scores_prompt: whether the prompt's tokens get them, too, by full prefill. reads_only: whether the answer is empty.
    drafts: whether the next tokens are guessed and several verified per step, which changes no answer (engine/drafts.py).
    """

    grammar: Grammar | None = None  # that it follows
    top_k: int = 0  # likeliest tokens to sample from; 0 is all
    min_p: float = 0.0  # least probability of a token to sample, as a fraction of the likeliest one's
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that the answer has
    frequency_penalty: float = 0.0  # the same, for each time that it has them
    repetition_penalty: float = 1.0  # factor by which tokens of prompt and answer become less likely
    bias: Mapping[int, float] = field(default_factory=dict)  # token -> what is added to its logit
    ignores_end: bool = False  # whether it goes on behind an end token, up to its maximum length
    logprobs: int | None = None
    scores_prompt: bool = False
    reads_only: bool = False
    drafts: bool = True

    @property
    def changes_logits(self) -> bool:
        """Whether a token's logit depends on the answer so far, or has a bias."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.bias)


@dataclass(frozen=True, slots=True)
class Request:
    """A question and its options. None = the engine's setting."""

    question: str
    passages: tuple[Passage, ...] | None = None  # the asker's own; None = retrieved
    top_k: int | None = None
    min_score: float | None = None  # least similarity of a retrieved passage
    filter: Options = field(default_factory=dict)  # metadata of its document: a value, or one of a list
    history: tuple[ChatMessage, ...] = ()  # before the question
    blend: Options = field(default_factory=dict)  # fields of BlendConfig
    decode: Options = field(default_factory=dict)  # fields of DecodeConfig
    plain: Chat | str | TokenIds | None = None  # the whole prompt, in place of question, passages and history
    scope: str = ""  # of a plain prompt: whose it is; scopes share no prefixes and nothing that was learnt
    learns: bool = True  # whether chunks may be learnt from a plain prompt
    rules: AnswerRules = field(default_factory=AnswerRules)
    may_fill: bool = False  # whether the answer may fill the context; `decode.max_new_tokens` is a cap then
    queries: tuple[str, ...] = ()  # that retrieve passages, in place of the question
    # the whole prompt, where no passage is as similar as `retrieve.chat_score`
    small_talk: Chat | None = None

    def split(self: AnyRequest, separator: str) -> AnyRequest:
        """Cut a question that contains `prompt.separator`: its last part is the question, the others are passages.

        Parts that hold only white space are dropped. The others follow the request's own passages, in order, and
        nothing is retrieved. A second call changes nothing: the last part contains no separator. Earlier messages are
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
            message = f"the question is empty: put it after the last separator {separator!r}"
            raise InputError(message, setting="question")
        passages = tuple(Passage(part.strip()) for part in parts if part.strip())
        return replace(self, question=question, passages=(*(self.passages or ()), *passages))


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can be answered."""

    prompt: Prompt
    passages: tuple[Passage, ...]
    blend: BlendConfig
    decode: DecodeConfig
    clock: Clock  # since the request came
    scope: str = ""  # of a plain prompt, as is `learns`
    learns: bool = False
    rules: AnswerRules = field(default_factory=AnswerRules)
    quality: Choice | None = None  # None: no target is set
    question: str = ""  # that the passages answer

    @property
    def tokens(self) -> int:
        """The most tokens that prompt and answer can have."""
        return len(self.prompt) + self.decode.answer_tokens


def prepare_request(
    request: Request,
    config: Config,
    model: ModelLayers,
    room: int,
    prompts: PromptBuilder,
    search: Search,
    clock: Clock,
) -> PreparedRequest:
    """room: tokens for prompt and answer.

    An answer's length is what the prompt leaves of it, at most. Raises ConfigError, InputError, PromptTooLong, and the
    errors of `search`.
    """
    blend = config.blend.with_values(**request.blend)
    decode = config.decode.with_values(**request.decode)
    if request.rules.scores_prompt:
        blend = blend.with_values(method="full")
    validate_blend(blend, model)
    limit = _answer_limit(request, decode, config.decode.max_new_tokens)
    if request.plain is not None:
        prompt = _plain_prompt(request.plain, room, prompts)
        decode = _within(decode, limit, room - len(prompt))
        scope = request.scope, request.learns, request.rules
        return PreparedRequest(prompt, (), blend, decode, clock, *scope)
    request = request.split(config.prompt.separator)
    if not request.question.strip():
        raise InputError("the question is empty: ask something", setting="question")
    given = [text for passage in request.passages or () for text in (passage.title, passage.text)]
    texts = [request.question, *(message.text for message in request.history), *given]
    if least := prompts.at_least(texts, max(0, room - 1)):
        require_room(least, room, at_least=True)
    frame = prompts.frame(request.question, request.history)
    require_room(len(frame), room, at_least=bool(request.passages))
    passages = request.passages
    may_drop = request.passages is None and request.top_k is None
    if passages is None:
        with clock.stage("retrieve"):
            passages, score = _retrieve(request, config.retrieve, search)
        if request.small_talk is not None and score < config.retrieve.chat_score:
            request = replace(request, plain=request.small_talk)
            return prepare_request(request, config, model, room, prompts, search, clock)
    reserved = min(limit or ANSWER_TOKENS, room // 2) if may_drop else None
    chunks = _fitting_chunks(passages, prompts, len(frame), room, reserved)
    passages = passages[: len(chunks)]
    if request.passages is None and config.prompt.order == "best_last":
        passages = passages[::-1]
        chunks.reverse()
    prompt = frame.with_chunks(chunks)
    decode = _within(decode, limit, room - len(prompt))
    return PreparedRequest(
        prompt, passages, blend, decode, clock, rules=request.rules, question=request.question
    )


def _fitting_chunks(
    passages: Sequence[Passage], prompts: PromptBuilder, n_tokens: int, room: int, reserved: int | None
) -> list[Chunk]:
    """The chunks of the first passages that fit beside a prompt's other n_tokens.

    reserved: tokens for the answer, for which the last passages are left out; None: all are needed. Raises
    PromptTooLong.
    """
    chunks = list[Chunk]()
    for passage in passages:  # one by one: the first that does not fit ends it
        chunk = prompts.chunk(passage)
        n_tokens += len(chunk)
        if chunks and reserved is not None and n_tokens > room - reserved:
            break
        chunks.append(chunk)
        require_room(n_tokens, room, at_least=len(chunks) < len(passages))
    return chunks


def follow_up(messages: Sequence[str]) -> tuple[str, ...]:
    """Return the queries for a user's last message: the message alone, and after the message that it may refer to.

    A small model writes worse queries (scripts/compare_chats.py).
    """
    last = messages[-1]
    before = messages[-2][-MAX_BEFORE:] if len(messages) > 1 else ""
    return (last, f"{before} {last}") if before else (last,)


def _retrieve(request: Request, config: RetrieveConfig, search: Search) -> tuple[tuple[Passage, ...], float]:
    """The passages of all queries in turns, and the best score of the first query's; -1 where it has none."""
    top_k = config.top_k if request.top_k is None else request.top_k
    least = config.min_score if request.min_score is None else request.min_score
    selection = PassageFilter(least, request.filter)
    found = [search(query, top_k, selection) for query in request.queries or (request.question,)]
    best = max((passage.score or 0.0 for passage in found[0]), default=-1.0)
    return in_turns(found, top_k), best


def in_turns(found: Sequence[Sequence[Passage]], top_k: int) -> tuple[Passage, ...]:
    """The first passages of several searches, each once: the best of each, the second of each, and so on."""
    distinct = dict[tuple[str, str], Passage]()
    for passage in (each for rank in zip_longest(*found) for each in rank if each is not None):
        distinct.setdefault((passage.title, passage.text), passage)
    return tuple(distinct.values())[:top_k]


def _answer_limit(request: Request, decode: DecodeConfig, cap: int | None) -> int | None:
    """Most tokens of an answer; None: as many as fit. decode: of the request. cap: of the settings."""
    if not request.may_fill:
        return decode.answer_tokens
    return min((n for n in (decode.max_new_tokens, cap) if n is not None), default=None)


def _within(decode: DecodeConfig, limit: int | None, left: int) -> DecodeConfig:
    """The same for an answer of at most `limit` tokens, and of what is left for it."""
    return decode.with_values(max_new_tokens=left if limit is None else min(limit, left))


def _plain_prompt(plain: Chat | str | TokenIds, room: int, prompts: PromptBuilder) -> Prompt:
    """Raises InputError, PromptTooLong."""
    if isinstance(plain, tuple):
        require_room(len(plain), room)
        return prompts.plain(plain)
    texts = [plain] if isinstance(plain, str) else plain.texts
    if least := prompts.at_least(texts, max(0, room - 1)):
        require_room(least, room, at_least=True)
    prompt = prompts.plain(plain, room, reserved=1)
    require_room(len(prompt), room)
    return prompt


def require_room(n_tokens: int, room: int, answer: int = 1, at_least: bool = False) -> None:
    """Raises PromptTooLong if a prompt and its answer need more than `room`. at_least: the prompt may be longer."""
    if n_tokens > room - answer:
        raise PromptTooLong(n_tokens, room, answer, at_least)


def with_options(request: Request, options: Options) -> Request:
    """The request with options by name: fields of BlendConfig and of DecodeConfig, and `logprobs` of AnswerRules.

    Raises ConfigError for an unknown name, InputError for a wrong number of log probabilities.
    """
    sections = (BlendConfig.model_fields, DecodeConfig.model_fields)
    known = sorted({"logprobs", *(name for fields in sections for name in fields)})
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}: {nearest(name, known)}", setting=name)
    blend, decode = ({k: v for k, v in options.items() if k in fields} for fields in sections)
    logprobs = options.get("logprobs")
    if logprobs is not None and (not isinstance(logprobs, int) or not 0 <= logprobs <= MAX_LOGPROBS):
        message = f"logprobs cannot be {logprobs!r}: give a whole number from 0 to {MAX_LOGPROBS}"
        raise InputError(message, setting="logprobs")
    return replace(request, blend=blend, decode=decode, rules=replace(request.rules, logprobs=logprobs))


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """Prefill is done."""

    cached: int  # tokens of the prompt whose KV was there already
    blended: int  # those of them whose KV is approximate
    report: BlendReport
    logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens but the first, if they were asked for


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Layers of a prefill have run. Sent to requests that ask for it."""

    layers: int  # counted through all passes: a policy may run one to choose tokens
    n_layers: int  # of the model


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Some more of the text, and the tokens whose log probabilities were asked for; either may be empty."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    """The whole answer."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request that cannot be answered."""

    error: Exception


Event: TypeAlias = "PrefillProgress | PrefillDone | TextDelta | Completed | Failed"


class Observer(Protocol):
    """Called on the model's thread, with the method that answers a request, and seconds of that request.

    prefilled: with its seconds by stage. dequeued: its time in the queue. step: number of requests that make a token.
    token: time since the last token, or of the first one since the request.
    """

    def dequeued(self, method: str, seconds: float) -> None: ...

    def prefilled(self, report: BlendReport, seconds: Mapping[str, float]) -> None: ...

    def step(self, batch: int) -> None: ...

    def token(self, method: str, seconds: float, first: bool) -> None: ...
