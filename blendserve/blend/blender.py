"""A prompt and a store -> a prefilled cache and a report. What is missing or damaged is computed in the same request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blendserve.answer import TokenLogprob
from blendserve.blend.chunk_kv import ChunkComputer, ChunkKeys, chunk_shape, placed
from blendserve.blend.cost import CostModel
from blendserve.blend.layout import Layout, lay_out, usable_chunks
from blendserve.blend.planner import Planner, plan_full_prefill
from blendserve.blend.policies import Policy, make_policy
from blendserve.blend.precompute import ChunkWriter, MissingChunk
from blendserve.blend.prefill import PassResult, PrefillPlan, blend_prefill
from blendserve.blend.prefix_cache import PrefixCache, PrefixKV
from blendserve.blend.priors import PriorStore
from blendserve.blend.refine import refine, rows_to_refine
from blendserve.blend.report import make_report
from blendserve.blend.runs import (
    MIN_SPAN,
    RunFinder,
    donor_requests,
    reuse_in_chunks,
    reuse_in_prompt,
    usable_cover,
)
from blendserve.config import BlendConfig
from blendserve.core import BlendReport, Prompt, Steps, TokenIds, run
from blendserve.errors import CorruptRecord, StoreError
from blendserve.fetch.fetcher import COMPUTED, Fetch, Hold, KVFetcher
from blendserve.fetch.incoming import ChunkRequest
from blendserve.kv import ChunkKV
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.models.tokenizer import Tokenizer
from blendserve.registry import CORRECTIONS, FULL_REUSE
from blendserve.store import KVStore, TensorView
from blendserve.store.codecs.base import SLOW, UNREACHABLE, Codec
from blendserve.store.codecs.raw import Raw
from blendserve.timing import Clock

NOT_BUILT = (
    "the index of stored chunks is not complete, as it is being built or a store does not answer: "
    "send the prompt again in some seconds"
)
NOT_REPLACED = ("absent", SLOW, UNREACHABLE)  # kinds of a miss whose record, if any, may be good


@dataclass(frozen=True, slots=True)
class Prefilled:
    """One request's prefill."""

    result: PassResult
    report: BlendReport
    n_cached: int = 0  # tokens of the prompt whose KV was not computed for it
    n_blended: int = 0  # those of them whose KV is approximate
    n_known: int = 0  # tokens at its beginning that the prefix cache had
    missing: tuple[MissingChunk, ...] = ()  # for `ChunkWriter.write_back`
    to_refine: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.long))  # positions
    logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens but the first, if they were asked for

    @classmethod
    def of(cls, plan: PrefillPlan, result: PassResult, has_prior: bool = False) -> Prefilled:
        """The result with its report. has_prior: whether the correction had a prior."""
        report = make_report(plan, result, has_prior)
        n_cached = report.tokens_exact + report.tokens_kept + report.tokens_reused
        n_blended = report.tokens_reused + report.tokens_lossy
        done = cls(result, report, n_cached, n_blended)
        return replace(done, to_refine=rows_to_refine(plan, result)) if plan.policy.for_refining else done

    def refine(self, model: DecoderModel, ids: TokenIds) -> Steps[Prefilled]:
        """Recompute `to_refine`, in the cache (blend/refine.py) -> the same, with the report of both passes."""
        rows = self.to_refine
        report = self.report
        yield from refine(model, ids, rows, self.result.cache)
        n_refined = len(rows) - report.tokens_suffix - report.tokens_recomputed
        cost = report.cost + len(rows) / report.tokens_prompt
        report = replace(report, tokens_refined=n_refined, cost=cost)
        return replace(self, report=report, to_refine=rows[:0])


class Blender:
    """Prefills prompts of one model and one prefix over one namespace of a store. Thread-safe.

    key: names chunks. writer: stores chunks. fetcher: reads them. learnt: stores those of its clients' plain prompts, if
    any are learnt. prefixes, priors, near, finder, planner: see their classes.
    """

    def __init__(
        self,
        model: DecoderModel,
        fingerprint: str,
        store: KVStore,
        prefix: TokenIds,
        context: TokenIds,
        namespace: str = "",
        *,
        costs: CostModel | None = None,
        fetcher: KVFetcher | None = None,
        codec: Codec | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """context: what chunks are computed after.

        costs: of this machine and model; measured when they are first needed if None. fetcher: over `store`; one without
        copies if None. codec: of stored chunks; raw if None. tokenizer: for policies that read the prompt's text.
        """
        self.model = model
        self._tokenizer = tokenizer
        after_prefix = ChunkComputer(model, prefix)
        chunks = after_prefix if context == prefix else ChunkComputer(model, context)
        self.prefixes = PrefixCache(after_prefix)
        self.planner = Planner(model, fingerprint, costs)
        self.priors = PriorStore(model, fingerprint, store, prefix, context)
        key = ChunkKeys(fingerprint, str(model.dtype), context, namespace)
        self._bind(fetcher or KVFetcher(store), key, chunks, codec or Raw())

    def _bind(self, fetcher: KVFetcher, key: ChunkKeys, chunks: ChunkComputer, codec: Codec) -> None:
        self.fetcher = fetcher
        self.store = fetcher.store
        self.key = key
        fetcher.shape_of = partial(chunk_shape, self.model)
        self.finder = RunFinder(self.store, key)
        self.writer = ChunkWriter(fetcher, chunks, key, codec, (self.finder,))
        self._learnt_finder: RunFinder | None = None
        self.learnt: ChunkWriter | None = None
        self._owner = key.namespace  # of cached prefixes

    def over(self, store: KVStore, namespace: str) -> Blender:
        """The same model, prefixes, priors and costs over another store or namespace."""
        other = copy(self)
        fetcher = self.fetcher if store is self.store else KVFetcher(store)
        other._bind(fetcher, replace(self.key, namespace=namespace), self.writer.chunks, self.writer.codec)
        return other

    def for_scope(self, scope: str, learns: bool) -> Blender:
        """The same for one client's plain prompts: with its own prefixes, and what was learnt from it, if it `learns`."""
        other = copy(self)
        key = self.key.learnt_by(scope)
        other._owner = f"{self.key.namespace}\0{scope}"
        if learns:
            other._learnt_finder = finder = RunFinder(self.store, key)
            other.learnt = ChunkWriter(self.fetcher, self.writer.chunks, key, self.writer.codec, (finder,))
        return other

    @property
    def _finders(self) -> list[RunFinder]:
        return [self.finder, *([self._learnt_finder] if self._learnt_finder else [])]

    def match(self, prompt: Prompt, blend: BlendConfig) -> Prompt:
        """A plain prompt with the stored text that is found in it, if the method can use them.

        What the prefix cache has is left to it. Other prompts, and matched ones, are returned as they are.
        """
        if not prompt.is_plain or prompt.runs or blend.method in ("full", "prefix"):
            return prompt
        n_cached = self.n_cached(prompt, blend)
        stop = len(prompt.prefix)
        seam = self.model.seam
        runs = [run for finder in self._finders for run in finder.in_prompt(prompt.ids, n_cached, stop, seam)]
        return Prompt.plain(prompt.ids, usable_cover(runs, MIN_SPAN, seam), prompt.texts)

    def n_cached(self, prompt: Prompt, blend: BlendConfig) -> int:
        """How many tokens of the prompt's prefix the prefix cache has, for this method."""
        return self.prefixes.n_cached(self._owner, prompt.prefix, self._is_exact(prompt, blend))

    def keep(self, prompt: Prompt, report: BlendReport, answer: TokenIds, cache: KVCache) -> None:
        """Keep the approximate KV of a plain prompt, and of its answer, for the next turn."""
        if prompt.is_plain and not report.exact:
            self.prefixes.keep(self._owner, (*prompt.ids, *answer), cache)

    def prefetch(self, prompt: Prompt, blend: BlendConfig) -> Callable[[], Hold]:
        """Return what prefetches the chunks of a prompt once it is queued; copies are kept until the hold is closed."""
        is_costed = self.planner.is_calibrated
        requests = [*self._requests(prompt, blend, is_costed).values()]
        if prompt.runs:
            requests = donor_requests(prompt, self._token_saves_s(prompt, blend, [0], is_costed))
        return partial(self.fetcher.prefetch, list(dict.fromkeys(requests)))

    def run(self, *args: Any, **options: Any) -> Prefilled:
        """`prefill` to its end."""
        return run(self.prefill(*args, **options))

    def prefill(
        self,
        prompt: Prompt,
        blend: BlendConfig,
        cache: KVCache | None = None,
        clock: Clock | None = None,
        prefix_kv: ChunkKV | None = None,
    ) -> Steps[Prefilled]:
        """Prefill a prompt by `blend.method`. What the store lacks or cannot give is computed.

        A plain prompt is matched with stored chunks first, unless that is done, or `prefix_kv` is given.

        cache: with room for the prompt; a new one without more if None. prefix_kv: the KV of the prompt's prefix; the
        prefix cache's if None. Raises ConfigError for settings that do not fit the model.
        """
        if blend.method == "reuse":
            blend = blend.with_values(**FULL_REUSE)
        if blend.method == "full":
            return (yield from self._run_plan(plan_full_prefill(prompt, blend), cache, clock))
        prompt = prompt if prefix_kv else self.match(prompt, blend)
        n = len(prompt.prefix)
        exact = self._is_exact(prompt, blend)
        prefix = PrefixKV(placed(self.model, prefix_kv), n, n) if prefix_kv else None
        prefix = prefix or (yield from self.prefixes.get(self._owner, prompt.prefix, exact=exact))
        policy = self._policy(prompt, blend)
        requests = self._requests(prompt, blend)
        ids = {request.key: prompt.chunks[i].ids for i, request in requests.items()}

        def compute(request: ChunkRequest) -> ChunkKV:
            return self.writer.chunks.compute([ids[request.key]])[0]

        with self.fetcher.fetch(list(dict.fromkeys(requests.values())), compute) as fetch:
            while True:
                try:
                    layout = self._look_up(prompt, blend, requests, prefix, fetch)
                    plan = self.planner.plan(layout, blend, policy)
                    if prompt.runs and plan.reason:
                        prefix, plan = yield from self._without_runs(prefix, plan)
                    elif prompt.is_plain and not (exact or all(f.is_built for f in self._finders)):
                        plan = replace(plan, reason=plan.reason or NOT_BUILT)
                    waited_s = fetch.waited_s
                    done = yield from self._run_plan(plan, cache, clock)
                except StoreError as error:
                    fetch.drop(error)  # the next layout does without that chunk, or without the store
                    continue
                if not done.result.is_sound and drop_stored(plan.layout, requests, fetch):
                    continue
                read_s = max(0.0, done.result.read_s - (fetch.waited_s - waited_s))
                self.planner.load_rate.record(read_s, plan.layout.n_loaded)
                fetch.record_reading(read_s, plan.layout.n_loaded)
                n_prefix = len(plan.layout.prompt.prefix)
                n_computed = 0 if plan.blend.method == "full" else n_prefix - prefix.reused
                n_kept = min(done.report.tokens_kept, max(0, prefix.reused - prefix.n_exact))
                return replace(
                    done,
                    n_cached=done.n_cached - n_computed,
                    n_blended=done.n_blended + n_kept,
                    n_known=prefix.reused,
                    missing=tuple(missing_chunks(plan.layout, requests, fetch)),
                )

    def _requests(
        self, prompt: Prompt, blend: BlendConfig, is_costed: bool = True
    ) -> dict[int, ChunkRequest]:
        """The chunks that the method can use, by number; with costs where a link may take longer than it saves."""
        usable = usable_chunks(prompt, blend.method, self._first_is_exact(prompt))
        keys = {i: self.key(prompt.chunks[i].ids) for i in usable}
        if is_costed and self._weighs_costs(blend):
            return self.planner.requests(prompt, blend, keys, self.key.context)
        return {i: ChunkRequest(key, len(prompt.chunks[i])) for i, key in keys.items()}

    def _look_up(
        self,
        prompt: Prompt,
        blend: BlendConfig,
        requests: Mapping[int, ChunkRequest],
        prefix: PrefixKV,
        fetch: Fetch,
    ) -> Layout:
        """The layout by what was fetched, by the chunks of a plain prompt, and by near-duplicates."""
        first_is_exact = self._first_is_exact(prompt)
        keys = {i: request.key for i, request in requests.items()}
        found = {i: fetch.views.get(key) or fetch.misses[key] for i, key in keys.items()}
        sources = {i: fetch.source.get(key, "") for i, key in keys.items()}
        view = TensorView(prefix.kv, is_placed=True)
        n_kept = prefix.n_kept
        layout = lay_out(prompt, view, found, sources, first_is_exact=first_is_exact, n_kept=n_kept)
        if prompt.runs:
            layout = reuse_in_prompt(layout, fetch, self._token_saves_s(prompt, blend, [0]))
        elif blend.near and blend.method != "prefix" and not fetch.trouble:
            saves_s = self._token_saves_s(prompt, blend, requests)
            layout = reuse_in_chunks(layout, fetch, self.finder, saves_s, self.model.seam)
        return layout.with_seams(self.model.seam)

    def _token_saves_s(
        self, prompt: Prompt, blend: BlendConfig, chunks: Collection[int], is_costed: bool = True
    ) -> float | None:
        """Seconds that a token of these chunks saves, where a link may take longer than that; else None."""
        if not is_costed or not self._weighs_costs(blend):
            return None
        return self.planner.token_saves_s(prompt, blend, chunks, self._first_is_exact(prompt))

    def _without_runs(self, prefix: PrefixKV, plan: PrefillPlan) -> Steps[tuple[PrefixKV, PrefillPlan]]:
        """A plain prompt that is not worth blending: computed whole, so that the prefix cache has it for the next turn.

        prefix: of the prompt with runs.
        """
        prompt = Prompt.plain(plan.layout.prompt.ids)
        prefix = yield from self.prefixes.get(self._owner, prompt.prefix, prefix, exact=False)
        layout = lay_out(prompt, TensorView(prefix.kv, is_placed=True), n_kept=prefix.n_kept)
        return prefix, replace(plan, layout=layout, blend=plan.blend.with_values(method="prefix"))

    def _run_plan(self, plan: PrefillPlan, cache: KVCache | None, clock: Clock | None) -> Steps[Prefilled]:
        uses_prior = CORRECTIONS.load(plan.blend.correction).uses_prior
        priors = self.priors.current() if uses_prior else None
        prior = priors.layer if priors else None
        result = yield from blend_prefill(self.model, plan, cache, clock, prior)
        return Prefilled.of(plan, result, prior is not None)

    def _policy(self, prompt: Prompt, blend: BlendConfig) -> Policy:
        """The policy of these settings, prepared for the prompt if there is a tokenizer to read it with."""
        policy = make_policy(blend)
        return policy.prepare(self.model, self._tokenizer, prompt) if self._tokenizer else policy

    def _first_is_exact(self, prompt: Prompt) -> bool:
        """Whether the KV of a chunk right after the prefix is exact."""
        return self.key.context == prompt.prefix

    def _is_exact(self, prompt: Prompt, blend: BlendConfig) -> bool:
        """Whether the prompt's prefix must be exact: not of a plain prompt that may be blended."""
        return not prompt.is_plain or blend.method in ("full", "prefix")

    def _weighs_costs(self, blend: BlendConfig) -> bool:
        return blend.method == "auto" and self.fetcher.remote is not None


def drop_stored(layout: Layout, requests: Mapping[int, ChunkRequest], fetch: Fetch) -> bool:
    """Drop the stored chunks that a prefill has used, as it gave numbers that are not finite -> whether there were any.

    Whoever writes to the store may have stored such KV with a right checksum.
    """
    used = [s for s in layout.loaded if s.chunk is not None and s.source != COMPUTED]
    keys = {s.donor or requests[s.chunk].key for s in used if s.chunk is not None}
    for key in keys:
        fetch.drop(
            CorruptRecord(key, "gives numbers that are not finite, or another chunk of its prompt does")
        )
    return bool(keys)


def missing_chunks(
    layout: Layout, requests: Mapping[int, ChunkRequest], fetch: Fetch
) -> Iterator[MissingChunk]:
    """The chunks that no store had whole."""
    for i, segments in layout.chunks():
        if i in requests and (segments[0].miss or segments[0].source == COMPUTED):
            key = requests[i].key
            miss = fetch.misses.get(key)
            is_damaged = miss is not None and miss.kind not in NOT_REPLACED
            yield MissingChunk(layout.prompt.chunks[i].ids, fetch.computed.get(key), is_damaged)
