"""What was done to a prompt, in numbers that add up, and why nothing was blended when nothing was."""

from __future__ import annotations

from collections.abc import Iterator

from blendserve.blend.layout import Layout
from blendserve.blend.lookup import Found
from blendserve.blend.prefill import PassResult
from blendserve.config import BlendConfig
from blendserve.core import BlendReport, NearChunk, Prompt


def make_report(
    prompt: Prompt, blend: BlendConfig, layout: Layout, found: Found, done: PassResult, why: str, prior: bool
) -> BlendReport:
    """`blend` as it was run; `found` as it was looked up, whether used or not.

    why: a reason that is known already: the store's trouble, or the profit gate's choice. prior: whether the correction
    knew how the corpus's chunks move.
    """
    n_reusable = int(layout.reusable.sum())
    n_recomputed = len(done.recomputed)
    return BlendReport(
        method=blend.method,
        policy=blend.policy,
        correction=blend.correction,
        ratio=blend.min_ratio,
        reason="" if n_reusable > n_recomputed else why or _reason(blend, layout.n_found, n_reusable, found),
        chunks=len(prompt.chunks),
        chunks_hit=found.hits,
        chunks_missing=len(found.looked_for) - found.hits - found.corrupt,
        chunks_corrupt=found.corrupt,
        tokens_prompt=len(prompt),
        tokens_exact=int(layout.exact.sum()),
        tokens_first=len(layout.first) if layout.first else 0,
        tokens_reused=n_reusable - n_recomputed,
        tokens_recomputed=n_recomputed,
        tokens_computed=int(layout.fresh.sum()) - len(prompt.suffix),
        tokens_suffix=len(prompt.suffix),
        bytes_loaded=done.bytes_loaded,
        cost=done.cost,
        unusable=found.unusable,
        tiers=dict(found.tiers),
        near=tuple(near_chunks(prompt, layout, found)),
        prior=prior and done.corrected,
    )


def near_chunks(prompt: Prompt, layout: Layout, found: Found) -> Iterator[NearChunk]:
    """Those that were looked for among others, by what was used of those."""
    placed = {piece.span.start for piece in layout.placements}
    for i, trouble in found.looked_near.items():
        span = prompt.spans[i]
        used = [run for run in found.near.get(i, ()) if span.start + run.span.start in placed]
        donors, n = tuple(dict.fromkeys(run.donor.hex() for run in used)), sum(len(x.span) for x in used)
        yield NearChunk(i, donors, n, len(span) - n, _why_near(len(donors), n, len(span), trouble))


def _why_near(donors: int, stored: int, tokens: int, trouble: str) -> str:
    others = ("no stored chunk has", "a stored chunk has", f"{donors} stored chunks have")[min(donors, 2)]
    what = f"{stored} of its {tokens} tokens in the same order" if donors else "text of it that is of use"
    but = f"; of one that has, nothing could be used: {trouble}" if trouble else ""
    return f"it was not in the store, {'but' if donors else 'and'} {others} {what}{but}"


def plain_report(prompt: Prompt, blend: BlendConfig, why: str) -> BlendReport:
    """Of a prompt that the borrowed model ran by itself, because of `why`."""
    return BlendReport(
        method="full",
        policy=blend.policy,
        correction=blend.correction,
        ratio=blend.min_ratio,
        reason=why,
        chunks=len(prompt.chunks),
        chunks_hit=0,
        chunks_missing=0,
        chunks_corrupt=0,
        tokens_prompt=len(prompt),
        tokens_exact=0,
        tokens_first=0,
        tokens_reused=0,
        tokens_recomputed=0,
        tokens_computed=len(prompt) - len(prompt.suffix),
        tokens_suffix=len(prompt.suffix),
        bytes_loaded=0,
        cost=1.0,
    )


def _reason(blend: BlendConfig, n_found: int, n_reusable: int, found: Found) -> str:
    if blend.method in {"full", "prefix"}:
        return f"method {blend.method!r} does not blend"
    if n_reusable:
        return "every token was chosen for recomputation"
    if n_found:
        return "the only chunk found stands first, where its KV is exact"
    if found.unusable:
        return f"no stored chunk could be used: {found.unusable[0].reason}"
    return "no chunk was found in the store: precompute the corpus, or let write-back fill it"
