"""What every token of a prompt starts from: stored KV where it is exact, stored KV that is moved, or nothing.

    [ prefix | chunk 0 | chunk 1 | chunk 2 (missing) | ... | suffix ]
      exact    exact     reused    fresh               ...   fresh

exact   the KV was computed after this very prefix, at this very position: nothing to recompute; it is full prefill's
        unless its codec is lossy
kept    of the prefix: as a blended prompt before had it, so it is approximate
reused  the KV was computed elsewhere and is rotated to its place; a policy selects the tokens to recompute
fresh   there is no KV, or the method does not use it: computed in this request

The cost model, the prefill and the report read these segments and nothing else. A missing chunk may
consist of several segments: runs of stored near-duplicates, and fresh tokens between them. So does the text of a plain
prompt (runs.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import groupby
from types import MappingProxyType

import torch
from torch import Tensor

from blendserve.config import Method
from blendserve.core import Prompt, Run, Span
from blendserve.fetch.fetcher import Fetch
from blendserve.store.base import LOCAL, Miss
from blendserve.store.codecs.base import Pair
from blendserve.store.key import ChunkKey
from blendserve.store.view import ChunkView

LEAST_REUSED = 64  # tokens of a stored chunk: a shorter one is computed where tokens may be recomputed

# Why stored tokens are fresh, although the method would reuse them.
SHORT = f"a chunk of fewer than {LEAST_REUSED} tokens is too short to be blended"
PART = "the model has recurrent layers, which go on behind whole chunks only, and the prompt has a part of this one"
ALL_SEAM = "the model has recurrent layers, and all tokens of so short a chunk are computed anyway"

LayerKV = tuple[Tensor, Tensor]  # one layer's keys after RoPE, and values [K, S, D]


class State(Enum):
    """What the tokens of a segment start from."""

    EXACT = "exact"
    KEPT = "kept"  # of a prefix: as a blended prompt before had it
    REUSED = "reused"
    FRESH = "computed"


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a prompt whose tokens all start from the same KV."""

    span: Span
    state: State
    chunk: int | None = None  # number of the passage; None: prefix or suffix
    view: ChunkView | None = None  # where KV is read from, whether the method uses it or not
    offset: int = 0  # where the segment starts in the view
    source: str = ""  # local | remote | computed
    # why it is fresh, although it is stored and the method would reuse it: one of the reasons above
    unused: str = ""
    is_seam: bool = False  # fresh, as a state map begins behind it
    donor: ChunkKey | None = None  # the stored chunk that the view belongs to, of a run
    # why the chunk's own KV, or that of a chunk found in a plain prompt, is not here
    miss: Miss | None = None

    @property
    def is_placed(self) -> bool:
        """Whether its keys are after RoPE, where they stand: of a prefix."""
        return self.view is not None and self.view.is_placed

    @property
    def is_exact(self) -> bool:
        """Whether its KV is full prefill's: computed in this place, and not coded with a loss."""
        return self.state is State.EXACT and self.view is not None and self.view.is_lossless

    @property
    def is_stored(self) -> bool:
        """Whether the chunk's own KV, or that of a chunk found in a plain prompt, is here."""
        return self.view is not None and self.miss is None


@dataclass(frozen=True)
class Layout:
    """The segments of a prompt. They cover it, in order; empty chunks have none."""

    prompt: Prompt
    segments: tuple[Segment, ...]
    first_is_exact: bool  # whether chunk KV was computed after this prefix, so it is exact right after it
    donor_errors: Mapping[int, str] = field(default_factory=dict)
    """chunks that donors were looked for -> why some of them could not be used, "" if all could"""

    @cached_property
    def n_tokens(self) -> int:
        return len(self.prompt)

    @property
    def n_suffix(self) -> int:
        return len(self.prompt.suffix)

    @property
    def loaded(self) -> list[Segment]:
        """Segments whose KV is read."""
        return [segment for segment in self.segments if segment.state is not State.FRESH]

    def spans(self, state: State) -> list[Span]:
        return [segment.span for segment in self.segments if segment.state is state]

    def count(self, state: State) -> int:
        """Number of tokens in a state."""
        return sum(map(len, self.spans(state)))

    @property
    def n_loaded(self) -> int:
        """Tokens whose KV is read."""
        return self.n_tokens - self.count(State.FRESH)

    @property
    def found(self) -> list[Segment]:
        """Segments of chunks whose KV is read."""
        return [segment for segment in self.loaded if segment.chunk is not None]

    @property
    def n_found(self) -> int:
        """Chunk tokens that start from KV: what the ratio is a share of."""
        return sum(len(segment.span) for segment in self.found)

    @property
    def n_reusable(self) -> int:
        return self.count(State.REUSED)

    @cached_property
    def reusable(self) -> Tensor:
        """[T] bool"""
        return self.mask(self.spans(State.REUSED))

    @cached_property
    def fresh(self) -> Tensor:
        """[T] bool"""
        return self.mask(self.spans(State.FRESH))

    def mask(self, spans: Iterable[Span]) -> Tensor:
        """Whether each position is in one of the spans [T] bool."""
        mask = torch.zeros(self.n_tokens, dtype=torch.bool)
        for span in spans:
            mask[span.start : span.stop] = True
        return mask

    def chunks(self) -> Iterator[tuple[int, list[Segment]]]:
        """Number and segments of each chunk that has tokens, in order."""
        for i, segments in groupby(self.segments, key=lambda segment: segment.chunk):
            if i is not None:
                yield i, list(segments)

    def state_at(self, start: int, offset: int = 0) -> State:
        """The state of stored KV that is used from position `start` on, read from `offset` tokens into its chunk."""
        is_exact = self.first_is_exact and start == len(self.prompt.prefix) and not offset
        return State.EXACT if is_exact else State.REUSED

    def with_seams(self, n: int) -> Layout:
        """The layout for a model with state maps: a chunk's first n tokens are fresh, or all if its end is not used."""

        def parts(segment: Segment) -> Iterator[Segment]:
            view = segment.view
            span = segment.span
            offset = segment.offset
            if view is None or segment.chunk is None or segment.state is State.FRESH or not n:
                yield segment
                return
            cut = len(span)  # the map is of the tokens from the n-th on, to the last one
            unused = PART
            if has_state_map(offset, view.n_tokens - offset - len(span), n):
                cut = min(n - offset, len(span))
                unused = ALL_SEAM
            middle = span.start + cut
            is_seam = cut < len(span)
            fresh = replace(segment, span=Span(span.start, middle), state=State.FRESH, is_seam=is_seam)
            yield fresh if is_seam else replace(fresh, unused=unused)
            yield replace(segment, span=Span(middle, span.stop), offset=offset + cut)

        cut = (part for segment in self.segments for part in parts(segment) if len(part.span))
        return replace(self, segments=tuple(cut)) if n else self

    @property
    def unused(self) -> str:
        """Why the first of the segments that could be reused, but are not, is fresh; "" if there is none."""
        return next((segment.unused for segment in self.segments if segment.unused), "")

    def for_method(self, method: Method, recomputes: bool = False) -> Layout:
        """The same with the segments that a method does not use left fresh: prefix caching uses what is exact.

        recomputes: whether blending recomputes tokens; chunks below LEAST_REUSED are then computed.
        """

        def is_used(segment: Segment) -> bool:
            is_prefix = segment.state is State.KEPT or (segment.is_exact and segment.donor is None)
            return method == "prefix" and is_prefix

        if method not in ("full", "prefix"):
            return replace(self, segments=tuple(map(_floored, self.segments))) if recomputes else self
        segments = (s if is_used(s) else replace(s, state=State.FRESH) for s in self.segments)
        return replace(self, segments=tuple(segments))


def lay_out(
    prompt: Prompt,
    prefix: ChunkView | None = None,
    chunks: Mapping[int, ChunkView | Miss] = MappingProxyType({}),
    sources: Mapping[int, str] = MappingProxyType({}),
    *,
    first_is_exact: bool = True,
    n_kept: int = 0,
) -> Layout:
    """The layout of a prompt by the KV of its prefix, and what was found of chunks, by number, in these sources.

    n_kept: last tokens of the prefix that are kept from a blended prompt.
    """
    layout = Layout(prompt, (), first_is_exact)
    start = len(prompt) - len(prompt.suffix)
    n = len(prompt.prefix)
    segments = [Segment(Span(0, n), State.FRESH)]
    if prefix:
        exact = Segment(Span(0, n - n_kept), State.EXACT, view=prefix, source=LOCAL)
        segments = [exact, replace(exact, span=Span(n - n_kept, n), state=State.KEPT, offset=n - n_kept)]
    for i, span in enumerate(prompt.spans):
        found = chunks.get(i)
        if found is None or isinstance(found, Miss):
            segments.append(Segment(span, State.FRESH, i, miss=found))
        else:
            segments.append(Segment(span, layout.state_at(span.start), i, found, source=sources.get(i, "")))
    segments.append(Segment(Span(start, len(prompt)), State.FRESH))
    return replace(layout, segments=tuple(segment for segment in segments if len(segment.span)))


def _floored(segment: Segment) -> Segment:
    """Fresh, if it is reused from a chunk that is too short."""
    is_short = segment.state is State.REUSED and segment.view and segment.view.n_tokens < LEAST_REUSED
    return replace(segment, state=State.FRESH, unused=SHORT) if is_short else segment


def has_state_map(offset: int, n_after: int, seam: int) -> bool:
    """Whether a part of a chunk can start from its state map: it begins within the seam, and is whole from there on."""
    return offset <= seam and n_after == 0


def _never_read(l: int) -> Pair:
    raise AssertionError("a supposed chunk has no KV")


ASSUMED = ChunkView(0, 0, 0, 0, None, _never_read, is_lossless=True)  # of a layout that is never read


def suppose(prompt: Prompt, chunks: Collection[int], first_is_exact: bool) -> Layout:
    """The layout if the prefix and these chunks were stored: to estimate costs, not to read."""
    views = {i: replace(ASSUMED, n_tokens=len(prompt.chunks[i])) for i in chunks}
    return lay_out(prompt, ASSUMED, views, first_is_exact=first_is_exact)


def with_runs(layout: Layout, segment: Segment, runs: Sequence[Run], fetch: Fetch) -> Iterator[Segment]:
    """A fresh segment as runs of stored chunks, and the fresh tokens between them.

    runs: by position in the segment, ascending. A run whose donor was not fetched is fresh, with the reason.
    """
    done = segment.span.start
    for run in runs:
        at = Span(segment.span.start + run.span.start, segment.span.start + run.span.stop)
        if done < at.start:
            yield replace(segment, span=Span(done, at.start))
        view = fetch.views.get(run.donor)
        miss = segment.miss or fetch.misses.get(run.donor)
        state = layout.state_at(at.start, run.offset) if view else State.FRESH
        found = replace(segment, span=at, state=state, view=view, offset=run.offset, donor=run.donor)
        yield replace(found, source=fetch.source.get(run.donor, ""), miss=miss)
        done = at.stop
    if done < segment.span.stop:
        yield replace(segment, span=Span(done, segment.span.stop))


def usable_chunks(prompt: Prompt, method: Method, first_is_exact: bool) -> list[int]:
    """The chunks that a method can use: for prefix caching, only the one that is exact. Empty chunks are left out.

    A plain prompt's text is no chunk that is stored as such.
    """
    filled = [i for i, chunk in enumerate(prompt.chunks) if len(chunk) and not prompt.is_plain]
    if method == "prefix":
        return filled[:1] if first_is_exact else []
    return filled if method != "full" else []


def preceding_share(span: Span) -> float:
    """The share of the text up to a chunk's end that precedes the chunk: its KV deviates in proportion to it."""
    return max(1, span.start) / max(1, span.stop)
