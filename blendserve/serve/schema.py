"""The bodies of requests. OpenAI's fields where OpenAI has them; what is not known is refused, not ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field

from blendserve.config import BlendConfig, CorrectionName, DecodeConfig, Method, PolicyName, Ratio
from blendserve.core import Document, Passage
from blendserve.errors import InputError

MAX_ITEMS = 1000
MAX_TOKENS = 10**6


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
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


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
    include_obfuscation: bool | None = None


class Neutral(Question):
    """OpenAI's fields that change nothing here: taken at the values that ask for nothing, and labels at any."""

    model: Name
    n: Literal[1] | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Literal[0, 0.0] | None = None  # type: ignore[valid-type]
    presence_penalty: Literal[0, 0.0] | None = None  # type: ignore[valid-type]
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: Label | None = None
    metadata: Annotated[dict[Label, Label], Field(max_length=16)] | None = None
    store: bool | None = None
    service_tier: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    x_blendserve: Extras | None = None


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_ITEMS)]
    name: Label | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def said(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class TextFormat(Body):
    type: Literal["text"]


class ChatRequest(Neutral):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    response_format: TextFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: None = None

    def decode(self) -> dict[str, Any]:
        values = super().decode()
        return values | {"max_new_tokens": self.max_completion_tokens or values["max_new_tokens"]}


class CompletionRequest(Neutral):
    """POST /v1/completions: the prompt is taken for the question."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=1)]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None

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
    """POST /v1/cache/...: which chunks. Own passages, or a collection's, all or those of some documents or ids."""

    passages: Passages | None = None
    collection: Name | None = None
    documents: Annotated[list[Name], Field(max_length=MAX_ITEMS)] | None = None
    ids: Annotated[list[Name], Field(max_length=MAX_ITEMS)] | None = None
