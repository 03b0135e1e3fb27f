"""The bodies of OpenAI's chats and completions.

A field that changes the answer or its form and is not supported is declared with its neutral values only. Any other value
is an error that names the field. Unknown fields are ignored, and the response names them (notices.py).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from blendserve.config import Ratio
from blendserve.engine.chat import Chat
from blendserve.engine.grammar import Grammar
from blendserve.engine.prompt import ChatMessage
from blendserve.engine.request import MAX_LOGPROBS, AnswerRules
from blendserve.errors import InputError
from blendserve.serve.fields import (
    MAX_ITEMS,
    MAX_TOOLS,
    Bias,
    Body,
    Ids,
    JsonObject,
    Label,
    Name,
    Penalty,
    Refused,
    Text,
    TokenId,
    TokenLimit,
    ToolName,
    json_text,
    no_limit,
)
from blendserve.serve.middleware import check_json_complexity
from blendserve.serve.schemas import BlendOptions, Question
from blendserve.serve.structured import Structured, forced_call


class StreamOptions(Body):
    include_usage: bool | None = None


class OpenAIRequest(Structured, Question):
    """Fields that chat and plain completions share."""

    model: Name | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Ratio | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_ITEMS)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Label | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    x_blendserve: BlendOptions | None = None

    @property
    def n_logprobs(self) -> int | None:
        """How many likeliest tokens get log probabilities beside each chosen one; None: no token."""
        return None

    @property
    def rules(self) -> AnswerRules:
        """Raises InputError, as `grammar`."""
        names = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        given |= {"top_k": None if self.top_k is None else max(0, self.top_k)}  # in vLLM's API, -1 means all
        given |= {"grammar": self.grammar, "bias": self.logit_bias, "ignores_end": self.ignore_eos}
        given |= {"logprobs": self.n_logprobs}
        return AnswerRules(**{name: value for name, value in given.items() if value is not None})

    @property
    def scope(self) -> str:
        """Whose request it is: what plain prompts of one client leave behind is reused for no other."""
        return self.cache_salt or self.user or self.safety_identifier or ""

    @property
    def options(self) -> BlendOptions:
        return self.x_blendserve or BlendOptions()


class TextPart(Body):
    type: Literal["text"]
    text: Text


def _no_function_role(role: Any) -> Any:
    if role == "function":
        raise ValueError("role 'function' is not supported: send tool results in a message of role 'tool'")
    return role


def _no_function_call(call: Any) -> None:
    if call:
        raise ValueError("function_call is not supported: send `tool_calls`")


def _only_text(content: Any) -> Any:
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise ValueError(f"content of type {part['type']!r} is not supported: send text only")
    return content


NoFunctionCall = Annotated[None, BeforeValidator(_no_function_call)]
TextParts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_ITEMS)]


class FunctionCall(Body):
    name: Name
    arguments: Text = ""

    @property
    def parsed(self) -> Any:
        """The arguments as templates take them: an object; what is no JSON, or too deep to be walked, stays a text."""
        try:
            check_json_complexity(self.arguments.encode())
            return json_text(json.loads(self.arguments or "{}"))
        except (ValueError, InputError):
            return self.arguments


class ToolCall(Body):
    id: Label = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Function(Body):
    name: ToolName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class Message(Body):
    """content: only an assistant that calls tools may leave it out."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_no_function_role)
    ]
    content: Annotated[Text | TextParts | None, BeforeValidator(_only_text)] = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_ITEMS)] | None = None
    tool_call_id: Label | None = None
    name: Label | None = None
    function_call: NoFunctionCall = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing: send a text")
        return self

    @property
    def content_text(self) -> str:
        parts = [] if self.content is None else self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)

    def for_template(self) -> dict[str, Any]:
        """Convert to the form that chat templates take."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content_text}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    **call.model_dump(),
                    "function": {"name": call.function.name, "arguments": call.function.parsed},
                }
                for call in self.tool_calls
            ]
        names = {"tool_call_id": self.tool_call_id, "name": self.name}
        return message | {field: value for field, value in names.items() if value}


class FunctionName(Body):
    name: ToolName


class NamedTool(Body):
    """A `tool_choice` that forces one tool."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    max_completion_tokens: TokenLimit = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: JsonObject | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: Refused = None
    functions: Refused = None
    moderation: Refused = None
    web_search_options: Refused = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def n_logprobs(self) -> int | None:
        """See OpenAIRequest. Raises InputError."""
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs needs logprobs: true beside it", setting="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call of a tool."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def grammar(self) -> Grammar | None:
        """Raises InputError, as Structured, and for a forced tool that is not offered."""
        found = super().grammar
        if not self.is_forced:
            return found
        if found:
            raise InputError("tool_choice: a forced call has no other format", setting="tool_choice")
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return forced_call((tool.function.model_dump() for tool in self.tools or ()), name)

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The JSON schemas of the arguments of the tools that the model may call, by name."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.offered_tools}

    def chat(self) -> Chat:
        """The whole prompt, to be rendered by the model's own chat template."""
        tools = (tool.model_dump(exclude_unset=True) for tool in self.offered_tools)
        messages = tuple(message.for_template() for message in self.messages)
        return Chat(messages, tuple(tools), self.chat_template_kwargs or {})

    def in_words(self) -> list[ChatMessage]:
        """The messages as texts, for a question about passages, which is the last one."""
        return [ChatMessage(m["role"], m["content"]) for m in self.chat().in_words().messages]


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions: the prompt is the question."""

    prompt: Text | Ids | Annotated[list[Text] | list[Ids], Field(min_length=1, max_length=MAX_ITEMS)]
    max_tokens: Annotated[int | None, Field(ge=0), BeforeValidator(no_limit)] = None
    best_of: Literal[1] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _asks_for_something(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 is for `echo`: send 1 or more, or -1 for no limit")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens or None

    @property
    def rules(self) -> AnswerRules:
        """The rules of the answer. `echo`: the prompt's tokens get log probabilities, too; `max_tokens` 0: no answer."""
        scores_prompt = bool(self.echo) and self.logprobs is not None
        return replace(super().rules, scores_prompt=scores_prompt, reads_only=self.max_tokens == 0)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def n_logprobs(self) -> int | None:
        """See OpenAIRequest."""
        return self.logprobs
