"""POST /v1/chat/completions, POST /v1/completions, GET /v1/models: the routes of OpenAI's API."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from blendserve.core import Answer
from blendserve.engine.prompt import Turn
from blendserve.engine.request import Finished, TextDelta
from blendserve.errors import InputError, NotFound
from blendserve.serve.access import AskingArg, TenantArg
from blendserve.serve.asking import Answering, Ask, Asking
from blendserve.serve.replies import make_ask, reply
from blendserve.serve.schema import ChatRequest, CompletionRequest, Extras, Message, OpenAIRequest

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/chat/completions")
async def chat(body: ChatRequest, request: Request, service: AskingArg, tenant: TenantArg) -> Response:
    """Answer the last user message from passages; earlier turns stay in the prompt.

    The passages are `documents`, in their order, and the parts of the message before the last `prompt.separator`.
    Without either, the message is the query that retrieves them.
    """
    *before, last = body.messages
    if last.role != "user":
        raise InputError(f"the last message has role {last.role!r}: it must have role 'user'")
    ask = _ask(service, body, last.said, tuple(_turn(m) for m in before))
    shape = _Chat(service, body, ask)
    return await reply(request, service, tenant, ask, shape.whole, shape.events if body.stream else None)


@router.post("/completions")
async def complete(
    body: CompletionRequest, request: Request, service: AskingArg, tenant: TenantArg
) -> Response:
    """Answer the prompt from passages, as the last message of a chat."""
    ask = _ask(service, body, body.question)
    shape = _Completion(service, body, ask)
    return await reply(request, service, tenant, ask, shape.whole, shape.events if body.stream else None)


@router.get("/models")
async def models(service: AskingArg, tenant: TenantArg) -> dict[str, Any]:
    """The served model, and the collections that this key may use."""
    return {"object": "list", "data": [_model(service, service.collections(tenant))]}


@router.get("/models/{model:path}")
async def model(model: str, service: AskingArg, tenant: TenantArg) -> dict[str, Any]:
    """The served model, by any of its names."""
    _check_model(service, model)
    return _model(service, service.collections(tenant))


def _model(service: Asking, collections: list[str]) -> dict[str, Any]:
    extras = {"collections": collections, "slot_tokens": service.slot_tokens}
    names = {"id": service.model_name, "object": "model", "created": 0, "owned_by": "blendserve"}
    return {**names, "x_blendserve": extras}


def _check_model(service: Asking, name: str) -> None:
    if name not in service.model_names:
        raise NotFound(f"there is no model {name!r} here: this server runs {service.model_name!r}")


def _turn(message: Message) -> Turn:
    return Turn("system" if message.role == "developer" else message.role, message.said)


def _ask(service: Asking, body: OpenAIRequest, question: str, turns: tuple[Turn, ...] = ()) -> Ask:
    _check_model(service, body.model)
    return make_ask(service, question, body, body.x_blendserve or Extras(), turns)


class _Shape:
    """One response in OpenAI's format: what chat and plain completions have in common."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, service: Asking, body: OpenAIRequest, ask: Ask) -> None:
        self._service, self._retrieves = service, ask.passages is None
        self._ignored = service.notices.ignored(body)
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created, self._model = int(time.time()), service.model_name
        self._usage = bool(body.stream_options and body.stream_options.include_usage)

    def said(self, text: str) -> dict[str, Any]:
        """A choice's field for a whole text."""
        raise NotImplementedError

    def piece(self, text: str | None, first: bool) -> dict[str, Any]:
        """A choice's field for a piece of text; None = the last chunk, which has none."""
        raise NotImplementedError

    def whole(self, answering: Answering, answer: Answer) -> dict[str, Any]:
        frame = self._frame(self.kind, self.said(answer.text), answer.finish_reason)
        extras = {**self._context(answering), **_figures(answer)}
        return {**frame, "usage": _usage(answering, answer), "x_blendserve": extras}

    async def events(self, answering: Answering) -> AsyncIterator[dict[str, Any] | str]:
        first = self._frame(self.chunk_kind, self.piece("", first=True))
        yield {**first, "x_blendserve": self._context(answering)}
        async for event in answering.events():
            if isinstance(event, TextDelta):
                yield self._frame(self.chunk_kind, self.piece(event.text, first=False))
            elif isinstance(event, Finished):
                piece, reason = self.piece(None, first=False), event.answer.finish_reason
                last = self._frame(self.chunk_kind, piece, reason)
                yield {**last, "x_blendserve": _figures(event.answer)}
                if self._usage:
                    yield {**last, "choices": [], "usage": _usage(answering, event.answer)}
        yield "[DONE]"

    def _context(self, answering: Answering) -> dict[str, Any]:
        """The passages of the prompt, and notices about the request."""
        values = {"passages": [asdict(p) for p in answering.passages], **self._ignored}
        if self._retrieves:
            chunk_tokens = self._service.config.retrieve.chunk_tokens
            values |= self._service.notices.long_question(answering.question_tokens, chunk_tokens)
        return values

    def _frame(self, kind: str, said: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, **said, "finish_reason": reason, "logprobs": None}
        names = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return {**names, "choices": [choice]}


class _Chat(_Shape):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def piece(self, text: str | None, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        return {"delta": role if text is None else {**role, "content": text}}


class _Completion(_Shape):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def said(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def piece(self, text: str | None, first: bool) -> dict[str, Any]:
        return {"text": text or ""}


def _figures(answer: Answer) -> dict[str, Any]:
    return {"report": answer.report.to_dict(), "timings": answer.timings.to_dict()}


def _usage(answering: Answering, answer: Answer) -> dict[str, Any]:
    """Cached: tokens of the prompt whose KV was not computed for this request."""
    prompt, new = answering.prompt_tokens, len(answer.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": answering.cached_tokens},
    }
