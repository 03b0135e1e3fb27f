"""A server's parts, and the way of a question through them; HTTP only translates to and from this."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from blendserve.blend.blender import Blender
from blendserve.blend.prefill import check_policy
from blendserve.config import changed
from blendserve.core import Answer, ChunkKV, Passage, Prompt, TokenIds
from blendserve.engine.background import Upkeep
from blendserve.engine.engine import Engine
from blendserve.engine.library import Library
from blendserve.engine.prefix_cache import ChatBuilder, Heads, Turn
from blendserve.engine.queued import Event, Failed, Finished, Front, Started, Work
from blendserve.engine.scheduler import Scheduler
from blendserve.engine.shared_loads import SharedLoads
from blendserve.engine.slots import Slots
from blendserve.errors import InputError
from blendserve.serve.jobs import Jobs
from blendserve.serve.keys import KeyFile, Tenant
from blendserve.serve.limits import Limits
from blendserve.serve.metrics import Metrics
from blendserve.serve.settings import ServeConfig
from blendserve.timing import Clock


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client wants to know. None = as the server is set up."""

    question: str
    turns: tuple[Turn, ...] = ()  # before the question
    passages: tuple[Passage, ...] | None = None  # the client's own; None = retrieved
    collections: tuple[str, ...] | None = None
    top_k: int | None = None
    blend: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)


class Answering:
    """A question on its way. Leave `async with` early, and it is cancelled."""

    def __init__(self, scheduler: Scheduler, work: Work, events: asyncio.Queue[Event]) -> None:
        self._scheduler, self._work, self._events = scheduler, work, events
        self.passages, self.prompt_tokens = work.passages, len(work.prompt)
        self.started: Started | None = None  # not before prefill is done

    async def events(self) -> AsyncIterator[Event]:
        """Started when prefill is done, pieces, and at last Finished. Raises what the request failed with."""
        while True:
            event = await self._events.get()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Started):
                self.started = event
            yield event
            if isinstance(event, Finished):
                return

    async def answer(self) -> Answer:
        """The whole answer. Raises what the request failed with."""
        async for event in self.events():
            if isinstance(event, Finished):
                return event.answer
        raise AssertionError("events end with Finished")

    def cancel(self) -> None:
        """Free its slot at once; harmless when it has finished."""
        self._scheduler.cancel(self._work)


class Service:
    """One engine, its scheduler and its collections. Raises ModelUnsupported for a reader that fails the gate."""

    def __init__(self, engine: Engine, library: Library, serve: ServeConfig) -> None:
        engine.gate.require()
        self.engine, self.library, self.serve = engine, library, serve
        self.keys = KeyFile(serve.keys) if serve.keys else None
        if self.keys:
            self.keys.tenants()  # a missing or damaged file is an error of the start, not of the first request
        self.limits = Limits(serve.max_concurrent, serve.max_per_minute)
        # One thread encodes while another decodes, and a tokenizer keeps settings of the last call.
        decoding = replace(engine.reader, tokenizer=copy.deepcopy(engine.reader.tokenizer))
        adapter = engine.reader.adapter
        room = serve.slot_tokens or adapter.context_limit
        self.slots = Slots(adapter, serve.slots, min(room, adapter.context_limit))
        self.metrics = Metrics()
        self._store = SharedLoads(engine.store, round(serve.share_mb * 1e6))
        self.scheduler = Scheduler(
            decoding,
            self.slots,
            serve.queue,
            serve.gap_ms / 1e3,
            serve.prefill_share,
            self.metrics,
            self._store,
        )
        self.metrics.watch(lambda: self.scheduler.load, serve.slots, engine.store)
        self.upkeep, self.jobs = Upkeep(self.scheduler), Jobs()
        self._chats = ChatBuilder(engine.prompts, engine.reader.tokenizer, engine.config.prompt)
        self._heads = Heads(self.scheduler.adapter, round(serve.conversations_mb * 1e6))
        self._base: ChunkKV | None = None
        self._blenders: dict[str, Blender] = {}
        self._preparing = 0
        self.retrieval = ThreadPoolExecutor(1, thread_name_prefix="retrieval")

    @property
    def anybody(self) -> Tenant:
        """Who everybody is when there are no keys."""
        return Tenant("", self.engine.config.store.namespace, admin=True)

    def start(self) -> None:
        """Start the model's thread."""
        self.scheduler.start()

    def close(self) -> None:
        """End the threads; the engine is its opener's to close."""
        self.scheduler.stop()
        self.retrieval.shutdown(cancel_futures=True)

    async def ask(self, tenant: Tenant, ask: Ask) -> Answering:
        """Retrieve, lay out and queue. Raises InputError, NotFound, Busy, Stopping and other BlendserveErrors."""
        self.scheduler.refuse_if_full(self._preparing)
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def emit(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        clock = Clock()
        self._preparing += 1
        try:
            work = await self.on_retrieval(self._prepare, tenant, ask, emit, clock)
        finally:
            self._preparing -= 1
        self.scheduler.submit(work)
        return Answering(self.scheduler, work, events)

    async def on_retrieval(self, call: Any, *args: Any) -> Any:
        """Run something on the thread that may touch indexes."""
        return await asyncio.get_running_loop().run_in_executor(self.retrieval, partial(call, *args))

    def blender(self, namespace: str) -> Blender:
        """Reads and writes one namespace of the store. Its passes are for the model's thread."""
        if namespace not in self._blenders:
            self._blenders[namespace] = self.engine.blender.like(
                self.scheduler.adapter, self._store, namespace
            )
        return self._blenders[namespace]

    def namespaces(self) -> set[str]:
        """All in which KV may lie: of the keys, and the engine's own."""
        own = {self.engine.config.store.namespace, *self._blenders}
        return own | (self.keys.namespaces() if self.keys else set())

    def chunks(self, passages: Sequence[Passage]) -> list[TokenIds]:
        """As they stand in prompts."""
        return [self.engine.prompts.chunk(p).ids for p in passages]

    def _prepare(self, tenant: Tenant, ask: Ask, emit: Callable[[Event], None], clock: Clock) -> Work:
        """What takes checking, searching and tokenising."""
        config = self.engine.config
        blend = changed(config.blend, **ask.blend)
        decode = changed(config.decode, **_seeded(ask.decode))
        check_policy(blend, self.engine.reader.adapter.n_layers)
        if not ask.question.strip():
            raise InputError("the question is empty: ask something")
        with clock.stage("retrieve"):
            passages = self._passages(tenant, ask)
        prompt = self._chats.build(ask.turns, ask.question, passages)
        blender = self.blender(tenant.namespace)
        own_head = prompt.prefix != self.engine.prompts.prefix and blend.method != "full"
        return Work(
            tenant=tenant.name,
            prompt=prompt,
            passages=passages,
            blend=blend,
            decode=decode,
            blender=blender,
            emit=emit,
            keys=frozenset(blender.key(chunk.ids) for chunk in prompt.chunks if len(chunk)),
            front=partial(self._front, tenant.namespace, prompt) if own_head else None,
            missed=partial(self.upkeep.remember, blender) if config.store.write_back else None,
            clock=clock,
        )

    def _passages(self, tenant: Tenant, ask: Ask) -> tuple[Passage, ...]:
        if ask.passages is not None:
            return ask.passages
        top_k = ask.top_k or self.engine.config.retrieve.top_k
        return tuple(self.library.search(tenant, ask.question, ask.collections, top_k))

    def _front(self, namespace: str, prompt: Prompt) -> Front:
        """KV of a conversation so far. On the model's thread."""
        base = self.engine.prompts.prefix
        if self._base is None:
            self._base = self.blender("").computer(()).compute([base])[0]
        return self._heads.front(namespace, prompt.prefix, base, self._base)


def _seeded(decode: dict[str, Any]) -> dict[str, Any]:
    """Sampling without a seed is to differ from time to time."""
    return {"seed": secrets.randbits(31)} | {k: v for k, v in decode.items() if v is not None}
