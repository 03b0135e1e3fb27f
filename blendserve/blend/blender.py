"""A prompt and a store -> a prefilled cache and a report. What is missing or damaged is computed in the same request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from blendserve.blend.cost import CostModel, LoadRate, calibrated, choose, free_ratio
from blendserve.blend.layout import Layout, lay_out
from blendserve.blend.lookup import Found, look_up, nothing, wanted
from blendserve.blend.policies.base import make_policy
from blendserve.blend.precompute import ChunkComputer
from blendserve.blend.prefill import Prefilled, prefill
from blendserve.blend.report import make_report
from blendserve.config import BlendConfig, Method, changed
from blendserve.core import BlendReport, ChunkKV, Prompt, TokenIds
from blendserve.errors import CorruptRecord, StoreError
from blendserve.models.adapter import Adapter
from blendserve.models.forward import BeforeLayer
from blendserve.models.kv_cache import KVCache
from blendserve.paths import cache_folder
from blendserve.registry import REUSE
from blendserve.store import ChunkKey, KVStore, Snapshot, chunk_key
from blendserve.store.memory import MemoryChunk
from blendserve.store.write_behind import write_behind
from blendserve.timing import Clock


@dataclass(frozen=True, slots=True)
class Blended:
    """One request's prefill."""

    prefilled: Prefilled
    report: BlendReport
    absent: tuple[TokenIds, ...]  # chunks that were looked for and not found whole; () for the prefix's own


@dataclass(frozen=True, slots=True)
class PrecomputeReport:
    """What a precompute run did."""

    chunks: int  # distinct ones asked for, the prefix included
    computed: int
    skipped: int  # already in the store
    tokens: int  # of the computed ones
    bytes: int
    seconds: float


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
    ) -> None:
        """context: what chunks are computed behind. before_layer: called in every pass, before each of its layers."""
        self.adapter, self.store = adapter, store
        self._fingerprint, self._namespace = fingerprint, namespace
        self._prefix, self._context = prefix, context
        self._before_layer = before_layer
        self._computers: dict[TokenIds, ChunkComputer] = {}
        self._costs: CostModel | None = None
        self._load_rate = LoadRate()
        self._lock = threading.RLock()  # what runs before a layer may be another prefill of this blender

    def key(self, ids: TokenIds, context: TokenIds | None = None) -> ChunkKey:
        """The store's key of a chunk; `context` defaults to what this blender computes chunks behind."""
        before = self._context if context is None else context
        return chunk_key(self._fingerprint, before, ids, str(self.adapter.dtype), self._namespace)

    def like(self, store: KVStore, namespace: str, before_layer: BeforeLayer | None = None) -> Blender:
        """The same reader, prompt and measured costs for another namespace of a store."""
        other = Blender(
            self.adapter, self._fingerprint, store, self._prefix, self._context, namespace, before_layer
        )
        other._costs = self._costs
        return other

    def forget(self, chunks: Sequence[TokenIds], kept: Sequence[TokenIds]) -> int:
        """Delete chunks from the store, except those that are in `kept` too -> how many were there."""
        keys = {self.key(ids) for ids in chunks} - {self.key(ids) for ids in kept}
        return sum(self.store.delete(key) for key in keys)

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
        while blend.method != "full" and not trouble:
            try:
                with self.store.reading() as snapshot:
                    found = self._look_up(snapshot, prompt, blend.method, corrupt)
                    if prefix_kv is not None:
                        found = replace(found, prefix=MemoryChunk(prefix_kv))
                    return self._finish(prompt, blend, new_tokens, clock, cache, found)
            except CorruptRecord as error:
                corrupt[error.key] = error.what
            except StoreError as error:
                trouble = f"the store cannot be read: {error}"
        return self._finish(prompt, blend, new_tokens, clock, cache, nothing(prompt), trouble)

    def _look_up(
        self, snapshot: Snapshot, prompt: Prompt, method: Method, corrupt: dict[ChunkKey, str]
    ) -> Found:
        which = wanted(prompt, method, self._exact_first(prompt))
        prefix_key = self.key(prompt.prefix, ())
        return look_up(snapshot, prompt, which, self.key, prefix_key, self.adapter.n_layers, corrupt)

    def _finish(
        self,
        prompt: Prompt,
        blend: BlendConfig,
        new_tokens: int,
        clock: Clock | None,
        cache: KVCache | None,
        found: Found,
        why: str = "",
    ) -> Blended:
        layout = self._layout(prompt, found)
        if blend.method == "auto":
            method, why = self._choose(prompt, blend, found, why)
            blend = changed(blend, method=method)
            layout = self._layout(prompt, found.only(method, self._exact_first(prompt)))
        if blend.ratio == "auto":
            blend = changed(blend, ratio=self._free_ratio(layout, blend))
        done = prefill(self.adapter, prompt, layout, blend, new_tokens, clock, cache, self._before_layer)
        self._load_rate.record(done.seconds_reading, layout.n_loaded)
        absent = tuple(prompt.chunks[i].ids for i in found.looked_for if found.chunks[i] is None)
        if found.prefix is None and found.looked_for and prompt.prefix:
            absent = ((), *absent)
        return Blended(done, make_report(prompt, blend, layout, found, done, why), absent)

    def _choose(self, prompt: Prompt, blend: BlendConfig, found: Found, why: str) -> tuple[Method, str]:
        """The method that this machine is expected to be fastest with, and why if it is not blending."""
        if not found.hits:
            return ("prefix" if found.prefix else "full"), why
        methods: tuple[Method, ...] = ("full", "prefix", "blend")
        exact = self._exact_first(prompt)
        layouts = {method: self._layout(prompt, found.only(method, exact)) for method in methods}
        return choose(self.calibrate(), layouts, blend, self.adapter.n_layers)

    def _free_ratio(self, layout: Layout, blend: BlendConfig) -> float:
        """What can be recomputed while the rest loads, as far as is known yet."""
        rate = self._load_rate.seconds_per_token
        return free_ratio(self.calibrate(), layout, blend, rate)

    def _layout(self, prompt: Prompt, found: Found) -> Layout:
        return lay_out(prompt, found.prefix, found.chunks, behind_prefix=self._exact_first(prompt))

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

    def remember(self, absent: Sequence[TokenIds]) -> int:
        """Compute chunks alone and store them, `()` standing for the prefix, in place of any damaged record.

        At its cap the store may not want a chunk; then it is not computed either. Returns how many were stored;
        raises StoreError.
        """
        stored = self._store_prefix()[0] if () in absent else 0
        per_token = self.adapter.kv_bytes_per_token
        chunks = dict.fromkeys(ids for ids in absent if ids)
        wanted = [ids for ids in chunks if self.store.wants(self.key(ids), len(ids) * per_token)]
        for ids, kv in zip(wanted, self.computer(self._context).stream(wanted), strict=True):
            stored += self.store.put(self.key(ids), kv)
        return stored

    def missing(self, chunks: Sequence[TokenIds]) -> list[TokenIds]:
        """The distinct chunks that the store does not hold, in order."""
        keys = {self.key(ids): ids for ids in chunks if ids}
        return [ids for key, ids in keys.items() if key not in self.store]

    def precompute(
        self, chunks: Sequence[TokenIds], progress: Callable[[int, int], None] | None = None
    ) -> PrecomputeReport:
        """Compute and store the prefix and every chunk that is not there yet; each is safe as soon as it is stored.

        `progress(tokens done, tokens in all)` is called after each. Raises StoreError; what was stored stays.
        """
        start = time.perf_counter()
        todo = self.missing(chunks)
        distinct = len({ids for ids in chunks if ids}) + bool(self._prefix)
        self.store.pin(self.key(ids) for ids in set(chunks) - set(todo))  # some may have come on demand
        total = sum(map(len, todo))
        computed, tokens, size = (
            (0, 0, 0) if self.key(self._prefix, ()) in self.store else self._store_prefix()
        )
        before, computer = tokens, self.computer(self._context)
        fresh = zip(map(self.key, todo), computer.stream(todo), strict=True)
        with closing(write_behind(self.store, fresh, computer.stack_tokens)) as stored:
            for ids, n_bytes in zip(todo, stored, strict=True):
                computed, tokens, size = computed + 1, tokens + len(ids), size + n_bytes
                if progress:
                    progress(tokens - before, total)
        return PrecomputeReport(
            distinct, computed, distinct - computed, tokens, size, time.perf_counter() - start
        )

    def _store_prefix(self) -> tuple[int, int, int]:
        """Chunks, tokens and bytes stored: one prefix, or nothing where there is none."""
        if not self._prefix:
            return 0, 0, 0
        kv = self.computer(()).compute([self._prefix])[0]
        self.store.put(self.key(self._prefix, ()), kv, pin=True)
        return 1, len(self._prefix), kv.n_bytes
