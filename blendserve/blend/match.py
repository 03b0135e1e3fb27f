"""Stored chunks in the token ids of a plain prompt, wherever they stand: every hit is compared token by token.

    prompt    | text | chunk, but for its ends | text | chunk | ... | question |
    starts    | exact|         reused          | fresh| reused| ... |  fresh   |

Tokens at a chunk's ends merge with what stands beside them, so at most EDGE of them may be missing at either end. What is
left has read the same text as in the store: no margin is computed, unlike in near.py. A hash that collides costs time and
nothing else, and that time is bounded (WORK).

No run holds a control token: a stored chunk is tokenised as literal text (engine/prompt.py), and a run is equal to it. So
no chunk reaches from one message into another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from blendserve.blend.chunk_kv import ChunkKeys
from blendserve.blend.donors import DonorIndex, Donors
from blendserve.blend.layout import Layout, Segment, with_runs
from blendserve.core import Prompt, Run, Span, TokenIds
from blendserve.fetch.fetcher import Fetch
from blendserve.fetch.incoming import ChunkRequest
from blendserve.store import ChunkKey, KVStore
from blendserve.store.spans import EDGE, MOST, Hit, SpanIndex, Tokens

MIN_SPAN = 48  # tokens of a run
OVERLAPS = 16  # runs that a run may overlap with
WORK = 16  # tokens to compare for each token of a prompt, at most


class Cover(NamedTuple):
    """What was found in a prompt."""

    runs: tuple[Run, ...]  # ascending, none overlapping
    n_compared: int  # tokens


class ChunkFinder(DonorIndex):
    """Finds whole chunks of one namespace in plain prompts. Thread-safe."""

    def __init__(self, store: KVStore, key: ChunkKeys) -> None:
        self.index = SpanIndex()
        super().__init__(store, key, self.index, self.index.anchors)

    def find(self, ids: TokenIds, start: int, stop: int) -> tuple[Run, ...]:
        """The chunks in a prompt from a position on, up to another; none while the index is being built.

        One that goes on behind `stop` is cut there: the prompt has its end, too.
        """
        self.refresh_if_due()
        found = find_chunks(np.asarray(ids[start:], np.int64), self.index, self.read)
        is_learnt = self._key.scope is not None
        runs = (_cut(_moved(run, start), stop)._replace(is_learnt=is_learnt) for run in found.runs)
        return tuple(run for run in runs if len(run.span) >= MIN_SPAN)


def find_chunks(ids: Tokens, index: SpanIndex, read: Callable[[Sequence[ChunkKey]], Donors]) -> Cover:
    """Runs of at least MIN_SPAN tokens that are whole chunks but for EDGE tokens at either end, covering most tokens.

    One whose beginning another run covers starts behind that.

    read: the tokens of stored chunks. Chunks that are found in vain (an equal middle, other ends) count as work.
    """
    hits, left, found = _by_rank(index.find(ids)), WORK * len(ids), set[Run]()
    compared = set[tuple[ChunkKey, int]]()
    keys = list(dict.fromkeys(hit.key for hit in hits))[: len(ids) // MIN_SPAN + MOST]
    donors = {key: np.asarray(tokens, np.int64) for key, tokens in read(keys).items()} if keys else {}
    places = {key: index.places(donor) for key, donor in donors.items()}
    for hit in (hit for hit in hits if hit.key in donors):
        donor = donors[hit.key]
        for anchor in places[hit.key].get(hit.hash, ()):
            start = hit.place - anchor  # where the chunk would start
            first, last = max(0, -start), min(len(donor), len(ids) - start)
            if last - first > left or (hit.key, start) in compared:
                continue
            left -= last - first
            equal = ids[start + first : start + last] == donor[first:last]
            run = _run_around(equal, anchor - first, index.width)
            head, tail = first + run.start, len(donor) - first - run.stop
            if len(run) >= MIN_SPAN and max(head, tail) <= EDGE:
                found.add(Run(Span(start + head, start + first + run.stop), hit.key, head, tail))
                compared.add((hit.key, start))
    return Cover(best_cover(found), WORK * len(ids) - left)


def _by_rank(hits: Sequence[Hit]) -> list[Hit]:
    """The first hit of each place, then the second one of each, and so on: boilerplate is last."""
    ranks, ranked = Counter[int](), list[tuple[int, Hit]]()
    for hit in hits:
        ranked.append((ranks[hit.place], hit))
        ranks[hit.place] += 1
    return [hit for _, hit in sorted(ranked, key=lambda each: each[0])]


def _run_around(equal: np.ndarray, anchor: int, width: int) -> Span:
    """The equal tokens without a gap around an anchor's window; none if the window itself differs."""
    if not equal[anchor : anchor + width].all():
        return Span(anchor, anchor)
    before, after = np.flatnonzero(~equal[:anchor]), np.flatnonzero(~equal[anchor:])
    start = int(before[-1]) + 1 if len(before) else 0
    return Span(start, anchor + int(after[0]) if len(after) else len(equal))


def best_cover(runs: Iterable[Run], least: int = MIN_SPAN) -> tuple[Run, ...]:
    """The runs that cover most tokens; of equals, the fewest: weighted interval scheduling.

    Where two overlap, the second one begins later, with at least `least` tokens left: segments that were learnt may begin
    with what others end with. Of those in front of a run, the last OVERLAPS are tried.
    """
    ordered = sorted(runs, key=lambda run: (run.span.stop, run.span.start, run.donor))
    stops = [run.span.stop for run in ordered]
    best = [(0, 0, -1)]  # of the first n runs' best cover: tokens, -runs, its last run
    ends = list[
        tuple[int, int, int]
    ]()  # the same of the best cover that ends with the n-th run, with the run before it
    for n, (start, stop) in enumerate((run.span.start, run.span.stop) for run in ordered):
        fit = bisect_right(stops, start, 0, n)
        tokens, count, last = best[fit]
        options = [(tokens + stop - start, count - 1, last)]
        overlapping = (m for m in range(max(fit, n - OVERLAPS), n) if stop - stops[m] >= least)
        options += [(ends[m][0] + stop - stops[m], ends[m][1] - 1, m) for m in overlapping]
        ends.append(max(options))
        best.append(max(best[n], (*ends[n][:2], n)))
    cover, n = list[Run](), best[-1][2]
    while n >= 0:
        run, before = ordered[n], ends[n][2]
        cut = max(0, stops[before] - run.span.start) if before >= 0 else 0
        span = Span(run.span.start + cut, run.span.stop)
        cover.append(run._replace(span=span, offset=run.offset + cut))
        n = before
    return tuple(cover[::-1])


def donor_requests(prompt: Prompt, token_saves_s: float | None) -> list[ChunkRequest]:
    """Requests for the chunks found in a prompt. token_saves_s: seconds that a token of one saves; None: fetch all."""
    n_tokens = {run.donor: run.n_donor for run in prompt.runs}
    return [ChunkRequest(key, n, token_saves_s and n * token_saves_s) for key, n in n_tokens.items()]


def reuse_runs(layout: Layout, fetch: Fetch, token_saves_s: float | None) -> Layout:
    """The layout of a plain prompt with the KV of its runs. A run is fresh if its chunk cannot be read."""
    prompt, segments = layout.prompt, list[Segment]()
    fetch.extend(donor_requests(prompt, token_saves_s))
    runs = [_moved(run, -len(prompt.prefix)) for run in prompt.runs]
    for segment in layout.segments:
        segments += [segment] if segment.chunk is None else with_runs(layout, segment, runs, fetch)
    return replace(layout, segments=tuple(segments))


def _cut(run: Run, stop: int) -> Run:
    n_cut = max(0, run.span.stop - stop)
    return run._replace(span=Span(run.span.start, run.span.stop - n_cut), n_after=run.n_after + n_cut)


def _moved(run: Run, by: int) -> Run:
    return run._replace(span=Span(run.span.start + by, run.span.stop + by))
