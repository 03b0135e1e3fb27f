"""POST /v1/chat/completions, POST /v1/completions, GET /v1/models: the routes of OpenAI's API."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from blendserve.core import Answer
from blendserve.engine.request import Completed, TextDelta
from blendserve.errors import InputError, NotFound
from blendserve.serve.auth import TenantDep
from blendserve.serve.engine_client import ClientDep, EngineClient, QueryRequest, RequestHandle
from blendserve.serve.responses import Context, ContextDep, StreamEvent, figures
from blendserve.serve.schemas import ChatRequest, CompletionRequest, OpenAIRequest
from blendserve.serve.tool_calls import Call, ToolCallParser, split_calls

VARIANTS = (":chat", ":exact")  # of the model's names: plain prompts; those, and no approximate reuse

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/chat/completions")
async def chat(body: ChatRequest, context: ContextDep) -> Response:
    """Answer a chat: a question about passages, or a plain prompt.

    On a server with collections, the last user message is a question; earlier turns stay in the prompt. The passages are
    `documents`, in their order, and the parts of the message before the last `prompt.separator`. Without either, the
    message is the query that retrieves them.

    A server without collections, and the models `<name>:chat` and `<name>:exact`, read messages and tools by the model's
    own chat template, with nothing added. `:exact` reuses no KV but that of a prompt's exact beginning.
    """
    last = body.messages[-1]
    served, query = ServedModel.of(context.client, body.model), body.query(last.content_text, body.options)
    if served.is_plain and not _has_passages(context, query):
        plain, removed = body.chat().without_lines(context.client.http.volatile_lines)
        return await _respond(context, body, served, replace(query, plain=plain), removed)
    if last.role != "user":
        raise InputError(f"the last message has role {last.role!r}: it must have role 'user'")
    return await _respond(context, body, served, replace(query, history=body.history()))


@router.post("/completions")
async def complete(body: CompletionRequest, context: ContextDep) -> Response:
    """Answer the prompt from passages, as the last message of a chat; where chats are plain, continue it as it is."""
    prompt = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
    served, query = ServedModel.of(context.client, body.model), body.query(prompt, body.options)
    if served.is_plain and not _has_passages(context, query):
        query = replace(query, plain=prompt)
    return await _respond(context, body, served, query)


@router.get("/models")
async def models(client: ClientDep, tenant: TenantDep) -> dict[str, Any]:
    """The served model by each of its public names, and the collections that this key may use."""
    collections = client.collections.names(tenant)
    extras = {"collections": collections, "slot_tokens": client.max_tokens}
    variants = ("", *VARIANTS) if client.collections.indexes else ("", ":exact")
    facts = {"object": "model", "created": 0, "owned_by": "blendserve", "x_blendserve": extras}
    return {"object": "list", "data": [{"id": client.model_names[0] + each, **facts} for each in variants]}


@router.get("/models/{model:path}")
async def model(model: str, client: ClientDep, tenant: TenantDep) -> dict[str, Any]:
    """The served model, by any of its names."""
    served = ServedModel.of(client, model)
    return {**(await models(client, tenant))["data"][0], "id": served.name}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as a request names it."""

    name: str  # the public one, with its variant
    is_plain: bool  # whether prompts are read as they are
    is_exact: bool

    @classmethod
    def of(cls, client: EngineClient, name: str) -> ServedModel:
        """Raises NotFound for a name that the model does not have."""
        base, variant = name, ""
        if name not in client.model_names:
            variant = next((each for each in VARIANTS if name.endswith(each)), "")
            base = name.removesuffix(variant)
        if base not in client.model_names:
            raise NotFound(f"there is no model {name!r} here: this server runs {client.model_names[0]!r}")
        is_plain = bool(variant) or not client.collections.indexes
        return cls(client.model_names[0] + variant, is_plain, variant == ":exact")

    def constrain(self, query: QueryRequest) -> QueryRequest:
        """The request with the method that the model's name asks for."""
        return replace(query, blend={**query.blend, "method": "prefix"}) if self.is_exact else query


def _has_passages(context: Context, query: QueryRequest) -> bool:
    """Whether a request names passages, or collections to retrieve them from."""
    separator = context.client.config.prompt.separator
    is_cut = bool(separator) and separator in query.question
    return is_cut or query.passages is not None or query.collections is not None


async def _respond(
    context: Context,
    body: OpenAIRequest,
    served: ServedModel,
    query: QueryRequest,
    removed: Sequence[str] = (),
) -> Response:
    """removed: lines of the prompt that are left out."""
    client, query = context.client, served.constrain(replace(query, scope=body.scope, may_fill=True))
    if query.plain is None:
        query = query.split(client.config.prompt.separator)
    form = OpenAIFormat(client, body, served.name, query, removed)
    return await context.respond(query, form, body.stream)


class OpenAIFormat:
    """A response in OpenAI's format, whose `x_blendserve` has the passages, report, timings and notices."""

    def __init__(
        self,
        client: EngineClient,
        body: OpenAIRequest,
        model: str,
        query: QueryRequest,
        removed: Sequence[str] = (),
    ) -> None:
        """model: its name in the response."""
        self._client, self.model = client, model
        self._retrieves = query.passages is None and query.plain is None
        self._is_chat = isinstance(body, ChatRequest)
        tools = body.offered_tools if isinstance(body, ChatRequest) and query.plain is not None else []
        self._tools = [tool.function.name for tool in tools]
        self._notices = client.notices.ignored(body, *(() if query.plain else ("tools",)))
        self._notices |= {"removed": list(removed)} if removed else {}
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._id, self._created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)

    async def complete(self, handle: RequestHandle, answer: Answer) -> dict[str, Any]:
        text, calls = split_calls(answer.text, self._tools)
        message = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        message |= _called(calls)
        choice = {"message": message} if self._is_chat else {"text": text}
        extras = {**self._context(handle), **figures(answer)}
        whole = self._object("chat.completion", choice, _finish_reason(answer, calls))
        return {**whole, "usage": _usage(handle, answer), "x_blendserve": extras}

    async def events(self, handle: RequestHandle) -> AsyncIterator[StreamEvent]:
        first = self._chunk({"role": "assistant", "content": ""})
        yield {**first, "x_blendserve": self._context(handle)}
        parser = ToolCallParser(self._tools)
        async for event in handle.events():
            if isinstance(event, TextDelta):
                if text := parser.push(event.text):
                    yield self._chunk({"content": text})
            elif isinstance(event, Completed):
                answer, (rest, calls) = event.answer, parser.finish()
                if rest:
                    yield self._chunk({"content": rest})
                if calls:
                    yield self._chunk(_called(calls, numbered=True))
                last = self._chunk({}, _finish_reason(answer, calls))
                yield {**last, "x_blendserve": figures(answer)}
                if self._include_usage:
                    yield {**last, "choices": [], "usage": _usage(handle, answer)}
        yield "[DONE]"

    def _context(self, handle: RequestHandle) -> dict[str, Any]:
        """The passages of the prompt, and notices about the request."""
        context = {"passages": [asdict(p) for p in handle.passages], **self._notices}
        if self._retrieves:
            chunk_tokens = self._client.config.retrieve.chunk_tokens
            context |= self._client.notices.long_question(handle.question_tokens, chunk_tokens)
        return context

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return self._object("chat.completion.chunk", choice, finish_reason)

    def _object(self, kind: str, choice: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        kind = kind if self._is_chat else "text_completion"
        choices = [{"index": 0, **choice, "finish_reason": finish_reason, "logprobs": None}]
        names = {"id": self._id, "object": kind, "created": self._created}
        return {**names, "model": self.model, "choices": choices}


def _called(calls: Sequence[Call], numbered: bool = False) -> dict[str, Any]:
    """The field of a message, or of a stream's delta, for the tools that the model called; {} for none."""
    entries = [
        {
            **({"index": i} if numbered else {}),
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for i, call in enumerate(calls)
    ]
    return {"tool_calls": entries} if entries else {}


def _finish_reason(answer: Answer, calls: Sequence[Call]) -> str:
    """`length` also for an answer that was cut behind a call."""
    return "tool_calls" if calls and answer.finish_reason == "stop" else answer.finish_reason


def _usage(handle: RequestHandle, answer: Answer) -> dict[str, Any]:
    """Cached: tokens of the prompt whose KV was not computed for this request; blended: the approximate ones of them."""
    n_prompt, n_new = len(handle.prompt_ids), len(answer.token_ids)
    counts = {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}
    details = {"cached_tokens": handle.cached_tokens, "blended_tokens": handle.blended_tokens}
    return {**counts, "prompt_tokens_details": details}
