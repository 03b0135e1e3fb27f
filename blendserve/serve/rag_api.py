"""POST /v1/rag/query: an answer with passages, report, timings and, on request, an explanation of every token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, get_args

from fastapi import APIRouter, Request
from starlette.responses import Response

import blendserve
from blendserve.config import Method
from blendserve.core import Answer
from blendserve.engine.request import Finished, PrefillDone, TextDelta
from blendserve.registry import CORRECTIONS, POLICIES
from blendserve.serve.access import AskingArg, TenantArg
from blendserve.serve.asking import Answering
from blendserve.serve.explained import explained
from blendserve.serve.replies import make_ask, reply
from blendserve.serve.schema import RagRequest

router = APIRouter(prefix="/v1/rag", tags=["RAG"])


@router.post("/query")
async def query(body: RagRequest, request: Request, service: AskingArg, tenant: TenantArg) -> Response:
    """Answer a question: text, passages, report and timings. A stream sends passages, text and figures, in this order.

    explain: also how the KV of each prompt token was obtained, and why; a stream sends it after the prefill.
    """
    ask = make_ask(service, body.question, body, body)
    shape = _Shape(service.tokenizer, body.explain, service.notices.in_extras(body))
    return await reply(request, service, tenant, ask, shape.whole, shape.events if body.stream else None)


@router.get("/settings")
async def settings(service: AskingArg, tenant: TenantArg) -> dict[str, Any]:
    """The server's defaults, the values that a request may choose, and the rights of this key."""
    config = service.config
    return {
        "version": blendserve.__version__,
        "model": service.model_name,
        "defaults": {
            **config.blend.model_dump(include={"method", "policy", "ratio", "correction"}),
            "top_k": config.retrieve.top_k,
            "max_tokens": config.decode.max_new_tokens,
            "temperature": config.decode.temperature,
        },
        "methods": get_args(Method),
        "policies": POLICIES.names,
        "corrections": CORRECTIONS.names,
        "collections": [
            {"name": name, "passages": len(service.library.collections[name])}
            for name in service.collections(tenant)
        ],
        "slot_tokens": service.slot_tokens,
        "max_body_bytes": service.serve.max_body_kb * 1024,
        "key": {"needed": service.keys is not None, "admin": tenant.admin, "read_only": tenant.read_only},
    }


class _Shape:
    """One response: whole, or as events."""

    def __init__(self, tokenizer: Any, explain: bool, notices: dict[str, Any]) -> None:
        self._tokenizer, self._explain, self._notices = tokenizer, explain, notices

    def whole(self, answering: Answering, answer: Answer) -> dict[str, Any]:
        values = {**answer.to_dict(), "cached_tokens": answering.cached_tokens, **self._notices}
        if self._explain and answer.explanation:
            values["explanation"] = explained(self._tokenizer, answering.ids, answer.explanation)
        return values

    async def events(self, answering: Answering) -> AsyncIterator[dict[str, Any] | str]:
        yield {"event": "passages", "passages": [asdict(p) for p in answering.passages], **self._notices}
        async for event in answering.events():
            if isinstance(event, PrefillDone) and self._explain:
                # On a thread: of a long prompt it takes a while, in which others' tokens are to be sent.
                told = await asyncio.to_thread(explained, self._tokenizer, answering.ids, event.explanation)
                yield {"event": "prefill", "report": event.report.to_dict(), "explanation": told}
            elif isinstance(event, TextDelta):
                yield {"event": "text", "text": event.text}
            elif isinstance(event, Finished):
                done = {**event.answer.to_dict(), "cached_tokens": answering.cached_tokens}
                yield {"event": "done", **done}
