"""What a prefill did to a prompt: sums that add up, and the same token by token and part by part, with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from blendserve.blend.layout import LEAST_REUSED, Layout, Segment, State
from blendserve.blend.prefill import PassResult, PrefillPlan
from blendserve.core import BlendReport, Explanation, NearChunk, Part, Reason, ReusedSpan, Span, Unusable
from blendserve.fetch.fetcher import COMPUTED

STATE = {name: n for n, name in enumerate(Explanation.STATES)}
KEPT = "kept from the last turn, and approximate: chunks in it were reused at other positions"
SHORT = f"a chunk of fewer than {LEAST_REUSED} tokens is too short to be blended"
NEAR = "near"  # the source of a chunk that is read from near-duplicates


def make_report(plan: PrefillPlan, result: PassResult, has_prior: bool = False) -> BlendReport:
    """has_prior: whether the correction had a prior."""
    layout, blend = plan.layout, plan.blend
    look_ups = _look_ups(layout)
    hits = [segment for _, segment in look_ups if segment.is_stored]
    misses = [(i, segment.miss) for i, segment in look_ups if segment.miss]
    corrupt = sum(miss.kind == "corrupt" for _, miss in misses)
    n_recomputed = len(result.recomputed)
    is_blended = layout.n_reusable > n_recomputed
    return BlendReport(
        method=blend.method,
        policy=blend.policy,
        correction=blend.correction,
        ratio=plan.policy.ratio,
        reason="" if is_blended else plan.reason or _why_nothing_was_blended(plan),
        chunks=len(look_ups if layout.prompt.is_plain else layout.prompt.chunks),
        chunks_hit=len(hits),
        chunks_missing=len(misses) - corrupt,
        chunks_corrupt=corrupt,
        tokens_prompt=layout.n_tokens,
        tokens_exact=layout.count(State.EXACT),
        tokens_kept=layout.count(State.KEPT),
        tokens_first=layout.n_found - layout.n_reusable,
        tokens_reused=layout.n_reusable - n_recomputed,
        tokens_recomputed=n_recomputed,
        tokens_computed=layout.count(State.FRESH) - layout.n_suffix,
        tokens_suffix=layout.n_suffix,
        bytes_loaded=result.bytes_loaded,
        cost=result.cost,
        exact=layout.is_exact(n_recomputed),
        unusable=tuple(Unusable(i, miss.kind, miss.detail) for i, miss in misses if miss.kind != "absent"),
        tiers=dict(Counter(segment.source for segment in hits)),
        near=tuple(_near_chunks(layout)),
        prior=has_prior and result.corrected,
        spans=tuple(_reused_spans(layout)),
        full_prefill_s=plan.full_prefill_s,
    )


def _look_ups(layout: Layout) -> list[tuple[int, Segment]]:
    """The number of each chunk that has tokens, and the segment that says what was found of it.

    Of a plain prompt: of each chunk that was found in its text.
    """
    if layout.prompt.is_plain:
        return list(enumerate(s for s in layout.segments if s.donor and not s.is_seam))
    return [(i, _telling(segments)) for i, segments in layout.chunks()]


def _telling(segments: Sequence[Segment]) -> Segment:
    """The segment of a chunk that says what was found of it."""
    return next((segment for segment in segments if not segment.is_seam), segments[0])


def _reused_spans(layout: Layout) -> Iterator[ReusedSpan]:
    """Of a plain prompt."""
    learnt = {run.donor for run in layout.prompt.runs if run.is_learnt}
    for _, s in _look_ups(layout) if layout.prompt.is_plain else ():
        if s.donor and s.view and s.state is not State.FRESH:
            n_after = s.view.n_tokens - s.offset - len(s.span)
            yield ReusedSpan(s.span.start, s.span.stop, s.donor.hex(), s.offset, n_after, s.donor in learnt)


def explain(plan: PrefillPlan, result: PassResult, report: BlendReport) -> Explanation:
    """What each token started from, and why."""
    near: dict[int | None, NearChunk] = {chunk.chunk: chunk for chunk in report.near}
    return Explanation(tuple(_parts(plan, near)), _states(plan.layout, result), result.scores)


def _states(layout: Layout, result: PassResult) -> Tensor:
    """[T] uint8"""
    reused = "corrected" if result.corrected else "reused"
    names = {
        State.EXACT: "exact",
        State.KEPT: "kept",
        State.REUSED: reused,
        State.FRESH: "computed",
    }
    states = torch.empty(layout.n_tokens, dtype=torch.uint8)
    for s in layout.segments:
        is_near = s.state is State.REUSED and s.donor and s.miss
        name = "near_duplicate" if is_near else names[s.state]
        states[s.span.start : s.span.stop] = STATE[name]
    states[result.recomputed] = STATE["recomputed"]
    return states


def _parts(plan: PrefillPlan, near: Mapping[int | None, NearChunk]) -> Iterator[Part]:
    """The prefix, the passages and the suffix, those without tokens left out; in a plain prompt also the text between."""
    layout = plan.layout
    runs = {s.span.start: i for i, s in _look_ups(layout)} if layout.prompt.is_plain else None
    for kind, group in groupby(layout.segments, key=lambda s: _kind(layout, s, runs)):
        segments = list(group)
        i, span = kind[1], Span(segments[0].span.start, segments[-1].span.stop)
        telling = _telling(segments)
        source, code, reason = _why(plan, kind[0], telling, near.get(i))
        is_used = code is Reason.NEAR or telling.is_stored
        donors = tuple((s.span, s.donor.hex()) for s in segments if s.donor) if is_used else ()
        reason = reason[:1].upper() + reason[1:] + ("" if reason.endswith(".") else ".")
        yield Part(kind[0], i, span, source, code, reason, donors)


def _kind(layout: Layout, segment: Segment, runs: Mapping[int, int] | None) -> tuple[str, int | None]:
    """Of the part that a segment belongs to, with its number. runs: numbers of a plain prompt's chunks by position."""
    if segment.chunk is not None:
        at = segment.span.stop if segment.is_seam else segment.span.start
        i = segment.chunk if runs is None else runs.get(at)
        return "text" if i is None else "passage", i
    is_suffix = layout.n_suffix > 0 and segment.span.stop == layout.n_tokens
    return "suffix" if is_suffix else "kept" if segment.state is State.KEPT else "prefix", None


def _why(plan: PrefillPlan, kind: str, s: Segment, near: NearChunk | None) -> tuple[str, Reason, str]:
    """Where the KV of a part with this first segment was read from, why or why not, and the same as a sentence."""
    if kind == "suffix":
        said = "computed: every request computes the question and the end of the prompt"
        return "", Reason.SUFFIX, said
    if kind == "text":
        return "", Reason.NOT_STORED, "computed: no stored chunk was found in this text"
    if near and near.donors:
        return NEAR, Reason.NEAR, near.reason
    if s.state is not State.FRESH:
        return s.source, *_used(s)
    if s.is_short:
        return "", Reason.SHORT, f"stored, but computed: {SHORT}"
    if s.is_stored:
        because = plan.reason or f"method {plan.blend.method!r} uses only exact KV"
        return "", Reason.UNUSED, f"stored, but not used: {because}"
    if s.miss and s.miss.kind != "absent":
        return "", Reason.UNUSABLE, f"stored, but could not be used: {s.miss.detail}"
    if near:
        has_errors = plan.layout.donor_errors[near.chunk]
        return "", Reason.DONOR_UNUSABLE if has_errors else Reason.NO_DONOR, near.reason
    if s.miss:
        return "", Reason.NOT_STORED, "computed: it was not in the store"
    because = plan.reason or f"method {plan.blend.method!r} reuses no KV here"
    return "", Reason.NOT_LOOKED_UP, f"computed without a lookup: {because}"


def _used(s: Segment) -> tuple[Reason, str]:
    if s.state is State.KEPT:
        return Reason.KEPT, KEPT
    if s.chunk is None:
        return Reason.STORED, "exact: computed at this position, for this prompt or an earlier one"
    if s.source == COMPUTED:
        said = "computed here, without seeing the passages before it, while other chunks were transferred"
        return Reason.COMPUTED, said
    if s.state is State.EXACT:
        said = "same position as when it was computed"
        return Reason.STORED, f"exact: {said}" if s.is_exact else f"{said}, but its codec is lossy"
    return Reason.MOVED, "reused: moved here without seeing the passages before it"


def _near_chunks(layout: Layout) -> Iterator[NearChunk]:
    """The chunks that donors were looked for, by what is used of those."""
    chunks = dict(layout.chunks())
    for i, error in layout.donor_errors.items():
        used = [s for s in chunks[i] if s.donor and s.state is not State.FRESH]
        donors = tuple(dict.fromkeys(s.donor.hex() for s in used if s.donor))
        n, n_tokens = sum(len(s.span) for s in used), sum(len(s.span) for s in chunks[i])
        others = ("no stored chunk has", "a stored chunk has", f"{len(donors)} stored chunks have")
        what = f"{n} of its {n_tokens} tokens in the same order" if donors else "enough of its text"
        why = f"it was not in the store, {'but' if donors else 'and'} {others[min(len(donors), 2)]} {what}"
        why += f"; a similar chunk could not be used: {error}" if error else ""
        yield NearChunk(i, donors, n, n_tokens - n, why)


def _why_nothing_was_blended(plan: PrefillPlan) -> str:
    layout = plan.layout
    if plan.blend.method in {"full", "prefix"}:
        return f"method {plan.blend.method!r} does not blend"
    if not layout.n_reusable and any(s.is_short for s in layout.segments):
        return SHORT
    if layout.n_reusable:
        return "every token was chosen for recomputation"
    if layout.n_found:
        return "only the first chunk was found, and its KV is exact there"
    misses = (s.miss for s in layout.segments if s.chunk is not None and s.miss and s.miss.kind != "absent")
    if unusable := next(misses, None):
        return f"no stored chunk could be used: {unusable.detail}"
    if plan.layout.prompt.is_plain:
        return "no stored chunk was found in the prompt: precompute the passages that it is made of"
    return "no chunk was found in the store: precompute the corpus, or let write-back fill it"
