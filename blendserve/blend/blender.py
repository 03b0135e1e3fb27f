"""A prompt and a store -> a prefilled cache and a report. What is missing or damaged is computed in the same request."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Literal

from blendserve.blend.cost import CostModel, LoadRate, calibrated, choose, estimates, free_ratio
from blendserve.blend.explain import explain
from blendserve.blend.layout import Layout, lay_out
from blendserve.blend.lookup import CORRUPT, Found, look_near, look_up, nothing, supposed, wanted
from blendserve.blend.near import Donors
from blendserve.blend.own_prefix import OwnPrefix
from blendserve.blend.policies.base import make_policy
from blendserve.blend.precompute import ChunkComputer, in_stacks
from blendserve.blend.precompute_run import PrecomputeReport, PrecomputeRun
from blendserve.blend.prefill import Prefilled, prefill
from blendserve.blend.priors import Known
from blendserve.blend.report import make_report
from blendserve.blend.single_flight import SingleFlight
from blendserve.blend.slow_link import Link, reason, worth_fetching
from blendserve.blend.while_waiting import WhileWaiting
from blendserve.blend.work import chunk_work
from blendserve.config import BlendConfig, Method, changed
from blendserve.core import BlendReport, ChunkKV, Explanation, Prompt, TokenIds
from blendserve.errors import CorruptRecord, LeftBehind, StoreError
from blendserve.models.adapter import Adapter
from blendserve.models.forward import BeforeLayer
from blendserve.models.kv_cache import KVCache
from blendserve.paths import cache_folder
from blendserve.registry import CORRECTIONS, REUSE
from blendserve.store import ChunkKey, KVStore, Snapshot, chunk_key
from blendserve.store.base import TimeSaved
from blendserve.store.codecs.base import SLOW, UNREACHABLE
from blendserve.store.memory import MemoryChunk
from blendserve.store.write_behind import write_behind
from blendserve.timing import Clock

Others = Literal["wait", "leave", "ignore"]
NOTHING: Mapping[TokenIds, ChunkKV] = {}
POLL_S = 0.1  # how often it is looked whether others are done


@dataclass(frozen=True, slots=True)
class Blended:
    """One request's prefill."""

    prefilled: Prefilled
    report: BlendReport
    explanation: Explanation
    absent: tuple[TokenIds, ...]  # chunks that were looked for and not found whole; () for the prefix's own
    computed: Mapping[
        TokenIds, ChunkKV
    ]  # of those that are not stored near, computed while others were on their way


class Blender:
    """Prefills prompts of one reader and one prefix from one store. Safe to share between threads."""

    def __init__(
        self,
        adapter: Adapter,
        fingerprint: str,
        store: KVStore,
        prefix: TokenIds,
        context: TokenIds,
        namespace: str = "",
        before_layer: BeforeLayer | None = None,
        *,
        costs: CostModel | None = None,
        link: Link | None = None,
    ) -> None:
        """context: what chunks are computed behind. before_layer: called in every pass, before each of its layers.

        costs: of this machine and reader; default: measured when they are first needed. link: the rate of the store's
        link; default: measured from now on.
        """
        self.adapter, self.store = adapter, store
        self._fingerprint, self._namespace = fingerprint, namespace
        self._prefix, self._context = prefix, context
        self._before_layer = before_layer
        self.known = Known(adapter, fingerprint, store, prefix, context)  # how the corpus's chunks move
        self.donors = Donors(store, self.key, namespace)  # for chunks that are nearly there
        self._computers: dict[TokenIds, ChunkComputer] = {}
        self._costs = costs
        self._load_rate = LoadRate()
        self._link = link or Link()
        self._own_prefix = OwnPrefix()
        self._flight = SingleFlight()
        self._damaged: set[ChunkKey] = set()  # records that are there and are to be replaced
        self._lock = threading.RLock()  # what runs before a layer may be another prefill of this blender

    def key(self, ids: TokenIds, context: TokenIds | None = None) -> ChunkKey:
        """The store's key of a chunk; `context` defaults to what this blender computes chunks behind."""
        before = self._context if context is None else context
        return chunk_key(self._fingerprint, before, ids, str(self.adapter.dtype), self._namespace)

    def like(self, store: KVStore, namespace: str, before_layer: BeforeLayer | None = None) -> Blender:
        """The same reader, prompt and measured costs for another namespace of a store."""
        other = Blender(
            self.adapter,
            self._fingerprint,
            store,
            self._prefix,
            self._context,
            namespace,
            before_layer,
            costs=self._costs,
            link=self._link,
        )
        other._flight, other.known, other._own_prefix = self._flight, self.known, self._own_prefix
        return other

    @property
    def load_s_per_token(self) -> float | None:
        """Seconds to read a stored token's KV, without waiting for a link; None before the first request."""
        return self._load_rate.seconds_per_token

    def forget(self, chunks: Sequence[TokenIds], kept: Sequence[TokenIds]) -> int:
        """Delete chunks from the store, except those that are in `kept` too -> how many were there.

        Raises StoreError where one could not be deleted; the others are.
        """
        there, trouble = 0, None
        for key in {self.key(ids) for ids in chunks} - {self.key(ids) for ids in kept}:
            try:
                there += self.store.delete(key)
            except StoreError as error:
                trouble = error
        if trouble:
            raise trouble
        return there

    def sample_link(self) -> None:
        """Before the first request: see how far a shared store is, and fetch the prefix, which every prompt wants."""
        if self.store.far:
            key = self.key(self._prefix, ())
            self._link.sample(self.store, [key])
            with suppress(StoreError), self.store.reading() as snapshot:  # a request will say it
                if view := snapshot.get(key):
                    self._own_prefix.keep(view)

    def wait_for_sample(self) -> None:
        """Until nothing of the link is looked at any more behind a request."""
        self._link.wait()

    def prefetch(self, prompt: Prompt, blend: BlendConfig) -> None:
        """A request for this prompt is on its way: have brought near what it will look for."""
        which = wanted(prompt, blend.method, self._exact_first(prompt)) if blend.method != "full" else []
        if which:
            with suppress(StoreError):
                # Where costs are not known yet, measuring them is not for this thread.
                measured = self._costs is not None
                slow = self._slow(prompt, blend, which) if measured else {}
                saved = self._compared(prompt, blend, which) if measured else None
                # One by one, as most stores have no use for them, and a key is a hash of all ids.
                keys = chain([self.key(prompt.prefix, ())], (self.key(prompt.chunks[i].ids) for i in which))
                self.store.prefetch((key for key in keys if key not in slow), saved)

    def run(
        self,
        prompt: Prompt,
        blend: BlendConfig,
        new_tokens: int = 0,
        clock: Clock | None = None,
        cache: KVCache | None = None,
        prefix_kv: ChunkKV | None = None,
    ) -> Blended:
        """Prefill a prompt by `blend.method`. Never fails for what the store holds or lacks.

        cache: the caller's own, with room for the prompt and `new_tokens`. prefix_kv: the prefix's KV, where the caller
        has it; by default the store is asked for it. Raises ConfigError for settings that the reader does not fit.
        """
        make_policy(blend).validate(self.adapter.n_layers)
        if blend.method == "reuse":
            blend = changed(blend, **REUSE)
        corrupt: dict[ChunkKey, str] = {}
        trouble = ""
        waiting = self._while_waiting(prompt, blend) if self.store.far else None
        finish = partial(self._finish, prompt, blend, new_tokens, clock, cache, waiting=waiting)
        while blend.method != "full" and not trouble:
            try:
                with self.store.reading() as snapshot:
                    done = self._from(snapshot, prompt, blend, corrupt, waiting, prefix_kv, finish)
                left = [why.chunk for why in done.report.unusable if why.kind in (SLOW, UNREACHABLE)]
                self._link.probe(self.store, [self.key(prompt.chunks[i].ids) for i in left])
                return done
            except CorruptRecord as error:
                corrupt[error.key] = error.what
                self._damaged.add(error.key)
            except StoreError as error:
                trouble = f"the store cannot be read: {error}"
        return self._finish(prompt, blend, new_tokens, clock, cache, nothing(prompt), trouble)

    def _from(
        self,
        snapshot: Snapshot,
        prompt: Prompt,
        blend: BlendConfig,
        corrupt: dict[ChunkKey, str],
        waiting: WhileWaiting | None,
        prefix_kv: ChunkKV | None,
        finish: Callable[[Found], Blended],
    ) -> Blended:
        """Look chunks up and finish; once more where one was left behind, and nothing that is here is asked for again."""
        which, n_layers = wanted(prompt, blend.method, self._exact_first(prompt)), self.adapter.n_layers
        slow, prefix_key = self._slow(prompt, blend, which), self.key(prompt.prefix, ())
        saved = self._compared(prompt, blend, which)
        prefix = self._prefix_here(prompt) if prefix_kv is None else MemoryChunk(prefix_kv)
        start = self._link.clock()
        while True:
            found = look_up(
                snapshot, prompt, which, self.key, prefix_key, n_layers, corrupt, slow, waiting, prefix, saved
            )
            found = replace(found, seconds=self._link.clock() - start)
            if blend.near and blend.method != "prefix":
                worth = partial(self._worth_reading, prompt, blend, found.looked_for)
                found = look_near(snapshot, prompt, found, self.donors, n_layers, corrupt, worth)
            self._damaged.update(corrupt)
            with suppress(LeftBehind):
                done = finish(found)
                if found.prefix and self.store.far and prompt.prefix == self._prefix:
                    self._own_prefix.keep(found.prefix)
                return done

    def _prefix_here(self, prompt: Prompt) -> MemoryChunk | None:
        """Where the store is another machine's, what is kept of it."""
        return self._own_prefix.view if self.store.far and prompt.prefix == self._prefix else None

    def _store_compares(self, blend: BlendConfig) -> bool:
        """Whether the store decides which chunks to fetch from another machine, and may."""
        return blend.method == "auto" and self.store.far and self.store.compares_cost

    def _compared(self, prompt: Prompt, blend: BlendConfig, which: Sequence[int]) -> TimeSaved | None:
        """What the store compares the time of fetching with; None where this request waits for every chunk."""
        return self.saved(prompt, blend, which) if self._store_compares(blend) else None

    def _while_waiting(self, prompt: Prompt, blend: BlendConfig) -> WhileWaiting:
        """Where it is weighed what to fetch, any chunk may be computed alone, as precompute does, in this thread."""
        context, n_layers = self._context, self.adapter.n_layers

        def seconds(n: int) -> float:
            return self.calibrate().seconds(chunk_work(n, len(context), context not in self._computers))

        may = prompt.chunks if self._store_compares(blend) else ()
        chunks = {self.key(chunk.ids): chunk.ids for chunk in may if len(chunk)}
        return WhileWaiting(chunks, seconds, partial(self.computer, context), n_layers)

    def _slow(self, prompt: Prompt, blend: BlendConfig, which: list[int]) -> dict[ChunkKey, str]:
        """What method "auto" leaves on another machine, as computing it would be quicker, and why. Raises StoreError."""
        if blend.method != "auto" or not self.store.far or self._store_compares(blend):
            return {}
        if self._link.seconds(1) is None:
            return {}
        keys, prefix_key = {i: self.key(prompt.chunks[i].ids) for i in which}, self.key(prompt.prefix, ())
        near = self.store.present([*keys.values(), prefix_key], remote=False)
        near |= {prefix_key} if self._prefix_here(prompt) else set()
        far = {i for i, key in keys.items() if key not in near}
        fetching = self._link.seconds(sum(len(prompt.chunks[i]) for i in far))
        if not far or fetching is None:
            return {}
        without = supposed(prompt, set(which) - far, prefix_key in near)
        costs = self._least(prompt, blend, supposed(prompt, which)), self._least(prompt, blend, without)
        if worth_fetching(fetching, *costs):
            return {}
        left = (key for key in (*keys.values(), prefix_key) if key not in near)
        return dict.fromkeys(left, reason(fetching, costs[1] - costs[0]))

    def _worth_reading(
        self, prompt: Prompt, blend: BlendConfig, which: Sequence[int], donors: Mapping[ChunkKey, int]
    ) -> Collection[ChunkKey]:
        """Of donors, with their numbers of tokens, those that method "auto" does not leave on another machine.

        Those there stay if fetching them takes longer than having all of their tokens would save. Raises StoreError.
        """
        if blend.method != "auto" or not self.store.far:
            return donors
        near = self.store.present(donors, remote=False)
        tokens = sum(n for key, n in donors.items() if key not in near)
        fetching = self._link.seconds(tokens) if tokens else None
        if fetching is None or fetching < tokens * self.saved(prompt, blend, which).per_token:
            return donors
        return near

    def saved(self, prompt: Prompt, blend: BlendConfig, which: Sequence[int]) -> TimeSaved:
        """Seconds that the stored KV of a token is expected to save, where that of all these chunks is used; and of what
        is worth something else: without the prefix the chunk behind it is not exact either.
        """
        tokens = sum(len(prompt.chunks[i]) for i in which)
        with_them, alone, no_prefix = (
            self._least(prompt, blend, found)
            for found in (supposed(prompt, which), supposed(prompt, ()), supposed(prompt, which, False))
        )
        prefix = {self.key(prompt.prefix, ()): max(0.0, no_prefix - with_them)} if prompt.prefix else {}
        return TimeSaved(max(0.0, alone - with_them) / max(1, tokens), prefix)

    def _least(self, prompt: Prompt, blend: BlendConfig, found: Found) -> float:
        """Seconds that the best method is expected to take."""
        return min(
            estimates(self.calibrate(), self._layouts(prompt, found), blend, self.adapter.n_layers).values()
        )

    def _finish(
        self,
        prompt: Prompt,
        blend: BlendConfig,
        new_tokens: int,
        clock: Clock | None,
        cache: KVCache | None,
        found: Found,
        why: str = "",
        waiting: WhileWaiting | None = None,
    ) -> Blended:
        layout = self._layout(prompt, found)
        lacking = (found for found in found.unusable if found.kind not in (CORRUPT, SLOW, UNREACHABLE))
        self._damaged.update(self.key(prompt.chunks[why.chunk].ids) for why in lacking)
        if blend.method == "auto":
            method, why = self._choose(prompt, blend, found, why)
            blend = changed(blend, method=method)
            layout = self._layout(prompt, found.only(method, self._exact_first(prompt)))
        if blend.ratio == "auto":
            blend = changed(blend, ratio=self._free_ratio(layout, blend))
        known = self.known.current() if CORRECTIONS.load(blend.correction).uses_prior else None
        before = waiting.waited if waiting else 0.0
        done = prefill(
            self.adapter, prompt, layout, blend, new_tokens, clock, cache, self._before_layer, known
        )
        waited = waiting.waited - before if waiting else 0.0
        reading = max(0.0, done.seconds_reading - waited)
        self._load_rate.record(reading, layout.n_loaded)
        if found.far_tokens:
            self._link.record(found.seconds + waited, found.far_tokens)
            self._link.decoded(reading, layout.n_loaded)
        missing = (i for i in found.looked_for if found.chunks[i] is None or i in found.computed)
        absent = tuple(prompt.chunks[i].ids for i in missing)
        if found.prefix is None and found.looked_for and prompt.prefix:
            absent = ((), *absent)
        computed = {prompt.chunks[i].ids: kv for i, kv in found.computed.items()}
        report = make_report(prompt, blend, layout, found, done, why, known is not None)
        return Blended(
            done, report, explain(prompt, blend.method, layout, found, done, why), absent, computed
        )

    def _choose(self, prompt: Prompt, blend: BlendConfig, found: Found, why: str) -> tuple[Method, str]:
        """The method that this machine is expected to be fastest with, and why if it is not blending."""
        if not found.hits and not found.near:
            return ("prefix" if found.prefix else "full"), why
        return choose(self.calibrate(), self._layouts(prompt, found), blend, self.adapter.n_layers)

    def _layouts(self, prompt: Prompt, found: Found) -> dict[Method, Layout]:
        """What each method would make of what was found."""
        methods: tuple[Method, ...] = ("full", "prefix", "blend")
        exact = self._exact_first(prompt)
        return {method: self._layout(prompt, found.only(method, exact)) for method in methods}

    def _free_ratio(self, layout: Layout, blend: BlendConfig) -> float:
        """What can be recomputed while the rest loads, as far as is known yet."""
        rate = self._load_rate.seconds_per_token
        return free_ratio(self.calibrate(), layout, blend, rate)

    def _layout(self, prompt: Prompt, found: Found) -> Layout:
        exact_first = self._exact_first(prompt)
        return lay_out(prompt, found.prefix, found.chunks, behind_prefix=exact_first, near=found.near)

    def _exact_first(self, prompt: Prompt) -> bool:
        """Whether a chunk right behind the prefix is exact."""
        return self._context == prompt.prefix

    def calibrate(self, say: Callable[[str], None] = lambda _: None) -> CostModel:
        """The cost model behind `method="auto"`: measured once per machine and reader, in a few seconds, and kept."""
        with self._lock:
            if self._costs is None:
                self._costs = calibrated(self.adapter, self._fingerprint, cache_folder() / "profit", say)
            return self._costs

    def computer(self, context: TokenIds) -> ChunkComputer:
        """Computes chunk KV behind these tokens; kept, as they are the same for all chunks."""
        with self._lock:
            if context not in self._computers:
                self._computers[context] = ChunkComputer(
                    self.adapter, context, before_layer=self._before_layer
                )
            return self._computers[context]

    def remember(self, absent: Sequence[TokenIds], computed: Mapping[TokenIds, ChunkKV] = NOTHING) -> int:
        """Compute chunks alone and store them, `()` standing for the prefix, in place of any damaged record.

        computed: the KV of those that need not be computed again.
        At its cap the store may not want a chunk; then it is not computed either, nor is one that others compute, or have
        stored meanwhile. Returns how many were stored; raises StoreError.
        """
        stored, per_token = 0, self.adapter.kv_bytes_per_token
        claimed: list[TokenIds] = []
        try:
            wanted = [
                x for x in dict.fromkeys(absent) if not x or self.store.wants(self.key(x), len(x) * per_token)
            ]
            claimed = self._claim(wanted)
            if () in claimed:
                stored += self._store_prefix()[0]
            here = [(ids, computed[ids]) for ids in claimed if ids in computed]
            mine, start = [ids for ids in claimed if ids and ids not in computed], time.perf_counter()
            fresh = zip(mine, self.computer(self._context).stream(mine), strict=True) if mine else ()
            for ids, kv in chain(here, fresh):
                stored += self.store.put(self.key(ids), kv)
                self.donors.stored(ids)
            self._flight.took(time.perf_counter() - start, sum(map(len, mine)))
            self._damaged.difference_update(map(self._stored_as, claimed))
        finally:
            for ids in claimed:
                self._flight.release(self._stored_as(ids))
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
        run, todo = PrecomputeRun(progress), self.missing(chunks)
        distinct = len({ids for ids in chunks if ids}) + bool(self._prefix)
        self.store.pin(self.key(ids) for ids in set(chunks) - set(todo))  # some may have come on demand
        run.total = sum(map(len, todo))
        if self._prefix and self._stored_as(()) not in self.store and self._claim([()]):
            try:
                run.count(*self._store_prefix())
            finally:
                self._flight.release(self._stored_as(()))
        left = self._compute(todo, run, alone=others == "ignore")
        if left and others == "wait":
            self._outwait(left, run)
            left = []
        return run.report(distinct, len(left))

    def _outwait(self, theirs: list[TokenIds], run: PrecomputeRun) -> None:
        """Wait for what others are computing, pin it, and compute what does not come."""
        left, give_up = theirs, time.monotonic() + self._flight.patience(sum(map(len, theirs)))
        while left:
            time.sleep(POLL_S)
            missing = self.missing(left)
            run.step(sum(map(len, left)) - sum(map(len, missing)))
            left = self._compute(missing, run, alone=time.monotonic() >= give_up)
        self.store.pin(self.key(ids) for ids in theirs)  # some may have come on demand

    def _compute(self, todo: Sequence[TokenIds], run: PrecomputeRun, alone: bool) -> list[TokenIds]:
        """Compute and store chunks, pinned -> those that others are computing. alone: whatever others do."""
        claimed, others, computer = deque[TokenIds](), list[TokenIds](), self.computer(self._context)

        def mine() -> Iterator[TokenIds]:
            for stack in in_stacks(todo, computer.stack_tokens):  # claimed in one round trip
                ours = stack if alone else self._claim(stack)
                claimed.extend(ours)
                others.extend(ids for ids in stack if ids not in set(ours))
                yield from ours

        fresh = ((self.key(kv.ids), kv) for kv in computer.stream(mine()))
        start, before = time.perf_counter(), run.tokens
        try:
            with closing(write_behind(self.store, fresh, computer.stack_tokens)) as stored:
                for n_bytes in stored:
                    ids = claimed.popleft()
                    self._flight.release(self.key(ids))
                    self.donors.stored(ids)
                    run.count(1, len(ids), n_bytes)
                    run.step(len(ids))
        finally:
            for ids in claimed:
                self._flight.release(self.key(ids))
        self._flight.took(time.perf_counter() - start, run.tokens - before)
        return self.missing(others)

    def _claim(self, chunks: Sequence[TokenIds]) -> list[TokenIds]:
        """The chunks, () for the prefix, that are this thread's to compute. Raises StoreError."""
        tokens = {self._stored_as(ids): len(ids) for ids in chunks}
        granted = self._flight.claim(self.store, tokens)
        for key in [key for key, lease in granted.items() if lease.stored and key not in self._damaged]:
            del granted[key]
            self._flight.release(key)
        return [ids for ids in chunks if self._stored_as(ids) in granted]

    def _stored_as(self, ids: TokenIds) -> ChunkKey:
        """The key of a chunk, of the prefix for ()."""
        return self.key(ids) if ids else self.key(self._prefix, ())

    def _store_prefix(self) -> tuple[int, int, int]:
        """Chunks, tokens and bytes stored: one prefix, or nothing where there is none."""
        if not self._prefix:
            return 0, 0, 0
        kv = self.computer(()).compute([self._prefix])[0]
        self.store.put_uncoded(self.key(self._prefix, ()), kv, pin=True)
        return 1, len(self._prefix), kv.n_bytes
