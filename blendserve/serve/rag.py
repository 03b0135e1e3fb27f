"""POST /v1/rag/query: an answer with passages, report, timings and, on request, an explanation of every token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, get_args

from fastapi import APIRouter
from starlette.responses import Response

import blendserve
from blendserve.answer import Answer
from blendserve.config import Method
from blendserve.core import BlendReport
from blendserve.engine.chat import Chat
from blendserve.engine.prompt import ChatMessage
from blendserve.engine.request import Completed, PrefillDone, PrefillProgress, TextDelta, follow_up
from blendserve.registry import CORRECTIONS, POLICIES
from blendserve.serve.auth import TenantDep
from blendserve.serve.engine_client import ClientDep, EngineClient, RequestHandle
from blendserve.serve.responses import ContextDep, StreamEvent
from blendserve.serve.schemas import BlendFields, RagRequest

MAX_CHARACTER_TOKENS = 8  # tokens of one character; a longer incomplete sequence is shown as it is

router = APIRouter(prefix="/v1/rag", tags=["RAG"])


@router.post("/query")
async def query(body: RagRequest, context: ContextDep) -> Response:
    """Answer a question: text, passages, report and timings. A stream sends passages, text and figures, in this order.

    history: earlier messages. plain: the question is a whole chat message; stored text is found in it, and nothing is
    retrieved. explain: also return how the KV of each prompt token was obtained, and why; a stream sends it after the
    prefill, and the number of finished layers during the prefill. check: also return what full prefill would have chosen
    in place of each token of the answer; a stream ends with it.
    """
    client = context.client
    asked = body.query(body.question, body)
    asked = replace(asked, check=body.check, progress=body.explain and bool(body.stream))
    earlier = [(turn.role, turn.content) for turn in body.history]
    if body.plain:
        messages = [*earlier, ("user", body.question)]
        chat = Chat(tuple({"role": role, "content": text} for role, text in messages))
        asked = replace(asked, plain=chat)
    else:
        history = tuple(ChatMessage(role, text) for role, text in earlier)
        said = [*(turn.content for turn in body.history if turn.role == "user"), body.question]
        asked = replace(asked, history=history, queries=follow_up(said)).split(client.config.prompt.separator)
    form = RagFormat(client, body.explain, client.notices.as_extras(body))
    return await context.respond(form, body.stream, asked)


@router.get("/settings")
async def settings(client: ClientDep, tenant: TenantDep) -> dict[str, Any]:
    """Return the server's defaults, the values that a request may choose, and the rights of this key."""
    config = client.config
    return {
        "version": blendserve.__version__,
        "model": client.model_names[0],
        "defaults": {
            **config.blend.model_dump(include=set(BlendFields.model_fields)),
            "top_k": config.retrieve.top_k,
            "max_tokens": config.decode.answer_tokens,
            "temperature": config.decode.temperature,
        },
        "methods": get_args(Method),
        "policies": POLICIES.offered,
        "corrections": CORRECTIONS.offered,
        "collections": [
            {"name": name, "passages": len(client.collections.find(tenant, name)[1])}
            for name in client.collections.names(tenant)
        ],
        "slot_tokens": client.max_tokens,
        "max_body_bytes": client.http.max_body,
        "max_upload_bytes": client.http.max_upload_mb * 1_000_000,
        "key": {"needed": client.keys.are_needed, "admin": tenant.admin, "read_only": tenant.read_only},
    }


class RagFormat:
    """A response of /v1/rag/query."""

    def __init__(self, client: EngineClient, explain: bool, notices: dict[str, Any]) -> None:
        self.model = client.model_names[0]
        self._tokenizer = client.tokenizer
        self._explain = explain
        self._notices = notices

    async def complete(self, handles: Sequence[RequestHandle], answers: Sequence[Answer]) -> dict[str, Any]:
        (handle,) = handles
        (answer,) = answers
        body = {**answer.to_dict(), "cached_tokens": handle.cached_tokens, **self._notices}
        if self._explain:
            body["explanation"] = explanation_json(self._tokenizer, handle.prompt_ids, answer.report)
        return {**body, **await self._check(handle, answer)}

    async def events(self, handles: Sequence[RequestHandle]) -> AsyncIterator[StreamEvent]:
        (handle,) = handles
        n_tokens = len(handle.prompt_ids)
        passages = [asdict(passage) for passage in handle.passages]
        yield {"event": "passages", "passages": passages, "tokens": n_tokens, **self._notices}
        async for event in handle.events():
            if isinstance(event, PrefillProgress):
                yield {"event": "progress", "layers": event.layers, "n_layers": event.n_layers}
            elif isinstance(event, PrefillDone) and self._explain:
                # On a thread: for a long prompt it takes long enough to delay others' tokens.
                arguments = (self._tokenizer, handle.prompt_ids, event.report)
                explanation = await asyncio.to_thread(explanation_json, *arguments)
                yield {"event": "prefill", "report": event.report.to_dict(), "explanation": explanation}
            elif isinstance(event, TextDelta):
                yield {"event": "text", "text": event.text}
            elif isinstance(event, Completed):
                yield {"event": "done", **event.answer.to_dict(), "cached_tokens": handle.cached_tokens}
                if check := await self._check(handle, event.answer):
                    yield {"event": "check", **check}

    async def _check(self, handle: RequestHandle, answer: Answer) -> dict[str, Any]:
        """Return the comparison with full prefill: agreement, KL, and full prefill's token where it differs."""
        if not (found := await handle.verified(answer)):
            return {}
        texts = token_texts(self._tokenizer, found.tokens)
        full = (
            None if a == b else self._tokenizer.decode([b])
            for a, b in zip(found.tokens, found.full, strict=True)
        )
        return {"check": {**found.loss._asdict(), "tokens": [*zip(texts, full, strict=True)]}}


def explanation_json(tokenizer: Any, ids: Sequence[int], report: BlendReport) -> dict[str, Any]:
    """Return the explanation of a report, with the prompt's tokens as text."""
    return {"tokens": list(token_texts(tokenizer, ids)), **report.explain()}


def token_texts(tokenizer: Any, ids: Sequence[int]) -> Iterator[str]:
    """Yield the text of each token. Where several tokens make one character, the last token has it, the others ""."""
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text: str = tokenizer.decode(pending, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < MAX_CHARACTER_TOKENS:
            yield ""
        else:
            yield text
            pending.clear()
