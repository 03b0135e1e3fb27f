"""The bodies of requests: OpenAI's fields where OpenAI has them.

A field of OpenAI's that changes the answer or its form (n > 1, logprobs, JSON formats, forced tools, penalties) is
declared with its neutral values only. Any other value is an error that names the field. Unknown fields are ignored,
and the response names them (notices.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from blendserve.config import CorrectionName, Method, PolicyName, Ratio
from blendserve.core import Document, Passage
from blendserve.engine.prompt import ChatMessage
from blendserve.errors import InputError
from blendserve.serve.engine_client import QueryRequest

MAX_ITEMS = 1000
MAX_TOKENS = 10**6


def _reject_lone_surrogates(text: str) -> str:
    """JSON can write lone surrogates and UTF-8 cannot. Raises ValueError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a character (a lone surrogate)") from None
    return text


Text = Annotated[str, AfterValidator(_reject_lone_surrogates)]
Name = Annotated[Text, Field(min_length=1, max_length=512)]
Names = Annotated[list[Name], Field(max_length=MAX_ITEMS)]
Label = Annotated[Text, Field(max_length=512)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Stop = Annotated[Text, Field(min_length=1, max_length=200)]
Zero = Literal[0, 0.0]  # type: ignore[valid-type]


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class PassageIn(Body):
    """A passage that the client sends. Hugging Face's name for its text is `contents`."""

    text: Text = Field(validation_alias=AliasChoices("text", "contents", "content"))
    title: Text = ""
    id: Label = ""

    def passage(self) -> Passage:
        return Passage(self.text, self.title, self.id)


Passages = Annotated[list[PassageIn], Field(max_length=MAX_ITEMS)]


class BlendOptions(Body):
    """Options that OpenAI's API does not have. None = the server's setting."""

    top_k: Annotated[int, Field(ge=1, le=MAX_ITEMS)] | None = None
    collections: Names | None = None
    passages: Passages | None = None
    method: Method | None = None
    policy: PolicyName | None = None
    ratio: Ratio | None = None
    correction: CorrectionName | None = None


class Question(Body):
    """Fields of every request for an answer: documents and sampling parameters.

    documents: chunks of the prompt, in this order; the field of vLLM and Hugging Face. The same as `passages`.
    """

    documents: Passages | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    max_tokens: Tokens | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = False

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    def query(
        self, question: str, options: BlendOptions, history: tuple[ChatMessage, ...] = ()
    ) -> QueryRequest:
        """The request to the engine. Raises InputError if `documents` and `passages` are both given."""
        if self.documents is not None and options.passages is not None:
            raise InputError("documents and passages mean the same: send one of these fields")
        passages = options.passages if self.documents is None else self.documents
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        return QueryRequest(
            question=question,
            passages=None if passages is None else tuple(passage.passage() for passage in passages),
            top_k=options.top_k,
            history=history,
            blend={name: getattr(options, name) for name in ("method", "policy", "ratio", "correction")},
            decode={**sampling, "max_new_tokens": self.token_limit, "stop": stop or None},
            collections=None if options.collections is None else tuple(options.collections),
        )


class StreamOptions(Body):
    include_usage: bool | None = None


class OpenAIRequest(Question):
    """Fields that chat and plain completions share."""

    model: Name
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    x_blendserve: BlendOptions | None = None


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


NoToolCalls = Annotated[None, BeforeValidator(_no_tool_calls)]
TextParts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_ITEMS)]


class Message(Body):
    role: Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_no_tool_role)]
    tool_calls: NoToolCalls = None
    function_call: NoToolCalls = None
    content: Annotated[Text | TextParts, BeforeValidator(_only_text)]

    @property
    def content_text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TextFormat(Body):
    type: Literal["text"]


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS)]
    max_completion_tokens: Tokens | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    response_format: TextFormat | None = None
    tool_choice: Literal["none", "auto"] | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions: the prompt is the question."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=1)]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: Literal[""] | None = None


class RagRequest(Question, BlendOptions):
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
    documents: Names | None = None
    ids: Names | None = None
