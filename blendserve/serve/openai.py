"""POST /v1/chat/completions, POST /v1/completions, GET /v1/models: the routes of OpenAI's API."""

from __future__ import annotations

import secrets
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from math import isnan, nan
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from blendserve.answer import Answer, TokenLogprob
from blendserve.engine.request import Completed, PrefillDone, TextDelta, follow_up
from blendserve.errors import InputError, NotFound
from blendserve.serve.answer_parts import AnswerParser, begins_thought, url_citations
from blendserve.serve.auth import TenantDep
from blendserve.serve.engine_client import ClientDep, EngineClient, QueryRequest, RequestHandle, merged
from blendserve.serve.openai_schemas import ChatRequest, CompletionRequest, OpenAIRequest
from blendserve.serve.responses import Context, ContextDep, StreamEvent, figures
from blendserve.serve.tool_calls import Call

MAX_ANSWERS = 64  # to one request, over all its prompts
TASK = "### Task:\n"  # the beginning of Open WebUI's own requests: titles, tags, queries, texts with their own context
VARIANTS = (":chat", ":exact")  # of the model's names: plain prompts; plain prompts without approximate reuse

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/chat/completions")
async def chat(body: ChatRequest, context: ContextDep) -> Response:
    """Answer a chat: a question about passages, or a plain prompt.

    On a server with collections, the last user message is a question; earlier turns stay in the prompt. The passages are
    `documents`, in their order, and the parts of the message before the last `prompt.separator`. Without either, passages
    are retrieved by the message alone, and by the message after the user's previous one. If nothing similar is found, and
    for a front-end's own tasks, the chat is a plain prompt.

    A server without collections, and the models `<name>:chat` and `<name>:exact`, put messages and tools into the model's
    own chat template, with nothing added. `:exact` reuses only the KV of a prompt's exact beginning.
    """
    return await _respond(context, body, asked_by_chat(context, body))


def asked_by_chat(context: Context, body: ChatRequest) -> Asked:
    """Return what a chat asks of the engine. Raises InputError, NotFound."""
    last = body.messages[-1]
    client = context.client
    served = ServedModel.of(client, body.model)
    query = body.query(last.content_text, body.options)
    plain, removed = body.chat().without_lines(client.http.volatile_lines)
    has_passages = _has_passages(context, query)
    if not has_passages and (served.is_plain or last.content_text.startswith(TASK)):
        return Asked.of(context, body, served, [replace(query, plain=plain)], removed)
    said = [message.content_text for message in body.messages if message.role == "user"]
    if last.role not in ("user", "tool") or not said:
        raise InputError(
            f"the last message has role {last.role!r}: it must have role 'user', or 'tool' after one"
        )
    if body.chat_template_kwargs:
        advice = f"use the model '{client.model_names[0]}:chat'"
        text = f"chat_template_kwargs: not supported for a question about passages: {advice}"
        raise InputError(text, setting="chat_template_kwargs")
    *history, asked = body.in_words()
    query = replace(query, question=asked.text, history=tuple(history), queries=follow_up(said))
    if not has_passages and query.top_k is None and query.min_score is None and not query.filter:
        query = replace(query, small_talk=plain)
    return Asked.of(context, body, served, [query])


@router.post("/completions")
async def complete(body: CompletionRequest, context: ContextDep) -> Response:
    """Answer the prompt from passages, as the last message of a chat; where chats are plain, continue the prompt.

    echo: text and log probabilities begin with those of the prompt, computed by full prefill.
    """
    served = ServedModel.of(context.client, body.model)
    queries: list[QueryRequest] = []
    for prompt in body.prompts:
        text = prompt if isinstance(prompt, str) else context.client.tokenizer.decode(prompt)
        query = body.query(text, body.options)
        if served.is_plain and not _has_passages(context, query):
            query = replace(query, plain=prompt if isinstance(prompt, str) else tuple(prompt))
        elif body.echo:
            advice = f"use the model '{context.client.model_names[0]}:chat'"
            raise InputError(f"echo: a question about passages cannot be repeated: {advice}", setting="echo")
        queries.append(query)
    return await _respond(context, body, Asked.of(context, body, served, queries))


@router.get("/models")
async def models(client: ClientDep, tenant: TenantDep) -> dict[str, Any]:
    """List the served model by each of its public names, with the collections that this key may use."""
    collections = client.collections.names(tenant)
    extras = {"collections": collections, "slot_tokens": client.max_tokens}
    limits = {"max_model_len": client.max_tokens}  # vLLM's name
    variants = ("", *VARIANTS) if client.collections.indexes else ("", ":exact")
    names = [name + each for name in client.public_names for each in variants]
    facts = {"object": "model", "created": client.started, "owned_by": "blendserve", **limits}
    return {"object": "list", "data": [{"id": name, **facts, "x_blendserve": extras} for name in names]}


@router.get("/models/{model:path}")
async def model(model: str, client: ClientDep, tenant: TenantDep) -> dict[str, Any]:
    """Return the served model, by any of its names."""
    served = ServedModel.of(client, model)
    return {**(await models(client, tenant))["data"][0], "id": served.name}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a request names, and what its variant means."""

    name: str  # the public one, with its variant
    is_plain: bool  # whether prompts are used as they are, without passages
    is_exact: bool  # whether approximate KV is not reused

    @classmethod
    def of(cls, client: EngineClient, name: str | None) -> ServedModel:
        """Return the model of this name, by default the public one. Raises NotFound for another name."""
        name = client.model_names[0] if name is None else name
        base = name
        variant = ""
        if name not in client.model_names:
            variant = next((each for each in VARIANTS if name.endswith(each)), "")
            base = name.removesuffix(variant)
        if base not in client.model_names:
            raise NotFound(f"there is no model {name!r} on this server: it runs {client.model_names[0]!r}")
        is_plain = bool(variant) or not client.collections.indexes
        return cls(client.model_names[0] + variant, is_plain, variant == ":exact")

    def constrain(self, query: QueryRequest) -> QueryRequest:
        """Return the query with the method that the model's variant asks for."""
        return replace(query, blend={**query.blend, "method": "prefix"}) if self.is_exact else query


def _has_passages(context: Context, query: QueryRequest) -> bool:
    """Return whether a request brings passages, or names collections to retrieve them from."""
    separator = context.client.config.prompt.separator
    is_cut = bool(separator) and separator in query.question
    return is_cut or query.passages is not None or query.collections is not None


@dataclass(frozen=True, slots=True)
class Asked:
    """The queries of a request of OpenAI's API, and what its response says besides answers."""

    model: str  # its name in the response
    queries: Sequence[QueryRequest]
    notices: dict[str, Any]

    @classmethod
    def of(
        cls,
        context: Context,
        body: OpenAIRequest,
        served: ServedModel,
        queries: Sequence[QueryRequest],
        removed: Sequence[str] = (),
    ) -> Asked:
        """removed: lines of the prompt that are left out. Raises InputError for too many answers at once."""
        client = context.client
        n = body.n or 1
        if len(queries) * n > MAX_ANSWERS:
            raise InputError(f"the request asks for more than {MAX_ANSWERS} answers", setting="n")
        own = [replace(query, scope=body.scope, may_fill=True, n=n) for query in queries]
        separator = client.config.prompt.separator
        constrained = [
            query.split(separator) if query.plain is None else query for query in map(served.constrain, own)
        ]
        notices = client.notices.ignored(body) | ({"removed": list(removed)} if removed else {})
        return cls(served.name, constrained, notices)


async def _respond(context: Context, body: OpenAIRequest, asked: Asked) -> Response:
    form = OpenAIFormat(context.client, body, asked)
    return await context.respond(form, body.stream, *asked.queries)


class OpenAIFormat:
    """A response in OpenAI's format, whose `x_blendserve` has the passages, report, timings and notices."""

    def __init__(self, client: EngineClient, body: OpenAIRequest, asked: Asked) -> None:
        query = asked.queries[0]
        self._client = client
        self.model = asked.model
        self._notices = asked.notices
        self._retrieves = query.passages is None and query.plain is None
        self._is_chat = isinstance(body, ChatRequest)
        self._n = query.n
        self._tools = body.schemas if isinstance(body, ChatRequest) else {}
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        echoes = isinstance(body, CompletionRequest) and body.echo
        self._echoed = [query.question for query in asked.queries] if echoes else []
        self._scores_prompt = query.rules.scores_prompt
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)

    async def complete(self, handles: Sequence[RequestHandle], answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            self._choice(i, answer, handle)
            for i, (answer, handle) in enumerate(zip(answers, handles, strict=True))
        ]
        extras = {**self._context(handles[0]), **figures(answers[0])}
        whole = self._object("chat.completion", choices)
        return {**whole, "usage": usage_of(handles, answers, self._n), "x_blendserve": extras}

    def _choice(self, index: int, answer: Answer, handle: RequestHandle) -> dict[str, Any]:
        parts = self._parser(handle).whole(answer.text)
        echoed, prompt_logprobs = self._echo(index, handle)
        choice: dict[str, Any] = {"index": index}
        if self._is_chat:
            content = parts.text or (None if parts.calls else "")
            message = {"role": "assistant", "content": content, "refusal": None}
            message |= _annotated(answer, parts.text)
            if parts.thought:
                message["reasoning_content"] = parts.thought
            choice["message"] = message | _called(parts.calls)
        else:
            choice["text"] = echoed + parts.text
        choice["finish_reason"] = _finish_reason(answer, len(parts.calls))
        choice["logprobs"] = self._logprobs([*prompt_logprobs, *answer.logprobs])
        return choice

    def _echo(self, index: int, handle: RequestHandle) -> tuple[str, Sequence[TokenLogprob]]:
        """Return the prompt's text, where the answer repeats it, and the prompt's log probabilities."""
        echoed = self._echoed[index // self._n] if self._echoed else ""
        first = [TokenLogprob(handle.prompt_ids[0], nan)] if self._scores_prompt else []
        return echoed, [*first, *handle.prompt_logprobs]

    async def events(self, handles: Sequence[RequestHandle]) -> AsyncIterator[StreamEvent]:
        for i in range(len(handles)):
            first = self._chunk(i, {"role": "assistant", "content": ""})
            yield {**first, "x_blendserve": self._context(handles[0])} if i == 0 else first
        parsers = [self._parser(handle) for handle in handles]
        answers = dict[int, Answer]()
        n_calls = Counter[int]()
        async for i, event in merged(handles):
            if isinstance(event, PrefillDone) and self._echoed:
                text, logprobs = self._echo(i, handles[i])
                yield self._chunk(i, {"content": text}, logprobs=logprobs)
            parts = parsers[i].read(event)
            logprobs = event.logprobs if isinstance(event, TextDelta) else ()
            if parts.thought:
                yield self._chunk(i, {"reasoning_content": parts.thought})
            if parts.text or logprobs:
                yield self._chunk(i, {"content": parts.text}, logprobs=logprobs)
            if parts.calls:
                yield self._chunk(i, _called(parts.calls, n_calls[i]))
                n_calls[i] += len(parts.calls)
            if isinstance(event, Completed):
                answers[i] = event.answer
                said = self._parser(handles[i]).whole(event.answer.text).text
                last = self._chunk(
                    i, _annotated(event.answer, said), _finish_reason(event.answer, n_calls[i])
                )
                yield {**last, "x_blendserve": figures(event.answer)}
        if self._include_usage:
            usage = usage_of(handles, [answers[i] for i in range(len(handles))], self._n)
            yield {**self._object("chat.completion.chunk", []), "usage": usage}
        yield "[DONE]"

    def _parser(self, handle: RequestHandle) -> AnswerParser:
        """Return the parser of an answer. Completions have no thoughts."""
        begins = begins_thought(self._client.tokenizer, handle.prompt_ids) if self._is_chat else None
        return AnswerParser(self._tools, begins)

    def _context(self, handle: RequestHandle) -> dict[str, Any]:
        """Return the passages of the prompt, and notices about the request."""
        context = {"passages": [asdict(p) for p in handle.passages], **self._notices}
        if self._retrieves:
            chunk_tokens = self._client.config.retrieve.chunk_tokens
            context |= self._client.notices.long_question(handle.question_tokens, chunk_tokens)
        return context

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> dict[str, Any]:
        choice = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        ended = {"finish_reason": finish_reason, "logprobs": self._logprobs(logprobs)}
        return self._object("chat.completion.chunk", [{"index": index, **choice, **ended}])

    def _logprobs(self, found: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        form = chat_logprobs if self._is_chat else completion_logprobs
        return form(self._client.tokenizer, found) if found else None

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = kind if self._is_chat else "text_completion"
        names = {"id": self._id, "object": kind, "created": self._created}
        return {**names, "model": self.model, "choices": choices}


def _called(calls: Sequence[Call], start: int | None = None) -> dict[str, Any]:
    """Return the field of a message with tool calls; {} for none. start: number of a stream's first call."""
    entries = []
    for i, call in enumerate(calls):
        entry: dict[str, Any] = {} if start is None else {"index": start + i}
        entry |= {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
        entry["function"] = {"name": call.name, "arguments": call.arguments}
        entries.append(entry)
    return {"tool_calls": entries} if entries else {}


def _annotated(answer: Answer, said: str) -> dict[str, Any]:
    """Return the field of a message with the citations of its text; {} for none."""
    found = [{"type": "url_citation", "url_citation": each} for each in url_citations(answer, said)]
    return {"annotations": found} if found else {}


def _finish_reason(answer: Answer, n_calls: int) -> str:
    """Return why the answer ended; `length` also for an answer that was cut after a tool call."""
    return "tool_calls" if n_calls and answer.finish_reason == "stop" else answer.finish_reason


def chat_logprobs(tokenizer: Any, found: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log probabilities in the format of OpenAI's chats."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        {**entry(each.token, each.logprob), "top_logprobs": [entry(*other) for other in each.top]}
        for each in found
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Any, found: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log probabilities in the format of OpenAI's completions. Of tokens with equal text, the likelier is kept.

    The first token of a prompt has no probability: null.
    """
    texts = [tokenizer.decode([each.token]) for each in found]
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for each in found:
        if isnan(each.logprob):
            values.append(None)
            tops.append(None)
        else:
            values.append(each.logprob)
            tops.append({tokenizer.decode([i]): value for i, value in reversed(each.top)})
    starts = [0, *accumulate(map(len, texts))][: len(texts)]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": starts}


def usage_of(handles: Sequence[RequestHandle], answers: Sequence[Answer], n: int) -> dict[str, Any]:
    """Return token counts. Cached: prompt tokens whose KV was not computed for this request; blended: approximate ones.

    n: answers to each prompt, which counts once.
    """
    prompts = handles[::n]
    n_prompt = sum(len(handle.prompt_ids) for handle in prompts)
    n_new = sum(len(answer.token_ids) for answer in answers)
    counts = {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}
    details = {name: sum(getattr(h, name) for h in prompts) for name in ("cached_tokens", "blended_tokens")}
    return {**counts, "prompt_tokens_details": details}
