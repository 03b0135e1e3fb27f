"""What a prefill did to a prompt: sums that add up, and the same token by token and part by part, with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from blendserve.blend.layout import Layout, Segment, State
from blendserve.blend.planner import PrefillPlan
from blendserve.blend.prefill import PassResult
from blendserve.core import BlendReport, Explanation, NearChunk, Part, Reason, Span, Unusable
from blendserve.fetch.fetcher import COMPUTED

STATE = {name: n for n, name in enumerate(Explanation.STATES)}
NEAR = "near"  # the source of a chunk that is read from near-duplicates


def make_report(plan: PrefillPlan, result: PassResult, has_prior: bool = False) -> BlendReport:
    """has_prior: whether the correction had a prior."""
    layout, blend, near = plan.layout, plan.blend, tuple(_near_chunks(plan.layout))
    hits = [
        next(s for s in segments if s.is_stored) for _, segments in layout.chunks() if segments[0].is_stored
    ]
    misses = [(i, segments[0].miss) for i, segments in layout.chunks() if segments[0].miss]
    corrupt = sum(miss.kind == "corrupt" for _, miss in misses)
    n_recomputed = len(result.recomputed)
    is_blended = layout.n_reusable > n_recomputed
    return BlendReport(
        method=blend.method,
        policy=blend.policy,
        correction=blend.correction,
        ratio=blend.min_ratio,
        reason="" if is_blended else plan.reason or _why_nothing_was_blended(plan),
        chunks=len(layout.prompt.chunks),
        chunks_hit=len(hits),
        chunks_missing=len(misses) - corrupt,
        chunks_corrupt=corrupt,
        tokens_prompt=layout.n_tokens,
        tokens_exact=layout.count(State.EXACT),
        tokens_first=layout.n_found - layout.n_reusable,
        tokens_reused=layout.n_reusable - n_recomputed,
        tokens_recomputed=n_recomputed,
        tokens_computed=layout.count(State.FRESH) - layout.n_suffix,
        tokens_suffix=layout.n_suffix,
        bytes_loaded=result.bytes_loaded,
        cost=result.cost,
        unusable=tuple(Unusable(i, miss.kind, miss.detail) for i, miss in misses if miss.kind != "absent"),
        tiers=dict(Counter(segment.source for segment in hits)),
        near=near,
        prior=has_prior and result.corrected,
    )


def explain(plan: PrefillPlan, result: PassResult) -> Explanation:
    """What each token started from, and why."""
    return Explanation(tuple(_parts(plan)), _states(plan.layout, result), result.scores)


def _states(layout: Layout, result: PassResult) -> Tensor:
    """[T] uint8"""
    reused = "corrected" if result.corrected else "reused"
    names = {State.EXACT: "exact", State.REUSED: reused, State.FRESH: "computed"}
    states = torch.empty(layout.n_tokens, dtype=torch.uint8)
    for s in layout.segments:
        name = "near_duplicate" if s.state is State.REUSED and s.donor else names[s.state]
        states[s.span.start : s.span.stop] = STATE[name]
    states[result.recomputed] = STATE["recomputed"]
    return states


def _parts(plan: PrefillPlan) -> Iterator[Part]:
    """The prefix, the passages and the suffix, those without tokens left out."""
    near = {chunk.chunk: chunk for chunk in _near_chunks(plan.layout)}
    chunks = dict(plan.layout.chunks())
    for s in plan.layout.segments:
        if s.chunk is None:
            is_suffix = s.span.stop == plan.layout.n_tokens and plan.layout.n_suffix > 0
            kind = "suffix" if is_suffix else "prefix"
            source, code, reason = ("", Reason.SUFFIX, ALWAYS) if is_suffix else _stored(plan, s)
            yield Part(kind, None, s.span, source, code, reason)
        elif segments := chunks.pop(s.chunk, None):
            yield _passage(plan, s.chunk, segments, near.get(s.chunk))


def _passage(plan: PrefillPlan, i: int, segments: Sequence[Segment], near: NearChunk | None) -> Part:
    span = Span(segments[0].span.start, segments[-1].span.stop)
    if near and near.donors:
        donors = tuple((s.span, s.donor.hex()) for s in segments if s.donor)
        return Part("passage", i, span, NEAR, Reason.NEAR, _sentence(near.reason), donors)
    miss = segments[0].miss
    if near and miss and miss.kind == "absent":
        code = Reason.DONOR_UNUSABLE if plan.layout.donor_errors[i] else Reason.NO_DONOR
        return Part("passage", i, span, "", code, _sentence(near.reason))
    return Part("passage", i, span, *_stored(plan, segments[0]))


def _stored(plan: PrefillPlan, segment: Segment) -> tuple[str, Reason, str]:
    """Source, code and reason of the prefix, or of a passage without near-duplicates."""
    if segment.state is not State.FRESH:
        return segment.source, *_used(segment)
    miss, method = segment.miss, plan.blend.method
    if segment.is_stored:
        because = plan.reason or f"method {method!r} does not use it in this place"
        return "", Reason.UNUSED, _sentence(f"It was stored, and left alone: {because}")
    if miss and miss.kind != "absent" and segment.chunk is not None:
        return "", Reason.UNUSABLE, _sentence(f"Its stored KV was of no use: {miss.detail}")
    if miss:
        return "", Reason.NOT_STORED, "It was not in the store."
    because = plan.reason or f"method {method!r} reuses nothing of it"
    return "", Reason.NOT_LOOKED_UP, _sentence(f"Nothing was looked for: {because}")


def _used(segment: Segment) -> tuple[Reason, str]:
    if segment.chunk is None:
        return Reason.STORED, "It was stored, computed as it stands here."
    if segment.source == COMPUTED:
        said = "It was computed here, without the passages before it, while others were transferred."
        return Reason.COMPUTED, said
    if segment.state is State.EXACT:
        said = "It was stored, and stands right behind the prefix, as it did when its KV was computed."
        return Reason.STORED, said
    return Reason.MOVED, "It was stored, computed without the passages before it, and moved to its place."


def _near_chunks(layout: Layout) -> Iterator[NearChunk]:
    """The chunks that donors were looked for, by what is used of those."""
    chunks = dict(layout.chunks())
    for i, error in layout.donor_errors.items():
        used = [s for s in chunks[i] if s.donor and s.state is not State.FRESH]
        donors = tuple(dict.fromkeys(s.donor.hex() for s in used if s.donor))
        n, n_tokens = sum(len(s.span) for s in used), sum(len(s.span) for s in chunks[i])
        yield NearChunk(i, donors, n, n_tokens - n, _why_near(len(donors), n, n_tokens, error))


def _why_near(donors: int, stored: int, tokens: int, error: str) -> str:
    others = ("no stored chunk has", "a stored chunk has", f"{donors} stored chunks have")[min(donors, 2)]
    what = f"{stored} of its {tokens} tokens in the same order" if donors else "text of it that is of use"
    but = f"; of one that has, nothing could be used: {error}" if error else ""
    return f"it was not in the store, {'but' if donors else 'and'} {others} {what}{but}"


def _why_nothing_was_blended(plan: PrefillPlan) -> str:
    layout = plan.layout
    if plan.blend.method in {"full", "prefix"}:
        return f"method {plan.blend.method!r} does not blend"
    if layout.n_reusable:
        return "every token was chosen for recomputation"
    if layout.n_found:
        return "the only chunk found stands first, where its KV is exact"
    misses = (s.miss for s in layout.segments if s.chunk is not None and s.miss and s.miss.kind != "absent")
    if unusable := next(misses, None):
        return f"no stored chunk could be used: {unusable.detail}"
    return "no chunk was found in the store: precompute the corpus, or let write-back fill it"


ALWAYS = "It is the question and the end of the prompt, which are computed for every request."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
