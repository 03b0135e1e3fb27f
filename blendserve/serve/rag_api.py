"""POST /v1/rag/query: a question, with everything that can be said about it and its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from blendserve.core import Answer
from blendserve.engine.queued import Finished, Piece
from blendserve.serve.access import ServiceArg, TenantArg
from blendserve.serve.replies import make_ask, reply
from blendserve.serve.schema import RagRequest
from blendserve.serve.service import Answering

router = APIRouter(prefix="/v1/rag", tags=["RAG"])


@router.post("/query")
async def query(body: RagRequest, request: Request, service: ServiceArg, tenant: TenantArg) -> Response:
    """Text, passages, report and timings; streamed: the passages first, then text, at last the figures."""
    ask = make_ask(body.question, body, body)
    return await reply(request, service, tenant, ask, _whole, _events if body.stream else None)


def _whole(answering: Answering, answer: Answer) -> dict[str, Any]:
    return {**answer.to_dict(), "cached_tokens": answering.cached_tokens}


async def _events(answering: Answering) -> AsyncIterator[dict[str, Any] | str]:
    yield {"event": "passages", "passages": [asdict(p) for p in answering.passages]}
    async for event in answering.events():
        if isinstance(event, Piece):
            yield {"event": "text", "text": event.text}
        elif isinstance(event, Finished):
            yield {"event": "done", **_whole(answering, event.answer)}
