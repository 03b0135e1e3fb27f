"""A prompt and a store -> a prefilled cache and a report. What is missing or damaged is computed in the same request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from blendserve.blend.chunk_kv import ChunkComputer, in_stacks
from blendserve.blend.cost import CostModel, chunk_work
from blendserve.blend.layout import Layout, lay_out, look_up, missing_chunks, usable_chunks
from blendserve.blend.near import NearDuplicates, reuse_near
from blendserve.blend.own_prefix import OwnPrefix
from blendserve.blend.planner import Planner
from blendserve.blend.policies.base import make_policy
from blendserve.blend.precompute import PrecomputeReport, PrecomputeRun
from blendserve.blend.prefill import PassResult, blend_prefill
from blendserve.blend.priors import PriorStore
from blendserve.blend.report import explain, make_report
from blendserve.blend.single_flight import SingleFlight
from blendserve.config import BlendConfig, changed
from blendserve.core import BlendReport, ChunkKV, Explanation, Prompt, Steps, TokenIds, run
from blendserve.errors import StoreError
from blendserve.fetch.copies import Hold
from blendserve.fetch.fetcher import ChunkRequest, Fetch, KVFetcher
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.registry import CORRECTIONS, REUSE
from blendserve.store import ChunkKey, ChunkRecord, KVStore, TensorView, chunk_key
from blendserve.store.codecs.base import Codec
from blendserve.store.codecs.raw import Raw
from blendserve.store.write_behind import write_behind
from blendserve.timing import Clock

Others = Literal["wait", "leave", "ignore"]
NOTHING: Mapping[TokenIds, ChunkKV] = {}
MAY_BE_STORED = ("slow link", "unreachable")  # kinds of a miss of a chunk whose record may be good
POLL_S = 0.1  # how often it is looked whether others are done


@dataclass(frozen=True, slots=True)
class Prefilled:
    """One request's prefill."""

    result: PassResult
    report: BlendReport
    explanation: Explanation
    missing: tuple[TokenIds, ...]  # chunks that were looked for and not found whole; () for the prefix's own
    computed: Mapping[
        TokenIds, ChunkKV
    ]  # of those that are not stored near, computed while others were on their way


class Blender:
    """Prefills prompts of one reader and one prefix from one store. Safe to share between threads."""

    def __init__(
        self,
        adapter: DecoderModel,
        fingerprint: str,
        store: KVStore,
        prefix: TokenIds,
        context: TokenIds,
        namespace: str = "",
        *,
        costs: CostModel | None = None,
        fetcher: KVFetcher | None = None,
        codec: Codec | None = None,
    ) -> None:
        """context: what chunks are computed behind.

        costs: of this machine and reader; default: measured when they are first needed. fetcher: reads chunks for
        prompts; default: one over `store`. codec: of the chunks that it writes, but for the prefix; default: raw.
        """
        self.adapter, self.store, self.codec = adapter, store, codec or Raw()
        self._fingerprint, self._namespace = fingerprint, namespace
        self._prefix, self._context = prefix, context
        self.priors = PriorStore(adapter, fingerprint, store, prefix, context)  # how the corpus's chunks move
        self.near = NearDuplicates(store, self.key, namespace)  # for chunks that are nearly there
        self._computers: dict[TokenIds, ChunkComputer] = {}
        self.planner = Planner(adapter, fingerprint, costs)
        self.fetcher = fetcher or KVFetcher(store)
        self._own_prefix = OwnPrefix()
        self._flight = SingleFlight()
        self._damaged: set[ChunkKey] = set()  # records that are there and are to be replaced

    def key(self, ids: TokenIds, context: TokenIds | None = None) -> ChunkKey:
        """The store's key of a chunk; `context` defaults to what this blender computes chunks behind."""
        before = self._context if context is None else context
        return chunk_key(self._fingerprint, before, ids, str(self.adapter.dtype), self._namespace)

    def like(self, store: KVStore, namespace: str) -> Blender:
        """The same reader, prompt and measured costs for another namespace of a store."""
        other = Blender(
            self.adapter,
            self._fingerprint,
            store,
            self._prefix,
            self._context,
            namespace,
            fetcher=self.fetcher if store is self.store else KVFetcher(store, self.fetcher.link),
            codec=self.codec,
        )
        other.planner = self.planner
        other._flight, other.priors, other._own_prefix = self._flight, self.priors, self._own_prefix
        return other

    def forget(self, chunks: Sequence[TokenIds], kept: Sequence[TokenIds]) -> int:
        """Delete chunks from the store, except those that are in `kept` too -> how many were there.

        Raises StoreError where one could not be deleted; the others are.
        """
        there, trouble = 0, None
        for key in {self.key(ids) for ids in chunks} - {self.key(ids) for ids in kept}:
            try:
                self.fetcher.forget([key])
                there += self.store.delete([key])
            except StoreError as error:
                trouble = error
        if trouble:
            raise trouble
        return there

    def warm_up(self) -> None:
        """Before the first request: probe the link to a shared store, and fetch the prefix, which every prompt wants."""
        if self.fetcher.has_remote:
            prefix = ChunkRequest(self.key(self._prefix, ()), len(self._prefix))
            self.fetcher.warm_up([prefix])
            with suppress(StoreError), self.fetcher.fetch([prefix]) as fetch:
                if view := fetch.views.get(prefix.key):
                    self._own_prefix.keep(view)

    def prefetch(self, prompt: Prompt, blend: BlendConfig) -> Hold:
        """A request for this prompt is queued: fetch what it will look for; keep that until the hold is closed."""
        keys = self._keys(prompt, blend)
        costed = self.planner.is_calibrated  # measuring costs is not for this thread
        return self.fetcher.prefetch(self.requests(prompt, blend, keys, costed) if keys else [])

    def run(
        self,
        prompt: Prompt,
        blend: BlendConfig,
        new_tokens: int = 0,
        clock: Clock | None = None,
        cache: KVCache | None = None,
        prefix_kv: ChunkKV | None = None,
    ) -> Prefilled:
        """`prefill` to its end."""
        return run(self.prefill(prompt, blend, new_tokens, clock, cache, prefix_kv))

    def prefill(
        self,
        prompt: Prompt,
        blend: BlendConfig,
        new_tokens: int = 0,
        clock: Clock | None = None,
        cache: KVCache | None = None,
        prefix_kv: ChunkKV | None = None,
    ) -> Steps[Prefilled]:
        """Prefill a prompt by `blend.method`. Never fails for what the store holds or lacks.

        cache: the caller's own, with room for the prompt and `new_tokens`. prefix_kv: the prefix's KV, where the caller
        has it; by default the store is asked for it. Raises ConfigError for settings that the reader does not fit.
        """
        make_policy(blend).validate(self.adapter.n_layers)
        if blend.method == "reuse":
            blend = changed(blend, **REUSE)
        finish = partial(self._finish, prompt, blend, new_tokens, clock, cache)
        if blend.method == "full":
            return (yield from finish(lay_out(prompt)))
        keys, prefix_key = self._keys(prompt, blend), self.key(prompt.prefix, ())
        prefix = self._prefix_here(prompt) if prefix_kv is None else TensorView(prefix_kv)
        requests = self.requests(prompt, blend, keys, prefix=prefix is None)
        chunks = {key: prompt.chunks[i].ids for i, key in keys.items()}
        n_layers, first_is_exact = self.adapter.n_layers, self._exact_first(prompt)

        def compute(request: ChunkRequest) -> ChunkKV:
            return self.computer(self._context).compute([chunks[request.key]])[0]

        with self.fetcher.fetch(requests, compute) as fetch:
            while True:
                layout = look_up(fetch, prompt, keys, prefix_key, prefix, n_layers, first_is_exact)
                try:
                    if blend.near and blend.method != "prefix" and not fetch.trouble:
                        saved_s = (
                            self.time_saved(prompt, blend, [*keys])[0] if self._costs_matter(blend) else None
                        )
                        layout = reuse_near(layout, fetch, self.near, n_layers, saved_s)
                    done = yield from finish(layout, fetch)
                    front = layout.segments[0].view if prompt.prefix == self._prefix else None
                    if front and prompt.prefix and self.fetcher.has_remote:
                        self._own_prefix.keep(front)
                    return done
                except StoreError as error:
                    fetch.drop(error)

    def _keys(self, prompt: Prompt, blend: BlendConfig) -> dict[int, ChunkKey]:
        """The keys of the chunks that a method can use, by their numbers."""
        which = usable_chunks(prompt, blend.method, self._exact_first(prompt))
        return {i: self.key(prompt.chunks[i].ids) for i in which}

    def _prefix_here(self, prompt: Prompt) -> TensorView | None:
        """Where the store is another machine's, the copy that is kept of it."""
        own = self.fetcher.has_remote and prompt.prefix == self._prefix
        return self._own_prefix.view if own else None

    def _costs_matter(self, blend: BlendConfig) -> bool:
        return blend.method == "auto" and self.fetcher.has_remote

    def requests(
        self,
        prompt: Prompt,
        blend: BlendConfig,
        keys: Mapping[int, ChunkKey],
        costed: bool = True,
        prefix: bool = True,
    ) -> list[ChunkRequest]:
        """For these chunks, and for the prefix in front: what is asked for last may still be in transit at the start.

        costed: with what they cost and save, where method "auto" may leave them on another machine.
        """
        sizes = {key: len(prompt.chunks[i]) for i, key in keys.items()}
        prefix_key = self.key(prompt.prefix, ())
        if not (costed and self._costs_matter(blend)):
            chunks = [ChunkRequest(key, n) for key, n in sizes.items()]
            return [ChunkRequest(prefix_key, len(prompt.prefix)), *chunks] if prefix else chunks
        per_token, of_prefix = self.time_saved(prompt, blend, [*keys])
        n_context, costs = len(self._context), self.planner.calibrate()
        chunks = [
            ChunkRequest(key, n, per_token * n, costs.seconds(chunk_work(n, n_context)))
            for key, n in sizes.items()
        ]
        return [ChunkRequest(prefix_key, len(prompt.prefix), of_prefix), *chunks] if prefix else chunks

    def time_saved(self, prompt: Prompt, blend: BlendConfig, which: Sequence[int]) -> tuple[float, float]:
        """As `Planner.time_saved`, for chunks of this blender."""
        return self.planner.time_saved(prompt, blend, which, self._exact_first(prompt))

    def _finish(
        self,
        prompt: Prompt,
        blend: BlendConfig,
        new_tokens: int,
        clock: Clock | None,
        cache: KVCache | None,
        layout: Layout,
        fetch: Fetch | None = None,
    ) -> Steps[Prefilled]:
        misses = fetch.misses if fetch else {}
        self._damaged.update(
            key for key, miss in misses.items() if miss.kind not in ("absent", *MAY_BE_STORED)
        )
        plan = self.planner.plan(layout, blend)
        prior = self.priors.current() if CORRECTIONS.load(blend.correction).uses_prior else None
        before_s = fetch.waited_s if fetch else 0.0
        args = plan.layout, plan.blend, new_tokens, clock, cache, prior
        result = yield from blend_prefill(self.adapter, prompt, *args)
        waited_s = fetch.waited_s - before_s if fetch else 0.0
        read_s, n_loaded = max(0.0, result.read_s - waited_s), plan.layout.n_loaded
        self.planner.record_loading(read_s, n_loaded)
        missing, computed = missing_chunks(layout), dict[TokenIds, ChunkKV]()
        if fetch:
            fetch.record_reading(read_s, n_loaded)
            computed = {
                ids: fetch.computed[key] for ids in missing if (key := self.key(ids)) in fetch.computed
            }
        report = make_report(plan, result, prior is not None)
        return Prefilled(result, report, explain(plan, result), missing, computed)

    def _exact_first(self, prompt: Prompt) -> bool:
        """Whether a chunk right behind the prefix is exact."""
        return self._context == prompt.prefix

    def calibrate(self) -> CostModel:
        """The cost model behind `method="auto"`: see `Planner.calibrate`."""
        return self.planner.calibrate()

    def computer(self, context: TokenIds) -> ChunkComputer:
        """Computes chunk KV behind these tokens; kept, as they are the same for all chunks."""
        return run(self._computer(context))

    def _computer(self, context: TokenIds) -> Steps[ChunkComputer]:
        if context not in self._computers:
            kv = (yield from ChunkComputer(self.adapter, ()).steps([context]))[0] if context else None
            self._computers.setdefault(context, ChunkComputer(self.adapter, context, kv))
        return self._computers[context]

    def write_back(
        self, missing: Sequence[TokenIds], computed: Mapping[TokenIds, ChunkKV] = NOTHING
    ) -> Steps[int]:
        """Compute chunks alone and store them, `()` standing for the prefix, in place of any damaged record.

        computed: the KV of those that need not be computed again.
        At its cap the store may not want a chunk; then it is not computed either, nor is one that others compute, or have
        stored meanwhile. Returns how many were stored; raises StoreError.
        """
        stored, per_token = 0, self.adapter.kv_bytes_per_token
        claimed: list[TokenIds] = []
        try:
            wanted = [
                x
                for x in dict.fromkeys(missing)
                if not x or self.store.admits(self.key(x), self.codec.expected_bytes(len(x) * per_token))
            ]
            claimed = self._claim(wanted)
            if () in claimed:
                stored += (yield from self._store_prefix())[0]
            mine, start = [ids for ids in claimed if ids and ids not in computed], time.perf_counter()
            for ids in claimed:
                if ids in computed:
                    stored += self._store(ids, computed[ids])
            if mine:
                computer = yield from self._computer(self._context)
                for stack in in_stacks(mine, computer.stack_tokens):
                    for kv in (yield from computer.steps(stack)):
                        stored += self._store(kv.ids, kv)
            self._flight.took(time.perf_counter() - start, sum(map(len, mine)))
            self._damaged.difference_update(map(self._stored_as, claimed))
        finally:
            self._flight.release(self.store, map(self._stored_as, claimed))
        return stored

    def precompute_one(self, ids: TokenIds, others: Literal["leave", "ignore"]) -> Steps[bool]:
        """Compute a chunk that is not stored, store and pin it -> whether it is left to another process.

        others: what to do if another process on the store is computing it. Raises StoreError.
        """
        if self._prefix and not self.store.present([self._stored_as(())]):
            yield from self.write_back([()])
        if ids not in self.missing([ids]):
            self.store.pin([self.key(ids)])  # it may have come on demand
        elif others == "ignore" or self._claim([ids]):
            try:
                computer = yield from self._computer(self._context)
                self._store(ids, (yield from computer.steps([ids]))[0], pin=True)
            finally:
                self._flight.release(self.store, [self.key(ids)])
        return bool(self.missing([ids]))

    def _store(self, ids: TokenIds, kv: ChunkKV, pin: bool = False) -> bool:
        key = self.key(ids)
        stored = self.store.put(key, ChunkRecord.encode(key, kv, self.codec), pin)
        self.near.stored(ids)
        return stored

    def missing(self, chunks: Sequence[TokenIds]) -> list[TokenIds]:
        """The distinct chunks that the store does not hold, in order."""
        keys = {self.key(ids): ids for ids in chunks if ids}
        there = self.store.present(keys)
        return [ids for key, ids in keys.items() if key not in there]

    def precompute(
        self,
        chunks: Sequence[TokenIds],
        progress: Callable[[int, int], None] | None = None,
        others: Others = "wait",
    ) -> PrecomputeReport:
        """Compute and store the prefix and every chunk that is not there yet; each is safe as soon as it is stored.

        others: what to do about chunks that another process on the store is computing. "wait" for them at the end, no
        longer than computing them would take, and compute what is missing then; "leave" them; or "ignore" that.
        `progress(tokens done, tokens in all)` is called after each. Raises StoreError; what was stored stays.
        """
        made, todo = PrecomputeRun(progress), self.missing(chunks)
        distinct = len({ids for ids in chunks if ids}) + bool(self._prefix)
        self.store.pin(self.key(ids) for ids in set(chunks) - set(todo))  # some may have come on demand
        made.total = sum(map(len, todo))
        if self._prefix and not self.store.present([self._stored_as(())]) and self._claim([()]):
            try:
                made.count(*run(self._store_prefix()))
            finally:
                self._flight.release(self.store, [self._stored_as(())])
        left = self._compute(todo, made, alone=others == "ignore")
        if left and others == "wait":
            self._outwait(left, made)
            left = []
        return made.report(distinct, len(left))

    def _outwait(self, theirs: list[TokenIds], made: PrecomputeRun) -> None:
        """Wait for what others are computing, pin it, and compute what does not come."""
        left, give_up = theirs, time.monotonic() + self._flight.patience(sum(map(len, theirs)))
        while left:
            time.sleep(POLL_S)
            missing = self.missing(left)
            made.step(sum(map(len, left)) - sum(map(len, missing)))
            left = self._compute(missing, made, alone=time.monotonic() >= give_up)
        self.store.pin(self.key(ids) for ids in theirs)  # some may have come on demand

    def _compute(self, todo: Sequence[TokenIds], made: PrecomputeRun, alone: bool) -> list[TokenIds]:
        """Compute and store chunks, pinned -> those that others are computing. alone: whatever others do."""
        claimed, others, computer = deque[TokenIds](), list[TokenIds](), self.computer(self._context)

        def mine() -> Iterator[TokenIds]:
            for stack in in_stacks(todo, computer.stack_tokens):  # claimed in one round trip
                ours = stack if alone else self._claim(stack)
                claimed.extend(ours)
                others.extend(ids for ids in stack if ids not in set(ours))
                yield from ours

        fresh = ((self.key(kv.ids), kv) for kv in computer.stream(mine()))
        start, before = time.perf_counter(), made.tokens
        try:
            with closing(write_behind(self.store, self.codec, fresh, computer.stack_tokens)) as stored:
                for n_bytes in stored:
                    ids = claimed.popleft()
                    self._flight.release(self.store, [self.key(ids)])
                    self.near.stored(ids)
                    made.count(1, len(ids), n_bytes)
                    made.step(len(ids))
        finally:
            self._flight.release(self.store, map(self.key, claimed))
        self._flight.took(time.perf_counter() - start, made.tokens - before)
        return self.missing(others)

    def _claim(self, chunks: Sequence[TokenIds]) -> list[TokenIds]:
        """The chunks, () for the prefix, that are this thread's to compute. Raises StoreError."""
        tokens = {self._stored_as(ids): len(ids) for ids in chunks}
        granted = self._flight.claim(self.store, tokens)
        try:
            stored = self.store.contains(granted) - self._damaged
        except StoreError:
            self._flight.release(self.store, granted)
            raise
        self._flight.release(self.store, stored)
        granted -= stored
        return [ids for ids in chunks if self._stored_as(ids) in granted]

    def _stored_as(self, ids: TokenIds) -> ChunkKey:
        """The key of a chunk, of the prefix for ()."""
        return self.key(ids) if ids else self.key(self._prefix, ())

    def _store_prefix(self) -> Steps[tuple[int, int, int]]:
        """Chunks, tokens and bytes stored: one prefix, or nothing where there is none."""
        if not self._prefix:
            return 0, 0, 0
        kv = (yield from ChunkComputer(self.adapter, ()).steps([self._prefix]))[0]
        key = self.key(self._prefix, ())
        self.store.put(key, ChunkRecord.encode(key, kv, Raw()), pin=True)
        return 1, len(self._prefix), kv.n_bytes
