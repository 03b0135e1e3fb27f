"""The bodies of requests: OpenAI's fields where OpenAI has them.

Three kinds of fields that this server does not implement:
- A field of OpenAI's that changes the answer or its form (n > 1, logprobs, JSON formats, forced tools, penalties) is
  declared here with its neutral values only. Any other value is an error that names the field.
- Any other unknown field is ignored, and the response names it (notices.py). This includes the sampling parameters of
  other servers (top_k, min_p, repetition_penalty, guided_json, chat_template_kwargs): their clients send them to every
  server. It also includes `tools`, which a model may always leave unused.
- LABELS and NEUTRAL list unknown fields that cannot change an answer. They are not named.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from blendserve.config import BlendConfig, CorrectionName, DecodeConfig, Method, PolicyName, Ratio
from blendserve.core import Document, Passage
from blendserve.errors import InputError

MAX_ITEMS = 1000
MAX_TOKENS = 10**6

LABELS = frozenset(
    {
        *("user", "name", "metadata", "store", "service_tier", "safety_identifier"),
        *(
            "prompt_cache_key",
            "prompt_cache_retention",
            "prediction",
            "parallel_tool_calls",
            "include_obfuscation",
        ),
    }
)
NEUTRAL: dict[str, tuple[Any, ...]] = {"top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,)}


def has_effect(name: str, value: Any) -> bool:
    """Whether an unknown field asks for something: null and empty values do not."""
    return not (value is None or value in ({}, []) or name in LABELS or value in NEUTRAL.get(name, ()))


def _whole(text: str) -> str:
    """Refuse halves of characters (lone surrogates), which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a character (a lone surrogate)") from None
    return text


Text = Annotated[str, AfterValidator(_whole)]
Name = Annotated[Text, Field(min_length=1, max_length=512)]
Label = Annotated[Text, Field(max_length=512)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1, le=MAX_ITEMS)]
Stop = Annotated[Text, Field(min_length=1, max_length=200)]
Stops = Annotated[list[Stop], Field(max_length=4)]


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class PassageIn(Body):
    """A passage that the client sends. Hugging Face's name for its text is `contents`."""

    text: Text = Field(validation_alias=AliasChoices("text", "contents", "content"))
    title: Text = ""
    id: Label = ""


Passages = Annotated[list[PassageIn], Field(max_length=MAX_ITEMS)]


class Extras(Body):
    """What OpenAI's API has no words for. None = as the server is set up."""

    top_k: Count | None = None
    collections: Annotated[list[Name], Field(max_length=MAX_ITEMS)] | None = None
    passages: Passages | None = None
    method: Method | None = None
    policy: PolicyName | None = None
    ratio: Ratio | None = None
    correction: CorrectionName | None = None


class Question(Body):
    """What every request for an answer may hold: documents and sampling parameters.

    documents: chunks of the prompt, in this order; the field of vLLM and Hugging Face. The same as `passages`.
    """

    documents: Passages | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    stop: Stop | Stops | None = None
    seed: Seed | None = None
    stream: bool | None = False

    def decode(self) -> dict[str, Any]:
        """As DecodeConfig's fields."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        values: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_new_tokens": self.max_tokens,
            "seed": self.seed,
            "stop": stop or None,
        }
        assert values.keys() <= DecodeConfig.model_fields.keys()
        return values

    def blend(self, extras: Extras) -> dict[str, Any]:
        """As BlendConfig's fields; the seed also sets that of random policies."""
        names = ("method", "policy", "ratio", "correction")
        values: dict[str, Any] = {"seed": self.seed, **{name: getattr(extras, name) for name in names}}
        assert values.keys() <= BlendConfig.model_fields.keys()
        return values

    def passages_of(self, extras: Extras) -> tuple[Passage, ...] | None:
        """The client's passages, None to retrieve some. Raises InputError if both fields are given."""
        if self.documents is not None and extras.passages is not None:
            raise InputError("documents and passages mean the same: send one of these fields")
        given = extras.passages if self.documents is None else self.documents
        return None if given is None else tuple(Passage(p.text, p.title, p.id) for p in given)


class StreamOptions(Body):
    include_usage: bool | None = None


class OpenAIRequest(Question):
    """What chat and plain completions have in common."""

    model: Name
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    frequency_penalty: Literal[0, 0.0] | None = None  # type: ignore[valid-type]
    presence_penalty: Literal[0, 0.0] | None = None  # type: ignore[valid-type]
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    x_blendserve: Extras | None = None


class TextPart(Body):
    type: Literal["text"]
    text: Text


def _no_tool_role(role: Any) -> Any:
    if role in ("tool", "function"):
        raise ValueError(f"role {role!r} is not supported: send tool results in a message of role 'user'")
    return role


def _no_tool_calls(calls: Any) -> None:
    if calls:
        raise ValueError("tool calls are not supported: send their results in a message of role 'user'")


def _only_text(content: Any) -> Any:
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise ValueError(f"content of type {part['type']!r} is not supported: models run on text alone")
    return content


class Message(Body):
    role: Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_no_tool_role)]
    tool_calls: Annotated[None, BeforeValidator(_no_tool_calls)] = None
    function_call: Annotated[None, BeforeValidator(_no_tool_calls)] = None
    content: Annotated[
        Text | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_ITEMS)],
        BeforeValidator(_only_text),
    ]

    @property
    def said(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class TextFormat(Body):
    type: Literal["text"]


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    response_format: TextFormat | None = None
    tool_choice: Literal["none", "auto"] | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None

    def decode(self) -> dict[str, Any]:
        values = super().decode()
        return values | {"max_new_tokens": self.max_completion_tokens or values["max_new_tokens"]}


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions: the prompt is the question."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=1)]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: Literal[""] | None = None

    @property
    def question(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


class RagRequest(Question, Extras):
    """POST /v1/rag/query"""

    question: Annotated[Text, Field(pattern=r"\S")]
    explain: bool = False


class DocumentIn(Body):
    text: Annotated[Text, Field(min_length=1)]
    title: Label = ""
    id: Label = ""

    def document(self) -> Document:
        return Document(self.text, self.title.strip(), self.id)


class DocumentsRequest(Body):
    """POST /v1/documents"""

    documents: Annotated[list[DocumentIn], Field(min_length=1, max_length=MAX_ITEMS)]
    collection: Name | None = None


class CacheRequest(Body):
    """POST /v1/cache/...: the request's own passages, or a collection's: all, or by document or passage id."""

    passages: Passages | None = None
    collection: Name | None = None
    documents: Annotated[list[Name], Field(max_length=MAX_ITEMS)] | None = None
    ids: Annotated[list[Name], Field(max_length=MAX_ITEMS)] | None = None
