"""Many requests at a time on one engine: a scheduler with its memory, for HTTP and for Ray replicas."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.policies import make_policy
from blendserve.blend.precompute import ChunkWriter, MissingChunk
from blendserve.config import ServeConfig, StoreConfig
from blendserve.core import Prompt, Steps
from blendserve.engine.engine import Engine
from blendserve.engine.fair_executor import BackgroundThrottle, as_task
from blendserve.engine.generate import TokenSequence, prefill
from blendserve.engine.learn import Learner, LearntChunks
from blendserve.engine.request import Event, Observer, PreparedRequest
from blendserve.engine.scheduler import Scheduler
from blendserve.errors import RateLimited, StoreError
from blendserve.machine import checked_cap, fit
from blendserve.models.kv_cache import CachePool, tokens_of_slots
from blendserve.models.loader import LoadedModel
from blendserve.models.memory import MemoryPlan
from blendserve.store import ChunkKey

T = TypeVar("T")

log = logging.getLogger(__name__)

CONVERSATIONS = 256_000_000  # bytes of their KV
RECENT_TOKENS = 1 << 24  # of the recent prompts of all scopes: 64 MB
SCOPE_TOKENS = 1 << 12  # that a scope counts for without any prompt: its indexes take as much memory
LOADED_COST = 0.05  # of a token that is loaded, rotated and corrected, as a share of one that is computed


def plan_memory(model: LoadedModel, config: ServeConfig, store: StoreConfig) -> MemoryPlan:
    """What a server of a loaded model takes beside it. Raises ConfigError for slots that do not fit."""
    n_tokens = tokens_of_slots(model.decoder, config.slots, config.slot_tokens)
    mb = config.conversations_mb
    kept = fit(CONVERSATIONS) if mb is None else checked_cap(round(mb * 1e6), "serve.conversations_mb")
    return MemoryPlan(
        weights=model.weight_bytes,
        slots=config.slots,
        slot_tokens=n_tokens,
        kv=config.slots * n_tokens * model.decoder.kv_bytes_per_token,
        conversations=kept,
        shared=fit(config.share_mb * 10**6),
        others=fit(store.prefetch_bytes) + store.memory_bytes,
    )


@dataclass(frozen=True, slots=True)
class Scope:
    """The plain prompts of one client."""

    blender: Blender
    learner: Learner


class BatchEngine:
    """Answers an engine's requests together, on one thread. The engine is its opener's to close."""

    def __init__(self, engine: Engine, observer: Observer, config: ServeConfig) -> None:
        """Raises ModelUnsupported for a model that fails the gate."""
        engine.gate.require()
        model = engine.model
        plan = plan_memory(engine.model, config, engine.config.store)
        log.info("Memory: %s", plan)
        self.engine = engine
        self.fetcher = engine.fetcher
        self.pool = CachePool(model.decoder, config.slots, plan.slot_tokens)
        self.fetcher.copies.shared.cap_bytes = plan.shared
        engine.blender.prefixes.cap_bytes = plan.conversations
        share = config.prefill_share
        throttle = BackgroundThrottle(config.background_share)
        self.scheduler = Scheduler(
            model, self.pool, config.max_concurrent, config.gap_s, share, observer, throttle
        )
        self._blenders = {engine.config.store.namespace: engine.blender}
        self._scopes = dict[tuple[str, str], Scope]()
        self._learnt = dict[str, LearntChunks]()  # by namespace
        store = engine.config.store
        learns = store.write_back == "learn" or (store.write_back == "auto" and not config.has_keys)
        self._learn_bytes = round(engine.store.cap_bytes * store.learnt_share) if learns else 0
        self._writing: set[ChunkKey] = set()  # write-backs that are queued or under way

    @property
    def namespaces(self) -> set[str]:
        """All that were asked for, and the engine's own."""
        return set(self._blenders)

    def blender(self, namespace: str) -> Blender:
        """Reads and writes one namespace of the store."""
        if namespace not in self._blenders:
            self._blenders[namespace] = self.engine.blender.over(self.engine.store, namespace)
        return self._blenders[namespace]

    def sequence(
        self,
        request: PreparedRequest,
        emit: Callable[[Event], None],
        tenant: str = "",
        namespace: str = "",
        leader: TokenSequence | None = None,
    ) -> TokenSequence:
        """A prepared request, ready for `scheduler.submit`. Its plain prompt is matched with stored chunks.

        leader: another answer to the same prompt, submitted before, whose prefill is copied while it runs.
        """
        scope = self._scope(namespace, request.scope) if request.prompt.is_plain else None
        blender = scope.blender if scope else self.blender(namespace)
        if scope:
            with request.clock.stage("match"):
                request = replace(request, prompt=blender.match(request.prompt, request.blend))
        # Methods that search for nothing would learn what is stored.
        learns = request.learns and request.blend.method not in ("full", "prefix")
        return TokenSequence(
            request,
            self.engine.model,
            lambda sequence: self._prefill(sequence, blender, scope if learns else None, leader),
            tenant=tenant,
            cost=self._cost(request, blender),
            emit=emit,
            prefetch=blender.prefetch(request.prompt, request.blend),
            on_answer=lambda sequence: self._answered(sequence, blender),
        )

    def _scope(self, namespace: str, scope: str) -> Scope:
        """Return the scope of a client's plain prompts. Beyond RECENT_TOKENS, other scopes are forgotten."""
        found = self._scopes.pop((namespace, scope), None)
        if found is None:
            tokenizer = self.engine.model.tokenizer
            blender = self.blender(namespace).for_scope(scope, learns=self._learn_bytes > 0)
            found = Scope(blender, Learner(lambda token: tokenizer.decode([token]).endswith("\n")))
        self._scopes[namespace, scope] = found
        self._forget_scopes()
        return found

    def _forget_scopes(self) -> None:
        """Forget scopes beyond the limit: of the namespace that has most, the one that was used longest ago."""
        tokens = Counter[str]()
        for (namespace, _), scope in self._scopes.items():
            tokens[namespace] += SCOPE_TOKENS + scope.learner.n_tokens
        while tokens.total() > RECENT_TOKENS and len(self._scopes) > 1:
            largest = max(tokens, key=tokens.__getitem__)
            oldest = next(key for key in self._scopes if key[0] == largest)
            tokens[largest] -= SCOPE_TOKENS + self._scopes.pop(oldest).learner.n_tokens

    def _prefill(
        self,
        sequence: TokenSequence,
        blender: Blender,
        scope: Scope | None,
        leader: TokenSequence | None,
    ) -> Steps[Prefilled]:
        """scope: to learn from the prompt."""
        if leader and (copied := sequence.copied(leader)):
            yield from ()
            return copied
        prefilled = yield from prefill(sequence, blender)
        if self.engine.config.store.write_back != "none":
            self.write_back(blender.writer, prefilled.missing, sequence.tenant)
        if scope and blender.learnt:
            prompt = sequence.request.prompt
            tenant = sequence.tenant
            learning = self._learn(scope, blender.learnt, prompt, prefilled.n_known, tenant)
            self.scheduler.submit_background(learning, tenant)
        return prefilled

    def _learn(
        self, scope: Scope, writer: ChunkWriter, prompt: Prompt, n_known: int, tenant: str
    ) -> Steps[None]:
        """Have the chunks stored that a prompt repeats. n_known: tokens that the prefix cache had."""
        learnt = self._learnt.setdefault(writer.key.namespace, LearntChunks(self._learn_bytes))
        learnt.found([run.donor for run in prompt.runs])
        for ids in scope.learner.see(prompt, n_known):
            yield
            if learnt.admits(ids, writer):
                self.write_back(writer, [MissingChunk(ids)], tenant)

    def _answered(self, sequence: TokenSequence, blender: Blender) -> None:
        """Keep the KV of a blended plain prompt and its answer for the next turn; have some answers checked."""
        answer = sequence.answer
        cache = sequence.cache
        request = sequence.request
        assert answer
        assert cache
        if choice := request.quality:
            check = self.engine.quality.answered(choice, blender, request.prompt)
            if check:
                self.scheduler.submit_idle(check)
        try:
            blender.keep(request.prompt, answer.report, answer.token_ids[:-1], cache)
        except (MemoryError, RuntimeError) as error:  # no memory: the next turn computes it again
            log.warning("a conversation was not kept: %s", error)

    def _cost(self, request: PreparedRequest, blender: Blender) -> float:
        """Tokens that are expected to run through the model: all that are not stored, and a share of the others."""
        prompt = request.prompt
        n_prefix = 0
        n_stored = sum(len(run.span) for run in prompt.runs)
        if request.blend.method != "full":
            n_prefix = blender.n_cached(prompt, request.blend)
        if request.blend.method in ("auto", "blend", "reuse") and not prompt.is_plain:
            with suppress(StoreError):  # then everything is computed
                keys = [blender.key(chunk.ids) for chunk in prompt.chunks]
                stored = self.fetcher.locate(dict.fromkeys(keys))
                n_stored = sum(len(c) for c, key in zip(prompt.chunks, keys, strict=True) if key in stored)
        blend = request.blend
        ratio = 0.0 if blend.method == "reuse" else max(make_policy(blend).ratio, blend.refine)
        return len(prompt) - n_prefix - n_stored + max(ratio, LOADED_COST) * n_stored

    @property
    def learnt_bytes(self) -> int:
        """The bytes of stored chunks that were learnt from plain prompts."""
        return sum(learnt.n_bytes for learnt in list(self._learnt.values()))

    # Background tasks, one for each chunk, so that a request never waits for more than one

    def write_back(self, writer: ChunkWriter, missing: Sequence[MissingChunk], tenant: str) -> None:
        """Store chunks that a request missed; once, if several requests did. On the model's thread."""
        for chunk in missing:
            key = writer.key(chunk.ids)
            steps = self._write_back(writer, chunk, key)
            if key not in self._writing and self.scheduler.submit_background(steps, tenant):
                self._writing.add(key)

    def _write_back(self, writer: ChunkWriter, chunk: MissingChunk, key: ChunkKey) -> Steps[None]:
        try:
            yield from writer.write_back([chunk])
        finally:  # not before: another request may miss the same chunk meanwhile
            self._writing.discard(key)

    def in_background(self, steps: Steps[T], tenant: str) -> Future[T]:
        """Run steps as a background task of a tenant; it can be cancelled while it waits."""
        future: Future[T] = Future()
        if not self.scheduler.submit_background(as_task(steps, future), tenant):
            future.set_exception(RateLimited("the server has too much to do", 10))
        return future
