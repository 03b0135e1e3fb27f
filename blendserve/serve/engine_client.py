"""Sends requests to an engine: in this process (LocalEngineClient), or in replicas on a cluster (ray/ingress.py)."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends

from blendserve.answer import Answer, TokenLogprob
from blendserve.config import Config, ServeConfig
from blendserve.core import Passage, PassageFilter
from blendserve.engine.batch_engine import BatchEngine
from blendserve.engine.documents import Collections
from blendserve.engine.engine import Engine
from blendserve.engine.fair_executor import BackgroundThrottle, FairExecutor
from blendserve.engine.generate import TokenSequence
from blendserve.engine.prompt import PromptBuilder
from blendserve.engine.request import Completed, Event, Failed, PrefillDone, PreparedRequest, Request
from blendserve.errors import InputError, NotFound
from blendserve.quality.fidelity import Verified, Verifier, with_end
from blendserve.retrieve import Embedder, VectorIndex
from blendserve.retrieve.reranker import Reranker, reranked, reranker_of
from blendserve.serve.auth import ServiceBackend, backend_of
from blendserve.serve.jobs import Jobs
from blendserve.serve.keys import Tenant, counted
from blendserve.serve.metrics import HttpMetrics, Metrics
from blendserve.timing import Clock

WRITE_BACK_S = 5.0  # limit for storing what answered requests computed, when the server stops


@dataclass(frozen=True, slots=True)
class QueryRequest(Request):
    """A client's request. collections: None = all that the client may use."""

    collections: tuple[str, ...] | None = None
    check: bool = False  # whether its answer is compared with full prefill's right away
    progress: bool = False  # whether each layer of its prefill is an event
    n: int = 1  # answers to it, each with a seed of its own

    def seeded(self) -> QueryRequest:
        """Return the request with a random seed unless it has one, so that repeated sampling differs."""
        given = {k: v for k, v in self.decode.items() if v is not None}
        return replace(self, decode={"seed": secrets.randbits(31)} | given)


def each_answer(request: PreparedRequest, n: int) -> list[PreparedRequest]:
    """Return the request once per answer, with ascending seeds, as in vLLM."""
    others = (request.decode.with_values(seed=(request.decode.seed + i) % 2**63) for i in range(1, n))
    return [request, *(replace(request, decode=decode, clock=copy(request.clock)) for decode in others)]


class RequestHandle:
    """A queued or running request; call `cancel` when its client disconnects."""

    def __init__(
        self,
        request: PreparedRequest,
        events: AsyncIterator[Event],
        cancel: Callable[[], None],
        verify: Callable[[Answer], Future[Verified]] | None = None,
    ) -> None:
        """verify: compares the answer with full prefill's, where it is asked for."""
        self._events = events
        self.cancel = cancel
        self._verify = verify
        self.quality = request.quality.report if request.quality else None
        self.passages = request.passages
        self.prompt_ids = request.prompt.ids
        self.question_tokens = len(request.prompt.suffix)
        self.runs = request.prompt.runs  # stored chunks that were found in a plain prompt
        # Of the prompt; set when the prefill is done. Blended: those of the cached ones whose KV is approximate.
        self.cached_tokens = self.blended_tokens = 0
        self.prompt_logprobs: Sequence[TokenLogprob] = ()
        self._answer: Answer | None = None

    async def events(self) -> AsyncIterator[Event]:
        """Yield PrefillProgress if asked for, PrefillDone, TextDelta for each piece of text, Completed.

        Raises the error that the request failed with.
        """
        async for event in self._events:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, PrefillDone):
                self.cached_tokens = event.cached
                self.blended_tokens = event.blended
                self.prompt_logprobs = event.logprobs
            elif isinstance(event, Completed):
                self._answer = event.answer
            yield event
            if isinstance(event, Completed):
                return

    @property
    def usage(self) -> dict[str, int]:
        """Return the tokens of the prompt and, once it is complete, of the answer, for the log."""
        counts = {"prompt_tokens": len(self.prompt_ids), "cached_tokens": self.cached_tokens}
        return counts | ({"completion_tokens": len(self._answer.token_ids)} if self._answer else {})

    async def answer(self) -> Answer:
        """Return the complete answer. Raises the error that the request failed with."""
        (*_, last) = [event async for event in self.events()]
        assert isinstance(last, Completed)
        return last.answer

    async def verified(self, answer: Answer) -> Verified | None:
        """Return the comparison of the answer with full prefill, if it was asked for."""
        if self._verify is None:
            return None
        return await asyncio.wrap_future(self._verify(answer))


async def merged(handles: Sequence[RequestHandle]) -> AsyncIterator[tuple[int, Event]]:
    """Yield the events of all answers as they come, each with its answer's number. Raises the first error."""
    streams = [aiter(handle.events()) for handle in handles]
    upcoming = {asyncio.ensure_future(anext(each, None)): i for i, each in enumerate(streams)}
    try:
        while upcoming:
            done, _ = await asyncio.wait(upcoming, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=upcoming.__getitem__):
                i = upcoming.pop(task)
                if (event := task.result()) is not None:
                    upcoming[asyncio.ensure_future(anext(streams[i], None))] = i
                    yield i, event
    finally:
        for task in upcoming:
            task.cancel()


def served_names(model: str, served: Sequence[str]) -> tuple[str, ...]:
    """Return the model names that requests may use, public ones first: `served`, or a folder's last part."""
    folder = Path(model)
    public = served or (folder.resolve().name if folder.is_dir() else model,)
    return tuple(dict.fromkeys((*public, model)))


class TenantCollections:
    """The collections of a server, by the rights of each tenant. The executor's only thread embeds and searches."""

    def __init__(self, library: Collections, executor: FairExecutor, reranker: Reranker | None) -> None:
        self._library = library
        self.indexes = library.collections
        self.executor = executor
        self._reranker = reranker

    def names(self, tenant: Tenant) -> list[str]:
        """Return the names of the collections that a tenant may use."""
        return [name for name in self.indexes if tenant.may_use(name)]

    def find(self, tenant: Tenant, name: str | None) -> tuple[str, VectorIndex]:
        """Return a collection by name, or the tenant's only one. Raises InputError, NotFound (also for others')."""
        names = self.names(tenant)
        if name is None and len(names) != 1:
            raise InputError(f"set `collection`: this API key has {', '.join(names) or 'none'}")
        name = names[0] if name is None else name
        if name not in names:
            raise NotFound(f"there is no collection {name!r}: this API key has {', '.join(names) or 'none'}")
        return name, self.indexes[name]

    def search(
        self,
        tenant: Tenant,
        names: tuple[str, ...] | None,
        question: str,
        top_k: int,
        selection: PassageFilter,
    ) -> list[Passage]:
        """Return the best passages of these collections, or of all that the tenant may use. Runs on the executor.

        Raises NotFound; InputError on a server without collections.
        """
        if not self.indexes:
            raise InputError("this server has no collections to retrieve from: send `passages`")
        chosen = self.names(tenant) if names is None else dict.fromkeys(names)
        found = [self.find(tenant, name)[0] for name in chosen]
        selection = replace(selection, tags=tenant.tags)
        return reranked(partial(self._library.search, found), self._reranker)(question, top_k, selection)


class EngineClient(ServiceBackend):
    """Answers questions, wherever the engine runs."""

    http: ServeConfig
    collections: TenantCollections
    prompts: PromptBuilder

    def __init__(
        self,
        config: Config,
        http: ServeConfig,
        metrics: HttpMetrics,
        model: str,
        tokenizer: Any,
        max_tokens: int,
    ) -> None:
        """config: of the engine. model: its name there. max_tokens: of a request's prompt and answer.

        Raises ModelError for a reranker that cannot be loaded.
        """
        super().__init__(http, metrics, config.store.namespace)
        self.config = config
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.model_names = served_names(model, http.served_model_name)  # in requests; in responses the first
        self.public_names = http.served_model_name or self.model_names[:1]  # of /v1/models
        self.started = int(time.time())
        self.reranker = reranker_of(config.retrieve.reranker)

    @cached_property
    def embedder(self) -> Embedder:
        """Return the embedder of the settings, loaded on first use: for a server without collections."""
        return Embedder.load(self.config.retrieve.embedder)

    def close(self) -> None:
        """End the retrieval thread."""
        self.collections.executor.stop()

    async def submit(self, query: QueryRequest, tenant: Tenant) -> list[RequestHandle]:
        """Retrieve, build the prompt and queue it -> one handle for each of `query.n` answers.

        Raises RateLimited, NotFound and other BlendserveErrors.
        """
        raise NotImplementedError


ClientDep = Annotated[EngineClient, Depends(backend_of)]


class LocalEngineClient(EngineClient):
    """An engine and collections in this process. Raises ModelUnsupported for a model that fails the gate."""

    def __init__(self, engine: Engine, library: Collections, http: ServeConfig) -> None:
        """The engine is its opener's to close."""
        metrics = Metrics()
        model = engine.model
        self.engine = engine
        self.batch = BatchEngine(engine, metrics, http)
        self.jobs = Jobs(library.collections.values())
        self.prompts = engine.prompts
        super().__init__(engine.config, http, metrics, model.name, model.tokenizer, self.batch.pool.n_tokens)
        if self.max_tokens < engine.model.decoder.context_limit:
            engine.warn_of_room(self.max_tokens, library.collections.values())
        self.scheduler = self.batch.scheduler
        metrics.watch(
            lambda: self.scheduler.load,
            http.slots,
            engine.fetcher,
            lambda: self.batch.learnt_bytes,
            engine.quality.controllers,
            lambda: self.in_use["held_chunks"],
            lambda: engine.fetcher.failed_writes,
        )
        engine.quality.on_check.append(metrics.checked)
        throttle = BackgroundThrottle(http.background_share)
        retrieval = FairExecutor(
            "retrieval",
            http.max_concurrent,
            throttle,
            lambda: self.scheduler.in_flight,
            self.scheduler.has_other_tenants,
        )
        self.collections = TenantCollections(library, retrieval, self.reranker)
        self.storage = FairExecutor("storage", http.max_concurrent)  # for calls to the store alone
        self._preparing: Counter[str] = Counter()

    @property
    def is_alive(self) -> bool:
        return self.scheduler.alive

    @property
    def in_use(self) -> dict[str, int]:
        """Return what running requests occupy; all 0 when none runs."""
        fetcher = self.engine.fetcher
        n_waiting, n_slots = self.scheduler.load
        return {
            "running": self.limits.n_running,
            "preparing": self._preparing.total(),
            "retrieving": self.collections.executor.n_jobs,
            "waiting": n_waiting,
            "slots": n_slots,
            "held_chunks": fetcher.copies.shared.n_held,
            "incoming_chunks": len(fetcher.remote.incoming) if fetcher.remote else 0,
        }

    def start(self) -> None:
        """Start the model's thread."""
        self.scheduler.start()

    def drain(self) -> None:
        """Refuse new requests."""
        self.scheduler.drain()

    async def finish(self) -> None:
        """Stop the jobs; documents that they have embedded are saved."""
        await self.jobs.finish()

    def close(self) -> None:
        """Write back what answered requests computed, and end the threads."""
        self.scheduler.stop(min(WRITE_BACK_S, self.http.drain_s))
        super().close()
        self.storage.stop()

    async def submit(self, query: QueryRequest, tenant: Tenant) -> list[RequestHandle]:
        """See EngineClient."""
        self.scheduler.refuse_if_full(tenant.name, self._preparing[tenant.name])
        queues = [event_queue() for _ in range(query.n)]
        clock = Clock()
        search = partial(self.collections.search, tenant, query.collections)

        def prepare() -> list[TokenSequence]:
            """Check, search and tokenise, on the retrieval thread."""
            names = self.collections.names(tenant) if query.collections is None else query.collections
            indexes = [self.collections.find(tenant, name)[1] for name in names]
            request = self.engine.prepare(query.seeded(), search, clock, self.max_tokens, indexes)
            made = list[TokenSequence]()
            for each, (emit, _) in zip(each_answer(request, query.n), queues, strict=True):
                leader = made[0] if made else None
                made.append(self.batch.sequence(each, emit, tenant.name, tenant.namespace, leader))
            made[0].shows_progress = query.progress
            return made

        with counted(self._preparing, tenant.name), self.scheduler.preparing(tenant.name):
            sequences = await self.collections.executor.run(tenant.name, prepare)
            handles = list[RequestHandle]()
            try:
                for sequence, (_, events) in zip(sequences, queues, strict=True):
                    self.scheduler.submit(sequence)
                    cancel = partial(self.scheduler.cancel, sequence)
                    verify = partial(self._verify, sequence.request, tenant) if query.check else None
                    handles.append(RequestHandle(sequence.request, events, cancel, verify))
            except BaseException:
                for handle in handles:
                    handle.cancel()
                raise
        return handles

    def _verify(self, request: PreparedRequest, tenant: Tenant, answer: Answer) -> Future[Verified]:
        """Compare a served answer with full prefill's, as a background task."""
        model = self.engine.model
        blender = self.batch.blender(tenant.namespace)
        tokens = answer.token_ids or with_end(model, (), request.decode)
        decode = request.decode.with_values(max_new_tokens=len(tokens))
        verifier = Verifier(model, blender, request.prompt, decode)
        return self.batch.in_background(verifier.verify_served(request.blend, tokens), tenant.name)


def event_queue() -> tuple[Callable[[Event], None], AsyncIterator[Event]]:
    """Make a queue from another thread to this event loop -> the function that adds an event, and the events."""
    loop = asyncio.get_running_loop()
    queue = asyncio.Queue[Event]()

    def emit(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(queue.put_nowait, event)

    async def events() -> AsyncIterator[Event]:
        while True:
            yield await queue.get()

    return emit, events()
