"""A job: the stored KV of a prompt placed, scored, corrected and partly recomputed in vLLM's paged cache.

    layout -> [score: the suffix alone over the stored KV] -> [check passes of the policy] -> recompute

Policies, corrections, loader and scoring are blendserve's own (blend/); vLLM's model runs the rows. Differences:

- At a check layer rows cannot leave vLLM's forward. The pass ends there, and the rows that are left start again at layer
  0. KV below stays fresh at all rows, as in blend/prefill.py.
- The last token is left to vLLM, whose next step computes it as a decode step.
- What vLLM has cached of the prompt (positions before `job.start`) is neither chosen nor written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from blendserve.blend.chunk_kv import ChunkKeys
from blendserve.blend.corrections import Correction
from blendserve.blend.layout import LayerKV, Layout, Segment, State, lay_out
from blendserve.blend.loader import KVLoader
from blendserve.blend.policies import make_policy, n_scoring_rows, validate_blend
from blendserve.blend.prefill import SuffixPass
from blendserve.blend.priors import FIT_TOKENS, MIN_TOKENS, LeastSquares, Priors, StoredPriors
from blendserve.blend.runs import reuse_in_prompt
from blendserve.core import Prompt, Span, TokenIds
from blendserve.errors import StoreError
from blendserve.fetch.fetcher import Fetch
from blendserve.kernels.rows import Rows
from blendserve.kernels.types import Prior
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import Projected
from blendserve.models.tokenizer import Tokenizer
from blendserve.registry import CORRECTIONS
from blendserve.store import ChunkView
from blendserve.store.codecs.base import ChunkShape, Pair
from blendserve_vllm.passes import Hook, PagedModel, Pages, PassDone, Passes, fill_gaps
from blendserve_vllm.plan import FIT, STORE, PrefillJob, Report
from blendserve_vllm.records import Capture, Prefixes, Ranks, Records

See = Callable[[int, Tensor, Tensor, Tensor, LayerKV], None]
"""At layer l, after stored KV was placed: l, rows [S], their k and v [K, S, D], stored KV [K, T, D]."""


class JobRunner:
    """Runs the jobs of one worker."""

    def __init__(self, passes: Passes, records: Records, ranks: Ranks, tokenizer: Tokenizer) -> None:
        self.passes, self.records, self.ranks, self.prefixes = passes, records, ranks, Prefixes()
        self.tokenizer = tokenizer
        dtype, shapes = passes.whole.dtype, tuple(passes.whole.kv_shapes)
        records.fetcher.shape_of = lambda n_tokens: ChunkShape(dtype, n_tokens, shapes)
        self.rows = torch.empty(0, dtype=torch.long)  # of the last job, ascending
        self._priors: dict[tuple[ChunkKeys, TokenIds], StoredPriors] = {}
        self._fits: dict[tuple[ChunkKeys, TokenIds], LeastSquares] = {}

    def run(self, job: PrefillJob) -> Report:
        """Run a job to its end. Raises StoreError for a chunk that cannot be stored, and what the model raises."""
        layers, size = self.passes.layers, self.passes.block_size
        pages = Pages(layers, job.blocks, size, job.start, len(job.ids))
        if job.task == STORE:
            report = self._store(job, pages)
        elif job.task == FIT:
            report = self._fit(job, pages)
        else:
            prompt = Prompt.plain(job.ids, job.runs)
            with self.records.fetch(prompt) as fetch:
                while True:
                    try:
                        report = _Blend(job, prompt, fetch, pages, self).run()
                        break
                    except StoreError as error:
                        fetch.drop(error)  # the next layout does without that chunk, or without the store
        return report

    def _store(self, job: PrefillJob, pages: Pages) -> Report:
        """Compute the chunk at the end of the prompt, behind its context, and store it."""
        n, start = len(job.ids), job.context_tokens
        pages.clear(torch.arange(n))
        capture = self.capture(job.ids, min(job.start, start), start, pages)
        self.records.put(job.keys(job.ids[start:]), capture.chunk(job.ids[start:]))
        return Report(tokens_stored=n - start)

    def _fit(self, job: PrefillJob, pages: Pages) -> Report:
        """Compute the prompt in full, and fit a prior on its chunks and those of the prompts before it.

        A prior that the store had before stays, as in `PriorStore.learn`, and one of FIT_TOKENS is complete.
        """
        runs, owner = job.runs[job.first_is_exact :], (job.keys, job.prefix)
        first = runs[0].span.start
        pages.clear(torch.arange(len(job.ids)))
        capture = self.capture(job.ids, min(job.start, first), first, pages)
        if owner not in self._fits and self.priors(job) is not None:
            return Report(correction="prior")
        found = self._fits.setdefault(owner, LeastSquares(self.passes.whole))
        with self.records.fetch(Prompt.plain(job.ids, runs)) as fetch:
            views = [self.records.copy(fetch, run.donor) for run in runs]
        read = [(run, view) for run, view in zip(runs, views, strict=True) if view is not None]
        if read:
            alone = [partial(_part, view, run.offset, len(run.span)) for run, view in read]
            within = [partial(capture.layer, run.span) for run, _ in read]
            found.add([run.span for run, _ in read], alone, within)
        if found.n_tokens < MIN_TOKENS:
            return Report()
        self._use(job, found.solve())
        if found.n_tokens >= FIT_TOKENS:
            del self._fits[owner]
        return Report(tokens_fitted=found.n_tokens)

    def _use(self, job: PrefillJob, priors: Priors) -> None:
        """Store these, and correct by them from now on."""
        stored = self._stored_priors(job)
        if self.ranks.rank == 0:
            stored.put(priors)
        stored.use(priors)

    def capture(
        self, ids: TokenIds, first: int, start: int, pages: Pages, stop: int | None = None
    ) -> Capture:
        """Run tokens [first, stop) over what is cached before them -> the KV of those from `start` on.

        As many rows in a pass as vLLM's own steps have.
        """
        rows = torch.arange(first, len(ids) if stop is None else stop)
        capture = Capture(self.passes.whole, self.ranks, start, int(rows[-1]) + 1)
        for part in torch.split(rows, self.passes.max_rows):

            def keep(l: int, q: Tensor, k: Tensor, v: Tensor) -> None:
                capture.add(l, part, k, v)  # noqa: B023  used in this round alone

            self.passes.run(ids, part, keep, pages)
        return capture

    def priors(self, job: PrefillJob) -> Priors | None:
        """The priors that the store has for the job's chunks, all heads."""
        return self._stored_priors(job).current()

    def _stored_priors(self, job: PrefillJob) -> StoredPriors:
        owner = job.keys, job.prefix
        if owner not in self._priors:
            about = job.keys.fingerprint, self.records.store, job.prefix, job.keys.context
            self._priors[owner] = StoredPriors(self.passes.whole, *about)
        return self._priors[owner]


class _Blend:
    """One request."""

    def __init__(
        self, job: PrefillJob, prompt: Prompt, fetch: Fetch, pages: Pages, runner: JobRunner
    ) -> None:
        self._job, self._prompt, self._pages, self._runner = job, prompt, pages, runner
        self._passes, self._ranks = runner.passes, runner.ranks
        validate_blend(job.blend, self._passes.model)
        policy = make_policy(job.blend)
        self._policy = policy.prepare(self._passes.model, runner.tokenizer, prompt)
        self._fetch = fetch
        self._lay_out(runner.prefixes.get(prompt.prefix))

    def _lay_out(self, prefix: ChunkView | None) -> None:
        layout = lay_out(self._prompt, prefix, first_is_exact=self._job.first_is_exact)
        found = reuse_in_prompt(layout, self._fetch, None)
        # for scores, as if vLLM had cached nothing
        self._whole = found.for_method("blend", self._policy.recomputes)
        self._rest = without_start(self._whole, self._job.start)

    def run(self) -> Report:
        self._clear()
        scores = self._score() if self._policy.is_scored(self._rest) else None
        rest, kept, first = self._rest, self._policy.select(self._rest, scores), 0
        for l in self._policy.check_layers:
            if len(kept) > self._policy.kept(l, rest).n:
                kept, first = self._check(l, kept, first), l + 1
        self._runner.rows = rows = self._rows(kept)
        correction = self._placing_pass(rows, first, lambda *_: None)
        n_recomputed = int(rest.reusable[rows].sum())
        return Report(
            tokens_matched=rest.n_found,
            tokens_recomputed=n_recomputed,
            tokens_approximate=rest.n_reusable - n_recomputed,
            rows=len(rows),
            correction=correction,
        )

    def _clear(self) -> None:
        """Clear positions that a pass may read before they are written: those without KV, and what shares their block."""
        absent, n, size = self._rest.fresh.clone(), len(self._prompt.prefix), self._passes.block_size
        absent[n : n + -n % size] = True  # a pass over the prefix alone reads its last block to the end
        self._pages.clear(absent.nonzero()[:, 0])

    def _rows(self, selected: Tensor) -> Tensor:
        """Positions to run: selected ones and those without KV, but for the last token."""
        active = self._rest.fresh.clone()
        active[selected] = True
        may_run = torch.arange(len(active)) >= self._job.start
        active[-1] = may_run[-1] = False
        return fill_gaps(active, may_run).nonzero()[:, 0]

    def _score(self) -> Tensor:
        """A score for each reusable position [T]: the suffix over prefix and stored KV, all heads on every rank."""
        prompt, n = self._prompt, len(self._prompt)
        if prompt.prefix and self._whole.segments[0].view is None:
            self._lay_out(self._compute_prefix())
        with closing(self._loader(self._whole, self._passes.whole, lambda view: view)) as loader:
            suffix = SuffixPass(self._whole, loader)

            def attend(l: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                q, k, v = self._ranks.gather(q), self._ranks.gather_kv(k), self._ranks.gather_kv(v)
                suffix.write(l, Projected(q, k, v), k)
                attended = suffix.attend(l, q)
                if attended is None:
                    raise PassDone
                return self._ranks.part(attended)

            rows = torch.arange(n - n_scoring_rows(self._whole), n)
            self._passes.run(self._job.ids, rows, attend, None, n_placed(self._whole))
        return suffix.reusable_scores

    def _compute_prefix(self) -> ChunkView:
        """The KV of what stands before the first chunk, kept for later prompts."""
        prefix = self._prompt.prefix
        capture = self._runner.capture(self._job.ids, 0, 0, self._pages, len(prefix))
        return self._runner.prefixes.add(prefix, capture.placed())

    def _check(self, l: int, selected: Tensor, first: int) -> Tensor:
        """Run selected and fresh rows up to check layer l -> the selected ones [S] that go on.

        first: the first layer that still has stored KV. From here on layer l and those below have fresh KV at these rows.
        """
        rest, policy = self._rest, self._policy
        scores = torch.full((rest.n_tokens,), -torch.inf)

        def score(m: int, rows: Tensor, k: Tensor, v: Tensor, stored: LayerKV) -> None:
            if m < l:
                return
            index = rest.reusable[rows].nonzero()[:, 0]
            which, at = index.to(k.device), rows[index].to(k.device)
            mine = policy.score((k[:, which], v[:, which]), (stored[0][:, at], stored[1][:, at]))
            scores[rows[index]] = self._ranks.sum(mine.float()).cpu()
            self._pages.write(m, rows.to(k.device), k, v)
            raise PassDone

        self._placing_pass(self._rows(selected), first, score, l)
        return selected[policy.kept(l, rest).best(selected, scores[selected])]

    def _placing_pass(self, rows: Tensor, first: int, see: See, check_layer: int | None = None) -> str:
        """Run rows; before each layer from `first` on attends, place what is stored, correct it, write it.

        A correction is fitted to all rows at once: more rows than a step of vLLM has go without. At a check layer stored
        KV is not corrected. -> the correction that was used.
        """
        model, rest, name = self._passes.model, self._rest, self._job.blend.correction
        if len(rows) > self._passes.max_rows:
            name = "none"
        spans = rest.spans(State.REUSED)
        prior = self._prior() if CORRECTIONS.load(name).uses_prior else None
        for part in torch.split(rows, self._passes.max_rows):
            with closing(self._loader(rest, model, self._ranks.own)) as loader:
                about = {"rotary": model.rotary, "ropes": loader.ropes, "spans": spans, "prior": prior}
                fix = CORRECTIONS.make(name, **about) if spans else None
                hook = self._place(Rows.on(model.device, part), first, loader, fix, see, check_layer)
                self._passes.run(self._job.ids, part, hook, self._pages, n_placed(rest))
        return name

    def _place(
        self,
        rows: Rows,
        first: int,
        loader: KVLoader,
        fix: Correction | None,
        see: See,
        check_layer: int | None,
    ) -> Hook:
        """The hook of one pass; see `_placing_pass`."""
        at, cache = _positions(s.span for s in loaded(self._rest)).to(self._passes.model.device), loader.cache

        def hook(l: int, q: Tensor, k: Tensor, v: Tensor) -> None:
            stored = cache.keys[l], cache.values[l]
            if l >= first and len(at):
                loader.place(l)
                if fix and l != check_layer:
                    fix.apply(l, stored, rows, (k, v))
                self._pages.write(l, at, *(x[:, at] for x in stored))
            see(l, rows.host, k, v, stored)

        return hook

    def _prior(self) -> Callable[[int], Prior] | None:
        """The prior of a layer, for this rank's heads; None if the store has none."""
        priors, heads = self._runner.priors(self._job), self._ranks.kv_heads
        return None if priors is None else lambda l: Prior(*(x[heads] for x in priors.layer(l)))

    def _loader(self, layout: Layout, model: PagedModel, view: Callable[[ChunkView], ChunkView]) -> KVLoader:
        """Make a loader over memory for one layer at a time. view: the heads of a chunk that are read."""
        views = {id(s.view): view(s.view) for s in loaded(layout) if s.view}
        segments = [replace(s, view=views[id(s.view)]) for s in loaded(layout)]
        ropes = model.rope(torch.arange(layout.n_tokens, device=model.device))
        return KVLoader(model, _one_layer(model, layout.n_tokens), segments, ropes)


def _part(view: ChunkView, head: int, n: int, l: int) -> Pair:
    """Keys before RoPE and values of n tokens of a chunk behind its first ones."""
    keys, values = (x[:, head : head + n] for x in view.layer(l))
    return keys, values


def loaded(layout: Layout) -> list[Segment]:
    """Segments that are read from views."""
    return [s for s in layout.loaded if s.view is not None]


def n_placed(layout: Layout) -> int:
    """Tokens whose stored KV each pass places."""
    return sum(len(s.span) for s in loaded(layout))


def without_start(layout: Layout, start: int) -> Layout:
    """The same where vLLM has cached the first `start` tokens: nothing is read or chosen there."""

    def split(s: Segment) -> Iterable[Segment]:
        if s.span.start < start:
            kept = Span(s.span.start, min(start, s.span.stop))
            yield Segment(kept, State.KEPT)
        if s.span.stop > start:
            n_cut = max(0, start - s.span.start)
            yield replace(s, span=Span(s.span.start + n_cut, s.span.stop), offset=s.offset + n_cut)

    return replace(layout, segments=tuple(part for s in layout.segments for part in split(s)))


def _positions(spans: Iterable[Span]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(s.start, s.stop) for s in spans)])


def _one_layer(model: PagedModel, n: int) -> KVCache:
    """A cache of n tokens in which all layers of one shape share memory."""
    empty = partial(torch.empty, dtype=model.dtype, device=model.device)
    made = {s: (empty(s.heads, n, s.dim), empty(s.heads, n, s.value_dim)) for s in set(model.kv_shapes)}
    keys, values = zip(*(made[shape] for shape in model.kv_shapes), strict=True)
    return KVCache.over(keys, values)
