"""Prints the layout of a prefill as its report: the spans of the prompt, where the KV of each came from, and why."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import groupby

from blendserve.blend.layout import Layout, Segment, State
from blendserve.blend.prefill import PassResult, PrefillPlan
from blendserve.core import BlendReport, PromptSpan
from blendserve.fetch.fetcher import COMPUTED


def make_report(plan: PrefillPlan, result: PassResult, has_prior: bool = False) -> BlendReport:
    """has_prior: whether the correction had a prior."""
    layout = plan.layout
    blend = plan.blend
    is_blended = layout.n_reusable > len(result.recomputed)
    return BlendReport(
        method=blend.method,
        policy=blend.policy,
        correction=blend.correction,
        ratio=plan.policy.ratio,
        reason="" if is_blended else plan.reason or _why_nothing_was_blended(plan),
        layout=tuple(_spans(plan, result)),
        bytes_loaded=result.bytes_loaded,
        cost=result.cost,
        prior=has_prior and result.corrected,
        full_prefill_s=plan.full_prefill_s,
        scores=result.scores,
    )


def _spans(plan: PrefillPlan, result: PassResult) -> Iterator[PromptSpan]:
    """The segments of the layout. All spans of a passage have the same reason."""
    layout = plan.layout
    recomputed = result.recomputed.tolist()
    learnt = {run.donor for run in layout.prompt.runs if run.is_learnt}
    reused = "corrected" if result.corrected else "reused"
    pairs = zip(_parts(layout), layout.segments, strict=True)
    for (kind, chunk), group in groupby(pairs, key=lambda pair: pair[0]):
        segments = [segment for _, segment in group]
        reason = _why(plan, kind, segments)
        reason += "" if reason.endswith(".") else "."
        for s in segments:
            is_near = s.miss is not None and s.state is not State.FRESH
            moved = "near_duplicate" if is_near else reused
            first, last = (bisect_left(recomputed, end) for end in (s.span.start, s.span.stop))
            yield PromptSpan(
                s.span.start,
                s.span.stop,
                kind=kind,
                state=moved if s.state is State.REUSED else s.state.value,
                reason=reason,
                chunk=chunk,
                begins_chunk=kind == "passage" and s is segments[0],
                lookup=_lookup(s),
                source="near" if is_near else s.source,
                recomputed=tuple(recomputed[first:last]),
                is_lossy=s.state is State.EXACT and not s.is_exact,
                seeks_donors=s.chunk in layout.donor_errors,
                donor=s.donor.hex() if s.donor else "",
                missing_head=s.offset,
                missing_tail=s.view.n_tokens - s.offset - len(s.span) if s.view else 0,
                learnt=s.donor in learnt,
            )


def _parts(layout: Layout) -> Iterator[tuple[str, int | None]]:
    """Kind of the part of the prompt that each segment belongs to, and number of a passage.

    Chunks that were found in a plain prompt are numbered in its order.
    """
    n_found = 0
    for s in layout.segments:
        if s.chunk is None:
            is_suffix = layout.n_suffix > 0 and s.span.stop == layout.n_tokens
            yield "suffix" if is_suffix else "kept" if s.state is State.KEPT else "prefix", None
        elif not layout.prompt.is_plain:
            yield "passage", s.chunk
        elif s.donor:
            yield "passage", n_found
            n_found += not s.is_seam  # the rest of the same chunk follows a seam
        else:
            yield "text", None


def _lookup(s: Segment) -> str:
    """What was found of a segment's chunk; "" if nothing was looked for."""
    if s.miss:
        return s.miss.kind
    return "hit" if s.chunk is not None and s.is_stored else ""


def _why(plan: PrefillPlan, kind: str, segments: Sequence[Segment]) -> str:
    """Why a part of the prompt starts from what it does, as a sentence."""
    s = next((segment for segment in segments if not segment.is_seam), segments[0])
    if kind == "suffix":
        return "Computed: every request computes the question and the end of the prompt"
    if kind == "text":
        return "Computed: no stored chunk was found in this text"
    if s.chunk is not None and s.chunk in plan.layout.donor_errors:
        return _why_near(segments, plan.layout.donor_errors[s.chunk])
    if s.state is not State.FRESH:
        return _why_used(s)
    if s.unused:
        return f"Stored, but computed: {s.unused}"
    if s.is_stored:
        because = plan.reason or f"method {plan.blend.method!r} uses only exact KV"
        return f"Stored, but not used: {because}"
    if s.miss and s.miss.kind != "absent":
        return f"Stored, but could not be used: {s.miss.detail}"
    if s.miss:
        return "Computed: it was not in the store"
    because = plan.reason or f"method {plan.blend.method!r} reuses no KV here"
    return f"Computed without a lookup: {because}"


def _why_used(s: Segment) -> str:
    if s.state is State.KEPT:
        return "Kept from the last turn, and approximate: chunks in it were reused at other positions"
    if s.chunk is None:
        return "Exact: computed at this position, for this prompt or an earlier one"
    if s.source == COMPUTED:
        return "Computed here, without seeing the passages before it, while other chunks were transferred"
    if s.is_exact:
        return "Exact: same position as when it was computed"
    if s.state is State.EXACT:
        return "Same position as when it was computed, but its codec is lossy"
    return "Reused: moved here without seeing the passages before it"


def _why_near(segments: Sequence[Segment], error: str) -> str:
    """Why a passage starts from text of other chunks, or why not. error: why a similar chunk could not be used."""
    used = [s for s in segments if s.state is not State.FRESH]
    unused = next((s.unused for s in segments if s.unused), "")
    miss = segments[0].miss
    n_donors = len({s.donor for s in used})
    reason = "It was not in the store"
    if miss and miss.kind != "absent":
        reason = f"It could not be used ({miss.detail})"
    if n_donors:
        donors = "a stored chunk has" if n_donors == 1 else f"{n_donors} stored chunks have"
        n, n_tokens = (sum(len(s.span) for s in some) for some in (used, segments))
        reason += f", but {donors} {n} of its {n_tokens} tokens in the same order"
    elif unused:
        reason += f", and text of other chunks is computed: {unused}"
    else:
        reason += ", and no stored chunk has enough of its text"
    return f"{reason}; a similar chunk could not be used: {error}" if error else reason


def _why_nothing_was_blended(plan: PrefillPlan) -> str:
    layout = plan.layout
    if plan.blend.method in {"full", "prefix"}:
        return f"method {plan.blend.method!r} does not blend"
    if not layout.n_reusable and layout.unused:
        return layout.unused
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
