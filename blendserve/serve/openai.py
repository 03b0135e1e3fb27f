"""POST /v1/chat/completions, POST /v1/completions, GET /v1/models: the routes of OpenAI's API."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from blendserve.core import Answer
from blendserve.engine.prompt import ChatMessage
from blendserve.engine.request import Completed, TextDelta
from blendserve.errors import InputError, NotFound
from blendserve.serve.auth import TenantDep
from blendserve.serve.engine_client import ClientDep, EngineClient, RequestHandle
from blendserve.serve.responses import Context, ContextDep, StreamEvent
from blendserve.serve.schemas import BlendOptions, ChatRequest, CompletionRequest, OpenAIRequest

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/chat/completions")
async def chat(body: ChatRequest, context: ContextDep) -> Response:
    """Answer the last user message from passages; earlier turns stay in the prompt.

    The passages are `documents`, in their order, and the parts of the message before the last `prompt.separator`.
    Without either, the message is the query that retrieves them.
    """
    *earlier, last = body.messages
    if last.role != "user":
        raise InputError(f"the last message has role {last.role!r}: it must have role 'user'")
    history = tuple(
        ChatMessage("system" if m.role == "developer" else m.role, m.content_text) for m in earlier
    )
    return await _respond(context, body, last.content_text, history)


@router.post("/completions")
async def complete(body: CompletionRequest, context: ContextDep) -> Response:
    """Answer the prompt from passages, as the last message of a chat."""
    prompt = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
    return await _respond(context, body, prompt)


@router.get("/models")
async def models(client: ClientDep, tenant: TenantDep) -> dict[str, Any]:
    """The served model, and the collections that this key may use."""
    extras = {"collections": client.collections.names(tenant), "slot_tokens": client.max_tokens}
    names = {"id": client.model_names[0], "object": "model", "created": 0, "owned_by": "blendserve"}
    return {"object": "list", "data": [{**names, "x_blendserve": extras}]}


@router.get("/models/{model:path}")
async def model(model: str, client: ClientDep, tenant: TenantDep) -> dict[str, Any]:
    """The served model, by any of its names."""
    _require_model(client, model)
    (found,) = (await models(client, tenant))["data"]
    return dict(found)


def _require_model(client: EngineClient, name: str) -> None:
    if name not in client.model_names:
        raise NotFound(f"there is no model {name!r} here: this server runs {client.model_names[0]!r}")


async def _respond(
    context: Context, body: OpenAIRequest, question: str, history: tuple[ChatMessage, ...] = ()
) -> Response:
    client = context.client
    _require_model(client, body.model)
    query = body.query(question, body.x_blendserve or BlendOptions(), history)
    query = query.split(client.config.prompt.separator)
    form = OpenAIFormat(client, body, retrieves=query.passages is None)
    return await context.respond(query, form, body.stream)


class OpenAIFormat:
    """A response in OpenAI's format, whose `x_blendserve` has the passages, report, timings and notices."""

    def __init__(self, client: EngineClient, body: OpenAIRequest, retrieves: bool) -> None:
        """retrieves: the question is a search query."""
        self._client, self._retrieves = client, retrieves
        self._is_chat = isinstance(body, ChatRequest)
        self._notices = client.notices.ignored(body)
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._id, self._created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)

    def complete(self, handle: RequestHandle, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {"message": message} if self._is_chat else {"text": answer.text}
        extras = {**self._context(handle), **_figures(answer)}
        whole = self._object("chat.completion", choice, answer.finish_reason)
        return {**whole, "usage": _usage(handle, answer), "x_blendserve": extras}

    async def events(self, handle: RequestHandle) -> AsyncIterator[StreamEvent]:
        first = self._chunk({"role": "assistant", "content": ""})
        yield {**first, "x_blendserve": self._context(handle)}
        async for event in handle.events():
            if isinstance(event, TextDelta):
                yield self._chunk({"content": event.text})
            elif isinstance(event, Completed):
                answer = event.answer
                last = self._chunk({}, answer.finish_reason)
                yield {**last, "x_blendserve": _figures(answer)}
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
        return {**names, "model": self._client.model_names[0], "choices": choices}


def _figures(answer: Answer) -> dict[str, Any]:
    return {"report": answer.report.to_dict(), "timings": answer.timings.to_dict()}


def _usage(handle: RequestHandle, answer: Answer) -> dict[str, Any]:
    """Cached: tokens of the prompt whose KV was not computed for this request."""
    n_prompt, n_new = len(handle.prompt_ids), len(answer.token_ids)
    counts = {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}
    return {**counts, "prompt_tokens_details": {"cached_tokens": handle.cached_tokens}}
