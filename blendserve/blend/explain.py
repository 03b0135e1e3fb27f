"""What each token of a prompt started from, and why: the report, token by token and part by part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from blendserve.blend.layout import Layout, Run
from blendserve.blend.lookup import Found
from blendserve.blend.prefill import PassResult
from blendserve.blend.report import near_chunks
from blendserve.config import Method
from blendserve.core import Explanation, Part, Prompt, Reason, Span
from blendserve.fetch.fetcher import COMPUTED

STATE = {name: n for n, name in enumerate(Explanation.STATES)}
NEAR = "near"  # in place of a tier: read from other chunks
ALWAYS = "It is the question and the end of the prompt, which are computed for every request."
MISSING = "It was not in the store."


def explain(
    prompt: Prompt, method: Method, layout: Layout, found: Found, done: PassResult, why: str
) -> Explanation:
    """Of a prompt that was prefilled by `method`; `found` as it was looked up, whether used or not.

    why: as `make_report` takes it.
    """
    parts = tuple(part for part in _parts(prompt, method, layout, found, why) if len(part.span))
    return Explanation(parts, _states(layout, done, parts), done.scores)


def explain_plain(prompt: Prompt, why: str) -> Explanation:
    """Of a prompt that the borrowed model ran by itself, because of `why`."""
    because = Reason.NOT_LOOKED_UP, _sentence(f"Nothing was looked for: {why}")
    prefix = Part("prefix", None, Span(0, len(prompt.prefix)), "", *because)
    passages = (Part("passage", i, span, "", *because) for i, span in enumerate(prompt.spans))
    states = torch.full((len(prompt),), STATE["fresh"], dtype=torch.uint8)
    parts = (prefix, *passages, _suffix(prompt))
    return Explanation(tuple(part for part in parts if len(part.span)), states, None)


def _states(layout: Layout, done: PassResult, parts: Sequence[Part]) -> Tensor:
    """[T] uint8"""
    near = torch.zeros_like(layout.reusable)
    for span in (span for part in parts for span, _ in part.donors):
        near[span.start : span.stop] = True
    states = torch.full((layout.n_tokens,), STATE["fresh"], dtype=torch.uint8)
    states[layout.exact] = STATE["exact"]
    states[layout.reusable] = STATE["corrected" if done.corrected else "reused"]
    states[layout.reusable & near] = STATE["near"]
    states[done.recomputed] = STATE["recomputed"]
    return states


def _parts(prompt: Prompt, method: Method, layout: Layout, found: Found, why: str) -> Iterator[Part]:
    """Empty passages among them."""
    used = {placement.span.start for placement in layout.placements}
    not_asked = _sentence(f"Nothing was looked for: {why or f'method {method!r} reuses nothing of it'}")
    missing, not_looked_up = (Reason.NOT_STORED, MISSING), (Reason.NOT_LOOKED_UP, not_asked)
    prefix = Span(0, len(prompt.prefix))
    if 0 in used:
        said = "It was stored, computed as it stands here."
        yield Part("prefix", None, prefix, found.prefix_tier, Reason.STORED, said)
    else:
        yield Part("prefix", None, prefix, "", *(missing if found.looked_for else not_looked_up))
    trouble = {unusable.chunk: unusable.reason for unusable in found.unusable}
    near = {chunk.chunk: chunk for chunk in near_chunks(prompt, layout, found)}
    for i, span in enumerate(prompt.spans):
        if i in near and near[i].donors:
            said = _said(near[i].reason)
            yield Part("passage", i, span, NEAR, Reason.NEAR, said, _donors(found.near[i], span))
        elif span.start in used and len(span):
            tier = found.tier_of.get(i, "")
            yield Part("passage", i, span, tier, *_reused(span == layout.first, tier))
        elif i in trouble:
            said = _sentence(f"Its stored KV was of no use: {trouble[i]}")
            yield Part("passage", i, span, "", Reason.UNUSABLE, said)
        elif found.chunks[i] is not None:
            because = why or f"method {method!r} does not use it in this place"
            said = _sentence(f"It was stored, and left alone: {because}")
            yield Part("passage", i, span, "", Reason.UNUSED, said)
        elif i in near:
            code = Reason.DONOR_UNUSABLE if found.looked_near[i] else Reason.NO_DONOR
            yield Part("passage", i, span, "", code, _said(near[i].reason))
        else:
            yield Part("passage", i, span, "", *(missing if i in found.looked_for else not_looked_up))
    yield _suffix(prompt)


def _donors(runs: Sequence[Run], chunk: Span) -> tuple[tuple[Span, str], ...]:
    """Of a chunk that stands here."""
    at = chunk.start
    return tuple((Span(at + run.span.start, at + run.span.stop), run.donor.hex()) for run in runs)


def _reused(first: bool, tier: str) -> tuple[Reason, str]:
    if tier == COMPUTED:
        said = "It was computed here, without the passages before it, while others were on their way."
        return Reason.COMPUTED, said
    if first:
        said = "It was stored, and stands right behind the prefix, as it did when its KV was computed."
        return Reason.STORED, said
    return Reason.MOVED, "It was stored, computed without the passages before it, and moved to its place."


def _suffix(prompt: Prompt) -> Part:
    span = Span(len(prompt) - len(prompt.suffix), len(prompt))
    return Part("suffix", None, span, "", Reason.SUFFIX, ALWAYS)


def _said(reason: str) -> str:
    return _sentence(reason[:1].upper() + reason[1:])


def _sentence(text: str) -> str:
    return text if text.endswith(".") else text + "."
