"""Many requests at a time on one engine: a scheduler with everything that it needs, for HTTP and workers alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as GenericSequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Literal

from torch import Tensor

from blendserve.blend.blender import NOTHING, Blender
from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.core import ChunkKV, Steps, TokenIds
from blendserve.engine.engine import Engine
from blendserve.engine.fair_executor import BackgroundThrottle
from blendserve.engine.generate import Sequence, prefill
from blendserve.engine.prefix_cache import PrefixCache, PrefixKV
from blendserve.engine.request import Event, Observer, Plan
from blendserve.engine.scheduler import Scheduler
from blendserve.errors import Stopping, StoreError
from blendserve.models.kv_cache import CachePool
from blendserve.store import ChunkKey

LOADED_COST = 0.05  # of a token that is loaded, rotated and corrected, as a share of one that is computed


class BatchEngine:
    """An engine's requests, answered together by one thread. The engine is its opener's to close."""

    def __init__(
        self,
        engine: Engine,
        observer: Observer,
        *,
        slots: int,
        slot_tokens: int | None,
        queue: int,
        gap_s: float,
        prefill_share: float,
        share_bytes: int,
        prefix_bytes: int,
        job_share: float,
    ) -> None:
        """As ServeConfig names them. Raises ModelUnsupported for a reader that fails the gate."""
        engine.gate.require()
        reader, limit = engine.reader, engine.reader.adapter.context_limit
        self.pool = CachePool(reader.adapter, slots, min(slot_tokens or limit, limit))
        self.fetcher = engine.fetcher
        self.fetcher.held.cap_bytes = share_bytes
        self.scheduler = Scheduler(
            reader, self.pool, queue, gap_s, prefill_share, observer, BackgroundThrottle(job_share)
        )
        self.background = BackgroundTasks(self.scheduler)
        self.engine = engine
        self._prefixes = PrefixCache(reader.adapter, prefix_bytes)
        self._base: ChunkKV | None = None  # of the prefix that all prompts without turns have
        self._blenders: dict[str, Blender] = {}

    @property
    def namespaces(self) -> set[str]:
        """All that were asked for, and the engine's own."""
        return {self.engine.config.store.namespace, *self._blenders}

    def blender(self, namespace: str) -> Blender:
        """Reads and writes one namespace of the store. Its passes are for the model's thread."""
        if namespace not in self._blenders:
            like = self.engine.blender.like(self.engine.store, namespace)
            self._blenders[namespace] = like
        return self._blenders[namespace]

    def sequence(
        self, plan: Plan, emit: Callable[[Event], None], tenant: str = "", namespace: str = ""
    ) -> Sequence:
        """A plan as the scheduler takes it: `scheduler.submit` and `scheduler.cancel` are next."""
        blender = self.blender(namespace)
        return Sequence(
            plan,
            self.engine.reader,
            lambda sequence: self._prefill(sequence, blender, namespace),
            tenant=tenant,
            cost=self._cost(plan, blender),
            emit=emit,
            hold=blender.prefetch(plan.prompt, plan.blend),
        )

    def _prefill(self, sequence: Sequence, blender: Blender, namespace: str) -> Steps[Tensor]:
        prompt, method = sequence.plan.prompt, sequence.plan.blend.method
        has_turns = prompt.prefix != self.engine.prompts.prefix and method != "full"
        prefix = self._prefix_kv(namespace, prompt.prefix) if has_turns else None
        logits = yield from prefill(sequence, blender, prefix)
        if self.engine.config.store.write_back:
            self.background.write_back(blender, sequence.tenant, sequence.missing, sequence.computed)
        return logits

    def _cost(self, plan: Plan, blender: Blender) -> float:
        """Tokens that are expected to run through the model: what is not stored, and a share of what is."""
        prompt, base = plan.prompt, self.engine.prompts.prefix
        known = len(base) if prompt.prefix == base and plan.blend.method != "full" else 0
        stored = 0
        if plan.blend.method in ("auto", "blend", "reuse"):
            with suppress(StoreError):  # then everything is computed
                keys = [blender.key(chunk.ids) for chunk in prompt.chunks]
                there = self.engine.store.present(dict.fromkeys(keys), remote=False)
                stored = sum(len(c) for c, key in zip(prompt.chunks, keys, strict=True) if key in there)
        share = 0.0 if plan.blend.method == "reuse" else plan.blend.min_ratio
        return len(prompt) - known - stored + max(share, LOADED_COST) * stored

    def _prefix_kv(self, namespace: str, ids: TokenIds) -> Steps[PrefixKV]:
        """KV of a conversation so far. On the model's thread."""
        base = self.engine.prompts.prefix
        if self._base is None:
            self._base = (yield from ChunkComputer(self.engine.reader.adapter, ()).steps([base]))[0]
        return (yield from self._prefixes.get(namespace, ids, base, self._base))


class BackgroundTasks:
    """Makes tasks, one for each chunk, so that a request never waits for more than one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._planned: set[ChunkKey] = set()  # write-backs that are not done yet

    def write_back(
        self,
        blender: Blender,
        tenant: str,
        missing: GenericSequence[TokenIds],
        computed: Mapping[TokenIds, ChunkKV] = NOTHING,
    ) -> None:
        """Store chunks that a request found missing or damaged; once, if several did. On the model's thread.

        computed: the KV of those that need not be computed again.
        """
        for ids in missing:
            key = blender.key(ids)  # the prefix is (), as no chunk is
            have = {ids: computed[ids]} if ids in computed else NOTHING
            steps = self._write_back(blender, ids, key, have)
            if key not in self._planned and self._scheduler.submit_background(steps, tenant):
                self._planned.add(key)

    def precompute(
        self,
        blender: Blender,
        chunks: GenericSequence[TokenIds],
        done: Callable[[int], None],
        tenant: str = "",
    ) -> Future[None]:
        """Compute, store and pin chunks that are not there yet; `done(n)` after each, which plans the next one.

        What another process on the store is computing comes last, and is computed here if it is not there by then: the
        model's thread waits for nobody.
        """
        future: Future[None] = Future()
        todo: deque[tuple[TokenIds, Literal["leave", "ignore"]]] = deque((ids, "leave") for ids in chunks)

        def plan() -> None:
            if not todo:
                end()
            elif not self._scheduler.submit_background(compute(), tenant):
                end(StoreError("the server has too much to do: warm the cache again later"))

        def compute() -> Steps[None]:
            if future.cancelled():
                return
            ids, others = todo.popleft()
            try:
                left = yield from blender.precompute_one(ids, others)
            except GeneratorExit:
                end(Stopping("the server has shut down before all was computed: warm the cache again"))
                raise
            except Exception as error:
                end(error)
            else:
                if left:
                    todo.append((ids, "ignore"))
                done(len(chunks) - len(todo))
                plan()

        def end(error: Exception | None = None) -> None:
            with suppress(InvalidStateError):  # cancelled meanwhile
                future.set_exception(error) if error else future.set_result(None)

        plan()
        return future

    def _write_back(
        self, blender: Blender, ids: TokenIds, key: ChunkKey, computed: Mapping[TokenIds, ChunkKV]
    ) -> Steps[None]:
        try:
            yield from blender.write_back([ids], computed)
        finally:  # not before: a request that goes before the rest of this may miss the same chunk
            self._planned.discard(key)
