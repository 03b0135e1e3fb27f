"""Many requests at a time on one engine: a scheduler with everything that it needs, for HTTP and workers alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from blendserve.blend.blender import Blender
from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.core import ChunkKV, Steps, TokenIds
from blendserve.engine.background import BackgroundTasks
from blendserve.engine.engine import Engine
from blendserve.engine.fair_executor import BackgroundThrottle
from blendserve.engine.prefill import Prefill, prefill
from blendserve.engine.prefix_cache import PrefixCache, PrefixKV
from blendserve.engine.queued import Event, Observer, QueuedRequest
from blendserve.engine.request import Plan
from blendserve.engine.scheduler import Scheduler
from blendserve.engine.slots import Slots
from blendserve.errors import StoreError
from blendserve.models.kv_cache import KVCache

PLACING = 0.05  # of what a token costs that runs: one that is loaded, moved and corrected


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
        self.slots = Slots(reader.adapter, slots, min(slot_tokens or limit, limit))
        self.fetcher = engine.fetcher
        self.fetcher.held.cap_bytes = share_bytes
        self.scheduler = Scheduler(
            reader, self.slots, queue, gap_s, prefill_share, observer, BackgroundThrottle(job_share)
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

    def queued(
        self, plan: Plan, emit: Callable[[Event], None], tenant: str = "", namespace: str = ""
    ) -> QueuedRequest:
        """A plan as the scheduler takes it: `scheduler.submit` and `scheduler.cancel` are next."""
        prompt, blender = plan.prompt, self.blender(namespace)
        own_prefix = prompt.prefix != self.engine.prompts.prefix and plan.blend.method != "full"

        def begin(cache: KVCache) -> Steps[Prefill]:
            prefix = self._prefix_kv(namespace, prompt.prefix) if own_prefix else None
            return prefill(plan, blender, cache, prefix)

        write_back = partial(self.background.write_back, blender, tenant)
        return QueuedRequest(
            tenant=tenant,
            plan=plan,
            prefill=begin,
            emit=emit,
            cost=self._cost(plan, blender),
            missed=write_back if self.engine.config.store.write_back else None,
            hold=blender.prefetch(prompt, plan.blend),
        )

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
        share = 0.0 if plan.blend.method == "reuse" else plan.blend.share
        return len(prompt) - known - stored + max(share, PLACING) * stored

    def _prefix_kv(self, namespace: str, ids: TokenIds) -> Steps[PrefixKV]:
        """KV of a conversation so far. On the model's thread."""
        base = self.engine.prompts.prefix
        if self._base is None:
            self._base = (yield from ChunkComputer(self.engine.reader.adapter, ()).steps([base]))[0]
        return (yield from self._prefixes.get(namespace, ids, base, self._base))
