"""POST /v1/responses: OpenAI's Responses API, without stored responses. A request is read as a chat of openai.py.

Items become messages: texts, function calls and their outputs. Fields that need stored responses are refused by name.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from blendserve.answer import Answer
from blendserve.engine.request import Completed
from blendserve.errors import InputError
from blendserve.serve.answer_parts import AnswerParser, AnswerParts, begins_thought, url_citations
from blendserve.serve.engine_client import EngineClient, RequestHandle
from blendserve.serve.fields import (
    MAX_ITEMS,
    MAX_TOOLS,
    Body,
    JsonObject,
    Label,
    Name,
    Refused,
    Text,
    TokenLimit,
)
from blendserve.serve.openai import Asked, asked_by_chat, usage_of
from blendserve.serve.openai_schemas import ChatRequest, Function, FunctionName
from blendserve.serve.responses import ContextDep, StreamEvent, error_details, figures
from blendserve.serve.schemas import BlendOptions, Passages
from blendserve.serve.structured import InlineFormat, PlainFormat
from blendserve.serve.tool_calls import Call

router = APIRouter(prefix="/v1", tags=["OpenAI"])


def _message_of(item: Any) -> Any:
    """Return the item; one without a type is a message."""
    return {"type": "message", **item} if isinstance(item, dict) else item


class ContentPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: Text


class MessageItem(Body):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Annotated[list[ContentPart], Field(max_length=MAX_ITEMS)]

    def message(self) -> dict[str, Any]:
        """The message of a chat."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class CallItem(Body):
    type: Literal["function_call"]
    call_id: Label
    name: Name
    arguments: Text = ""

    def message(self) -> dict[str, Any]:
        """The message of a chat."""
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


class OutputItem(Body):
    type: Literal["function_call_output"]
    call_id: Label
    output: Text | Annotated[list[ContentPart], Field(max_length=MAX_ITEMS)]

    def message(self) -> dict[str, Any]:
        """The message of a chat."""
        parts = self.output
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "tool", "tool_call_id": self.call_id, "content": text}


class ReasoningItem(Body):
    """What a model thought in an earlier turn. It is left out of the prompt."""

    type: Literal["reasoning"]

    def message(self) -> None:
        """No message."""


Item = Annotated[MessageItem | CallItem | OutputItem | ReasoningItem, Field(discriminator="type")]


class FunctionTool(Function):
    type: Literal["function"]

    def tool(self) -> dict[str, Any]:
        """The tool of a chat."""
        given = self.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
        return {"type": "function", "function": given}


class FunctionChoice(FunctionName):
    type: Literal["function"]


class TextConfig(Body):
    format: Annotated[PlainFormat | InlineFormat, Field(discriminator="type")] | None = None
    verbosity: Label | None = None


class ResponsesRequest(Body):
    """POST /v1/responses"""

    model: Name | None = None
    input: (
        Text
        | Annotated[
            list[Annotated[Item, BeforeValidator(_message_of)]], Field(min_length=1, max_length=MAX_ITEMS)
        ]
    )
    instructions: Text | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    text: TextConfig | None = None
    max_output_tokens: TokenLimit = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_logprobs: Literal[0] | None = None
    stream: bool | None = False
    store: bool | None = None
    background: Literal[False] | None = None
    access_programs: Refused = None
    context_management: Refused = None
    conversation: Refused = None
    image: Refused = None
    moderation: Refused = None
    previous_response_id: Refused = None
    prompt: Refused = None
    truncation: Literal["disabled"] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: JsonObject | None = None
    include: list[Label] | None = None
    metadata: JsonObject | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    documents: Passages | None = None
    x_blendserve: BlendOptions | None = None

    def chat(self) -> ChatRequest:
        """Return the same request as a chat. Raises InputError for an input without a message."""
        said: list[dict[str, Any]] = []
        if self.instructions:
            said.append({"role": "system", "content": self.instructions})
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else []
        items += [message for item in self.input if not isinstance(item, str) and (message := item.message())]
        for message in items:
            if "tool_calls" in message and said and "tool_calls" in said[-1]:
                said[-1]["tool_calls"] += message["tool_calls"]  # calls of one turn
            else:
                said.append(message)
        if not items:
            raise InputError(
                "input: there is no message: send a text, or an item with a role", setting="input"
            )
        same = self.model_dump(
            include={"model", "temperature", "top_p", "stream", "user", "safety_identifier"},
            exclude_none=True,
        )
        choice: Any = self.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        return ChatRequest.model_validate(
            {
                **same,
                "messages": said,
                "tools": [tool.tool() for tool in self.tools or ()] or None,
                "tool_choice": choice,
                "response_format": self._format(),
                "max_completion_tokens": self.max_output_tokens,
                "documents": self.documents and [each.model_dump() for each in self.documents],
                "x_blendserve": self.x_blendserve and self.x_blendserve.model_dump(exclude_none=True),
            }
        )

    def _format(self) -> dict[str, Any] | None:
        """The `response_format` of a chat."""
        form = self.text and self.text.format
        if isinstance(form, InlineFormat):
            return {"type": form.type, "json_schema": {"name": form.name, "schema": form.of_answer}}
        return {"type": form.type} if form else None


@router.post("/responses")
async def respond(body: ResponsesRequest, context: ContextDep) -> Response:
    """Answer one turn, as a chat with the same messages and tools. Nothing is stored: send the whole conversation."""
    chat = body.chat()
    asked = asked_by_chat(context, chat)
    notices = {**asked.notices, **context.client.notices.ignored(body)}
    form = ResponsesFormat(context.client, body, chat, Asked(asked.model, asked.queries, notices))
    return await context.respond(form, body.stream, *asked.queries)


class ResponsesFormat:
    """A response in the form of OpenAI's Responses API."""

    def __init__(self, client: EngineClient, body: ResponsesRequest, chat: ChatRequest, asked: Asked) -> None:
        self._tokenizer = client.tokenizer
        self.model = asked.model
        self._notices = asked.notices
        self._tools = chat.schemas
        text = body.model_dump(by_alias=True)["text"] or {}
        echoed = {"instructions", "max_output_tokens", "temperature", "top_p", "metadata", "user"}
        self._facts = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": self.model,
            "error": None,
            "incomplete_details": None,
            "store": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "truncation": "disabled",
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": body.model_dump()["tool_choice"] or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            **body.model_dump(include=echoed),
        }

    async def complete(self, handles: Sequence[RequestHandle], answers: Sequence[Answer]) -> dict[str, Any]:
        thought, text, calls = self._parser(handles[0]).whole(answers[0].text)
        output = []
        if thought:
            output.append(_reasoning(thought))
        if text or not calls:
            message = _message(text)
            message["content"][0]["annotations"] = _annotations(answers[0], text)
            output.append(message)
        output += map(_call, calls)
        return self._ended(handles, answers[0], output)

    def _ended(
        self, handles: Sequence[RequestHandle], answer: Answer, output: list[dict[str, Any]]
    ) -> dict[str, Any]:
        is_cut = answer.finish_reason == "length"
        counts = usage_of(handles, [answer], 1)
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "output_tokens": counts["completion_tokens"],
            "total_tokens": counts["total_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "input_tokens_details": counts["prompt_tokens_details"],
        }
        return {
            **self._facts,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "usage": usage,
            "x_blendserve": {**self._notices, **figures(answer)},
        }

    async def events(self, handles: Sequence[RequestHandle]) -> AsyncIterator[StreamEvent]:
        """Yield the events of the response. An error is the last event."""
        stream = Stream()
        started = {**self._facts, "status": "in_progress", "output": [], "usage": None}
        for kind in ("created", "in_progress"):
            yield stream.event(kind, response=started)
        parser = self._parser(handles[0])
        try:
            async for event in handles[0].events():
                for each in stream.push(parser.read(event)):
                    yield each
                if isinstance(event, Completed):
                    for each in stream.end(event.answer):
                        yield each
                    ended = self._ended(handles, event.answer, stream.output)
                    yield stream.event(ended["status"], response=ended)
        except Exception as error:
            found = error_details(error)[1]["error"]
            told = {"code": found["code"] or found["type"], "message": found["message"], "param": None}
            yield {"type": "error", "sequence_number": stream.n, **told}

    def _parser(self, handle: RequestHandle) -> AnswerParser:
        return AnswerParser(self._tools, begins_thought(self._tokenizer, handle.prompt_ids))


class Stream:
    """The numbered events of one response, and its output items so far."""

    def __init__(self) -> None:
        self.n = 0
        self.output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the message or thought that grows

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The next event."""
        self.n += 1
        return {"type": f"response.{kind}", "sequence_number": self.n - 1, **fields}

    def push(self, parts: AnswerParts) -> Iterator[dict[str, Any]]:
        """Return the events of the next part of the answer."""
        for made, text in ((_reasoning(""), parts.thought), (_message(""), parts.text)):
            if text:
                yield from self._start_text(made)
                assert self._open
                self._open["content"][0]["text"] += text
                yield self._text_event("delta", delta=text)
        for call in parts.calls:
            yield from self._end_text()
            item = _call(call)
            self.output.append(item)
            at = {"output_index": len(self.output) - 1}
            yield self.event(
                "output_item.added", **at, item={**item, "arguments": "", "status": "in_progress"}
            )
            place = {**at, "item_id": item["id"]}
            yield self.event("function_call_arguments.delta", **place, delta=call.arguments)
            arguments = {"name": call.name, "arguments": call.arguments}
            yield self.event("function_call_arguments.done", **place, **arguments)
            yield self.event("output_item.done", **at, item=item)

    def end(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """Return the events that end the answer: its citations, and a message where it has neither text nor calls."""
        if not self.output or self.output[-1]["type"] == "reasoning":
            yield from self._start_text(_message(""))
        if self._open is not None and self._open["type"] == "message":
            (part,) = self._open["content"]
            for n, each in enumerate(_annotations(answer, part["text"])):
                part["annotations"].append(each)
                kind = "output_text.annotation.added"
                yield self.event(kind, **self._place(), annotation_index=n, annotation=each)
        yield from self._end_text()

    def _place(self) -> dict[str, Any]:
        assert self._open
        return {"item_id": self._open["id"], "output_index": len(self.output) - 1, "content_index": 0}

    def _text_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event of the open message or thought."""
        assert self._open
        name = self._open["content"][0]["type"]
        logprobs: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
        return self.event(f"{name}.{kind}", **self._place(), **fields, **logprobs)

    def _start_text(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Begin an item, unless an item of its type is open."""
        if self._open is not None and self._open["type"] == item["type"]:
            return
        yield from self._end_text()
        self._open = item
        self.output.append(item)
        started = {**item, "content": [], "status": "in_progress"}
        yield self.event("output_item.added", output_index=len(self.output) - 1, item=started)
        yield self.event("content_part.added", **self._place(), part={**item["content"][0]})

    def _end_text(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            (part,) = self._open["content"]
            yield self._text_event("done", text=part["text"])
            yield self.event("content_part.done", **self._place(), part=part)
            yield self.event("output_item.done", output_index=len(self.output) - 1, item=self._open)
            self._open = None


def _reasoning(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    names = {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": []}
    return {**names, "content": content, "status": "completed"}


def _annotations(answer: Answer, text: str) -> list[dict[str, Any]]:
    return [{"type": "url_citation", **each} for each in url_citations(answer, text)]


def _message(text: str) -> dict[str, Any]:
    names = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {**names, "status": "completed", "content": [part]}


def _call(call: Call) -> dict[str, Any]:
    ids = {"id": f"fc_{uuid.uuid4().hex}", "call_id": f"call_{uuid.uuid4().hex[:24]}"}
    said = {"name": call.name, "arguments": call.arguments}
    return {"type": "function_call", **ids, **said, "status": "completed"}
