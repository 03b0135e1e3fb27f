"""POST /v1/messages and /v1/messages/count_tokens: the routes of Anthropic's Messages API.

Messages, tools, search results and documents go through the model's own chat template, as a plain chat of openai.py.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from blendserve.answer import Answer
from blendserve.core import Prompt
from blendserve.engine.chat import Chat
from blendserve.engine.request import Completed, PrefillDone
from blendserve.retrieve.structure import sentences
from blendserve.serve.answer_parts import AnswerParser, AnswerParts, begins_thought
from blendserve.serve.auth import LimitedTenantDep
from blendserve.serve.engine_client import ClientDep, EngineClient, RequestHandle
from blendserve.serve.keys import Tenant
from blendserve.serve.message_citations import MessageCiter
from blendserve.serve.message_schemas import CountRequest, MessagesRequest
from blendserve.serve.openai import ServedModel
from blendserve.serve.responses import ContextDep, StreamEvent, anthropic_error, error_details, figures
from blendserve.serve.tool_calls import Call, Schemas

COUNTED = 4  # times the context: clients also count prompts that do not fit, to shorten them

router = APIRouter(prefix="/v1/messages", tags=["Anthropic"])


@router.post("")
async def create(body: MessagesRequest, context: ContextDep) -> Response:
    """Answer the messages. The prompt is always made by the model's chat template; nothing is retrieved.

    `<name>:exact` reuses only the KV of a prompt's exact beginning. A stream's events are those of Anthropic's API. A
    `max_tokens` above what the context has left means as many as fit.
    """
    client = context.client
    served = ServedModel.of(client, body.model)
    chat, removed = body.chat().without_lines(client.http.volatile_lines)
    notices = client.notices.ignored(body) | ({"removed": removed} if removed else {})
    tools = {tool.name: tool.input_schema for tool in body.offered_tools}
    form = MessagesFormat(client, served.name, tools, MessageCiter(body), notices)
    return await context.respond(form, body.stream, served.constrain(body.query(chat)))


@router.post("/count_tokens")
async def count_tokens(body: CountRequest, client: ClientDep, tenant: LimitedTenantDep) -> dict[str, int]:
    """Count the tokens of a prompt, cached or not. Raises PromptTooLong above COUNTED times the context."""
    ServedModel.of(client, body.model)
    return {"input_tokens": len(await counted_prompt(client, tenant, body.chat()))}


async def counted_prompt(client: EngineClient, tenant: Tenant, plain: Chat | str) -> Prompt:
    """Build the prompt alone. Raises InputError; PromptTooLong above COUNTED times the context."""
    if isinstance(plain, Chat):
        plain, _ = plain.without_lines(client.http.volatile_lines)
    room = COUNTED * client.max_tokens
    return await client.collections.executor.run(tenant.name, client.prompts.plain, plain, room)


class MessagesFormat:
    """A response in Anthropic's format, whose `x_blendserve` has the report, timings and notices."""

    def __init__(
        self, client: EngineClient, model: str, tools: Schemas, citer: MessageCiter, notices: dict[str, Any]
    ) -> None:
        """model: its name in the response. tools: that it may call."""
        self._tokenizer = client.tokenizer
        self._citer = citer
        self.model = model
        self._tools = tools
        self._notices = notices
        self._id = f"msg_{secrets.token_hex(12)}"

    async def complete(self, handles: Sequence[RequestHandle], answers: Sequence[Answer]) -> dict[str, Any]:
        (handle,) = handles
        (answer,) = answers
        thought, text, calls = self._parser(handle).whole(answer.text)
        content = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
        if text and self._citer:
            content += await asyncio.to_thread(lambda: list(self._citer.blocks(text)))
        elif text:
            content.append({"type": "text", "text": text})
        usage = {**_input_usage(handle), "output_tokens": len(answer.token_ids)}
        return {
            **self._message([*content, *map(_tool_use, calls)], usage, _stop(answer, len(calls))),
            "x_blendserve": {**self._notices, **figures(answer)},
        }

    async def events(self, handles: Sequence[RequestHandle]) -> AsyncIterator[StreamEvent]:
        """Yield the events. The first comes after the prefill, as it has the cached tokens; an error is the last."""
        (handle,) = handles
        blocks = Blocks(self._citer)
        parser = self._parser(handle)
        try:
            async for event in handle.events():
                if isinstance(event, PrefillDone):
                    usage = {**_input_usage(handle), "output_tokens": 0}
                    message = {**self._message([], usage), "x_blendserve": self._notices}
                    yield {"type": "message_start", "message": message}
                for each in blocks.push(parser.read(event)):
                    yield each
                if isinstance(event, Completed):
                    for each in blocks.end():
                        yield each
                    yield self._message_delta(handle, event.answer, blocks.n_calls)
                    yield {"type": "message_stop"}
        except Exception as error:
            yield anthropic_error(error_details(error)[1])

    def _parser(self, handle: RequestHandle) -> AnswerParser:
        return AnswerParser(self._tools, begins_thought(self._tokenizer, handle.prompt_ids))

    def _message(
        self, content: list[dict[str, Any]], usage: dict[str, int], stop: dict[str, str | None] | None = None
    ) -> dict[str, Any]:
        names = {"id": self._id, "type": "message", "role": "assistant", "model": self.model}
        stop = stop or {"stop_reason": None, "stop_sequence": None}
        return {**names, "content": content, **stop, "usage": usage}

    def _message_delta(self, handle: RequestHandle, answer: Answer, n_calls: int) -> dict[str, Any]:
        return {
            "type": "message_delta",
            "delta": _stop(answer, n_calls),
            "usage": {**_input_usage(handle), "output_tokens": len(answer.token_ids)},
            "x_blendserve": figures(answer),
        }


class Blocks:
    """The content blocks of a streamed message: thoughts, texts and calls. With citations, each sentence is a block."""

    def __init__(self, citer: MessageCiter) -> None:
        self._citer = citer
        self._sentence = ""  # the open text block's text
        self._n = 0
        self._open = ""  # the open block's kind
        self.n_calls = 0

    def push(self, parts: AnswerParts) -> Iterator[dict[str, Any]]:
        """Yield the events of the next parts of the answer."""
        yield from self._push("thinking", parts.thought)
        said = self._sentence + parts.text
        starts = [start for start, _ in sentences(said)][1:] if self._citer else []
        for start, end in zip([0, *starts], [*starts, len(said)], strict=True):
            if start:
                yield from self.end()
            yield from self._push("text", said[max(start, len(said) - len(parts.text)) : end])
        self.n_calls += len(parts.calls)
        for call in parts.calls:
            yield from self.end()
            yield self._start({**_tool_use(call), "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            yield self._stop()

    def _push(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if text and self._open != kind:
            yield from self.end()
            extras = {"signature": ""} if kind == "thinking" else {}
            yield self._start({"type": kind, kind: "", **extras})
        if text and kind == "text":
            self._sentence += text
        if text:
            yield self._delta({"type": f"{kind}_delta", kind: text})

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the events that end the open block, if there is one."""
        sentence, self._sentence = self._sentence, ""
        for citation in self._citer.of_sentence(sentence) if sentence and self._citer else ():
            yield self._delta({"type": "citations_delta", "citation": citation})
        if self._open:
            yield self._stop()

    def _start(self, block: dict[str, Any]) -> dict[str, Any]:
        self._open = block["type"]
        return {"type": "content_block_start", "index": self._n, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._n, "delta": delta}

    def _stop(self) -> dict[str, Any]:
        self._open = ""
        self._n += 1
        return {"type": "content_block_stop", "index": self._n - 1}


def _tool_use(call: Call) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": f"toolu_{secrets.token_hex(12)}",
        "name": call.name,
        "input": call.input,
    }


def _stop(answer: Answer, n_calls: int) -> dict[str, str | None]:
    """Return why the answer ended, with the stop sequence that ended it, if one did."""
    if answer.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if n_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = "end_turn" if answer.stop_sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_sequence}


def _input_usage(handle: RequestHandle) -> dict[str, int]:
    """Return the prompt's tokens: computed for this request, and read from the cache."""
    cached = handle.cached_tokens
    counts = {"input_tokens": len(handle.prompt_ids) - cached, "cache_creation_input_tokens": 0}
    return {**counts, "cache_read_input_tokens": cached, "blended_input_tokens": handle.blended_tokens}
