"""The bodies of POST /v1/messages, Anthropic's Messages API, and their chat.

Search results and documents become plain text, their own text unchanged, so that its stored KV can be found. Thinking
blocks are dropped, as the model's own chat template would do. Other content is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from blendserve.engine.chat import Chat
from blendserve.engine.grammar import Grammar
from blendserve.engine.request import AnswerRules
from blendserve.errors import InputError
from blendserve.serve.engine_client import QueryRequest
from blendserve.serve.fields import (
    MAX_ITEMS,
    MAX_TOOLS,
    Body,
    JsonObject,
    Label,
    Name,
    Refused,
    Stop,
    Text,
    Tokens,
    ToolName,
)
from blendserve.serve.schemas import BlendOptions
from blendserve.serve.structured import InlineFormat, compiled, forced_call

DROPPED = {"thinking", "redacted_thinking"}
SUPPORTED = {"text", "search_result", "document", "tool_use", "tool_result"}
PARAGRAPH = "\n\n"
ROLES = {"tool_use": "assistant", "tool_result": "user"}  # type of a block -> the only role that may have it


def _as_blocks(content: Any) -> Any:
    """A text as a text block; blocks without the dropped ones. Raises ValueError for types without a text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return content
    kinds = [block.get("type", "text") if isinstance(block, dict) else "text" for block in content]
    for kind in kinds:
        if kind not in SUPPORTED | DROPPED:
            raise ValueError(f"content of type {kind!r} is not supported: send text only")
    return [block for block, kind in zip(content, kinds, strict=True) if kind not in DROPPED]


def _text_source(source: Any) -> Any:
    """The source of a document with its text as `data`."""
    if isinstance(source, dict) and source.get("type") == "content":
        content = source.get("content")
        return {"type": "text", "data": content, "has_blocks": isinstance(content, list)}
    if isinstance(source, dict) and source.get("type") != "text":
        raise ValueError(
            f"a source of type {source.get('type')!r} is not supported: send the document's text"
        )
    return source


def _custom(kind: Any) -> Any:
    if kind not in (None, "custom"):
        raise ValueError(f"a tool of type {kind!r} is not supported: send tools with an input_schema")
    return kind


class Block(Body):
    cache_control: Any = None  # the server caches every prompt


class TextBlock(Block):
    type: Literal["text"]
    text: Text

    @property
    def prompt_text(self) -> str:
        return self.text


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_ITEMS), BeforeValidator(_as_blocks)]


class CitationsOption(Body):
    enabled: bool = False


class Source(Block):
    citations: CitationsOption = CitationsOption()


class SearchResult(Source):
    type: Literal["search_result"]
    source: Text = ""
    title: Text = ""
    content: TextBlocks

    @property
    def prompt_text(self) -> str:
        """Source and title as lines in front of the text."""
        return _lines(self.source, self.title, _paragraphs(self.content))


class DocumentSource(Body):
    type: Literal["text"]
    media_type: Label | None = None
    data: TextBlocks
    has_blocks: bool = False


class DocumentBlock(Source):
    type: Literal["document"]
    source: Annotated[DocumentSource, BeforeValidator(_text_source)]
    title: Text | None = None
    context: Text | None = None

    @property
    def prompt_text(self) -> str:
        """Context and title as lines in front of the text."""
        return _lines(self.context, self.title, _paragraphs(self.source.data))


class ToolUse(Block):
    type: Literal["tool_use"]
    id: Label
    name: Name
    input: JsonObject = Field(default_factory=dict)


TextLike = TextBlock | SearchResult | DocumentBlock


class ToolResult(Block):
    type: Literal["tool_result"]
    tool_use_id: Label
    content: Annotated[
        list[Annotated[TextLike, Field(discriminator="type")]],
        Field(max_length=MAX_ITEMS),
        BeforeValidator(_as_blocks),
    ] = Field(default_factory=list)
    is_error: bool | None = None


AnyBlock = Annotated[TextLike | ToolUse | ToolResult, Field(discriminator="type")]


class MessageIn(Body):
    role: Literal["user", "assistant"]
    content: Annotated[list[AnyBlock], Field(max_length=MAX_ITEMS), BeforeValidator(_as_blocks)]

    @model_validator(mode="after")
    def _blocks_of_role(self) -> MessageIn:
        if self.role == "user" and not self.content:
            raise ValueError("content is empty: send a text")
        for block in self.content:
            if ROLES.get(block.type, self.role) != self.role:
                raise ValueError(f"a {block.type} block is not allowed in a message of role {self.role!r}")
        return self


class ToolIn(Body):
    type: Annotated[Literal["custom"] | None, BeforeValidator(_custom)] = None
    name: ToolName
    description: Text | None = None
    input_schema: JsonObject
    cache_control: Any = None

    def for_template(self) -> dict[str, Any]:
        """Convert to the form that chat templates take: OpenAI's."""
        described = {} if self.description is None else {"description": self.description}
        return {
            "type": "function",
            "function": {"name": self.name, **described, "parameters": self.input_schema},
        }


class ToolChoice(Body):
    """any: some tool must be called. tool: the named one must be."""

    type: Literal["auto", "none", "any", "tool"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(Body):
    """POST /v1/messages/count_tokens"""

    model: Name
    messages: Annotated[list[MessageIn], Field(min_length=1, max_length=MAX_ITEMS)]
    system: TextBlocks = Field(default_factory=list)
    tools: Annotated[list[ToolIn], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None

    @property
    def offered_tools(self) -> list[ToolIn]:
        """The tools that the model may call."""
        return [] if self.tool_choice and self.tool_choice.type == "none" else self.tools or []

    def chat(self) -> Chat:
        """The whole prompt; messages in a row of one role are one. Raises InputError for the beginning of an answer."""
        if self.messages[-1].role != "user":
            raise InputError(
                "the last message has role 'assistant': an answer cannot be continued, end with a message of role 'user'",
                setting="messages",
            )
        system = _paragraphs(self.system)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        names = {b.id: b.name for message in self.messages for b in message.content if isinstance(b, ToolUse)}
        spoken = (message for message in self.messages if message.content)
        for role, group in groupby(spoken, lambda message: message.role):
            blocks = [block for message in group for block in message.content]
            messages += _assistant(blocks) if role == "assistant" else _user(blocks, names)
        return Chat(tuple(messages), tuple(tool.for_template() for tool in self.offered_tools))


class OutputConfig(Body):
    format: InlineFormat | None = None


class Metadata(Body):
    user_id: Text | None = None


class MessagesRequest(CountRequest):
    """POST /v1/messages"""

    max_tokens: Tokens
    stop_sequences: Annotated[list[Stop], Field(max_length=16)] = Field(default_factory=list)
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = False
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    container: Refused = None
    x_blendserve: BlendOptions | None = None

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must look like. Raises InputError for what cannot be compiled."""
        choice = self.tool_choice
        form = self.output_config.format if self.output_config else None
        if choice and choice.type in ("any", "tool"):
            return forced_call((tool.for_template()["function"] for tool in self.tools or ()), choice.name)
        return None if form is None else compiled("output_config.format", Grammar.of_json, form.of_answer)

    def query(self, chat: Chat) -> QueryRequest:
        """The request to the engine. Raises InputError for passages and collections."""
        options = self.x_blendserve or BlendOptions()
        for name in ("passages", "collections", "top_k", "min_score", "filter"):
            if getattr(options, name) is not None:
                raise InputError(
                    f"x_blendserve.{name}: this route retrieves nothing: send search_result or document blocks",
                    setting=f"x_blendserve.{name}",
                )
        sampling: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p}
        return QueryRequest(
            question=chat.messages[-1]["content"],
            blend=options.blend,
            decode={
                **sampling,
                "max_new_tokens": self.max_tokens,
                "stop": tuple(self.stop_sequences) or None,
            },
            plain=chat,
            rules=AnswerRules(self.grammar, top_k=self.top_k or 0),
            may_fill=True,
        )


def _assistant(blocks: list[Any]) -> list[dict[str, Any]]:
    """One message for the template; none if nothing is left of it."""
    content = "".join(block.prompt_text for block in blocks if not isinstance(block, ToolUse))
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUse)
    ]
    message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    return [message] if content or calls else []


def _user(blocks: list[Any], names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """A message for each tool result, and one for the blocks between. names: of the tools, by id of the call."""
    for is_result, group in groupby(blocks, lambda block: isinstance(block, ToolResult)):
        if not is_result:
            yield {"role": "user", "content": _paragraphs(group)}
            continue
        for block in group:
            name = {"name": names[block.tool_use_id]} if block.tool_use_id in names else {}
            yield {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                **name,
                "content": _paragraphs(block.content),
            }


def _paragraphs(blocks: Any) -> str:
    return PARAGRAPH.join(block.prompt_text for block in blocks)


def _lines(*texts: str | None) -> str:
    return "\n".join(filter(None, texts))
