"""Runs of stored text in other text: in plain prompts, and in chunks that are not stored themselves (near-duplicates).

    the text          | a a a a a a a | x x | a a a a a a a a a a | b b b b b b |        x: in no donor
    donors                 a a a a a a a y a a a a a a a a a a        b b b b b b        y: what x was
    starts from       | reused        | fresh        | reused     | fr.  | reused |

A run is a stretch of equal token ids, from anywhere in a stored chunk, its donor, and it is compared token by token. All
other tokens are computed in the same prefill, so a changed number, name or "not" is never read from the old text. A
donor's tokens may have attended to other text before the run, so the first tokens of a run are computed as well
(MARGIN), unless the run starts its donor.

A run that shares SURE tokens with a donor is found for certain, unless more than store/spans.py's MOST chunks have every
window of it. A hash that collides costs time and nothing else, and that time is bounded (WORK). No run holds a control
token: a stored chunk is tokenised as literal text (engine/prompt.py), and a run is equal to it. So none reaches from one
message into another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from blendserve.blend.donors import DonorIndex, Donors
from blendserve.blend.layout import Layout, Segment, has_state_map, with_runs
from blendserve.core import Prompt, Run, Span, TokenIds
from blendserve.fetch.fetcher import Fetch
from blendserve.fetch.incoming import ChunkRequest
from blendserve.store import ChunkKey
from blendserve.store.spans import MOST, STRIDE, WINDOW, Hit, SpanIndex, Tokens

SURE = STRIDE + WINDOW - 1  # tokens of a run that has an anchor for certain
MIN_RUN = 16  # reused tokens of a run in a chunk
MIN_SPAN = 32  # reused tokens of a run in a plain prompt
MARGIN = 8  # tokens of a run before those, where it does not start its donor
EDGE = 8  # tokens at a donor's beginning that merge with the text in front of it in a plain prompt: no margin behind them
OVERLAPS = 16  # runs that a run may overlap with
ROUNDS = 3  # of donors that are read for a text
WORK = 16  # tokens to compare for each token of a text, at most
SEPARATOR = -1  # between texts that are searched together: no token


class RunFinder(DonorIndex):
    """Finds text of the stored chunks of one namespace. Thread-safe."""

    def in_prompt(self, ids: TokenIds, start: int, stop: int, seam: int = 0) -> tuple[Run, ...]:
        """The runs that cover most of a plain prompt from one position up to another.

        None while the index is being built. seam: of the model.
        """
        self.refresh_if_due()
        is_learnt = self._key.scope is not None
        found = find_runs(np.asarray(ids[start:stop], np.int64), self.index, self.read, seam)
        runs = (_moved(run, start)._replace(is_learnt=is_learnt) for run in found)
        return choose_runs(runs, MIN_SPAN, n_merged=EDGE, seam=seam)

    def in_chunks(self, chunks: Mapping[int, TokenIds], seam: int = 0) -> dict[int, list[Run]]:
        """All runs of these chunks, by number, at their places in the chunk. They are searched together.

        seam: of the model.
        """
        self.refresh_if_due()
        starts = [0, *accumulate(len(ids) + 1 for ids in chunks.values())]
        text = [i for ids in chunks.values() for i in (*ids, SEPARATOR)]
        found: dict[int, list[Run]] = {i: [] for i in chunks}
        numbers = list(chunks)
        for run in find_runs(np.asarray(text, np.int64), self.index, self.read, seam):
            at = bisect_right(starts, run.span.start) - 1
            found[numbers[at]].append(_moved(run, -starts[at]))
        return found


def find_runs(
    ids: Tokens, index: SpanIndex, read: Callable[[Sequence[ChunkKey]], Donors], seam: int = 0
) -> list[Run]:
    """Runs of at least MIN_RUN tokens that a text has in common with stored chunks, overlapping ones too.

    read: the tokens of stored chunks. First those are read that have most anchors in the text; then, as some have little
    but the anchor in common with it, those with anchors where no run was found that a model with this seam can use.
    """
    hits = index.find(ids)
    runs = list[Run]()
    known = set[ChunkKey]()
    n_left = WORK * len(ids)
    for _ in range(ROUNDS):
        keys = _best_donors(hits, len(ids) // MIN_SPAN + MOST)
        if not keys:
            break
        donors = {key: np.asarray(tokens, np.int64) for key, tokens in read(keys).items()}
        found, n_left = equal_runs(ids, hits, donors, index, MIN_RUN, n_left)
        runs += found
        known.update(keys)
        hits = _uncovered(hits, [run for run in runs if is_usable(run, seam)], known)
    return runs


def equal_runs(
    ids: Tokens,
    hits: Iterable[Hit],
    donors: Mapping[ChunkKey, Tokens],
    index: SpanIndex,
    least: int,
    n_left: int,
) -> tuple[list[Run], int]:
    """Every run of at least `least` tokens of a donor in a text, as the hits place it, and what is left of the work.

    n_left: tokens that may be compared. Text that repeats itself over and over may stand in a donor in many places.
    """
    runs = list[Run]()
    for key, start in _alignments(hits, donors, index):
        donor = donors[key]
        first = max(0, -start)
        last = min(len(donor), len(ids) - start)
        if last - first > n_left:
            continue
        n_left -= last - first
        equal = ids[start + first : start + last] == donor[first:last]
        for span in _stretches(equal, least):
            at = Span(start + first + span.start, start + first + span.stop)
            runs.append(Run(at, key, first + span.start, len(donor) - first - span.stop))
    return runs, n_left


def _best_donors(hits: Sequence[Hit], most: int) -> list[ChunkKey]:
    """The chunk with most anchors in a text, then the one with most where those before it have none, and so on.

    Of equals, the one that was stored last.
    """
    numbers: dict[ChunkKey, int] = {}
    donors = np.array([numbers.setdefault(hit.key, len(numbers)) for hit in hits], np.int64)
    _, places = np.unique([hit.place for hit in hits], return_inverse=True)
    keys = list(numbers)
    found = list[ChunkKey]()
    is_left = np.ones(len(hits), bool)
    while is_left.any() and len(found) < most:
        best = int(np.bincount(donors[is_left]).argmax())
        found.append(keys[best])
        is_covered = np.zeros(len(hits), bool)
        is_covered[places[donors == best]] = True
        is_left &= ~is_covered[places]
    return found


def _alignments(
    hits: Iterable[Hit], donors: Mapping[ChunkKey, Tokens], index: SpanIndex
) -> dict[tuple[ChunkKey, int], None]:
    """The donors, each with where it would start in the text by a hit; in the order of the hits."""
    anchors = {key: index.places(donor) for key, donor in donors.items()}
    found = [(hit, at) for hit in hits if hit.key in anchors for at in anchors[hit.key].get(hit.hash, ())]
    return dict.fromkeys((hit.key, hit.place - at) for hit, at in found)


def _stretches(equal: np.ndarray, least: int) -> list[Span]:
    """Where at least `least` values in a row are true."""
    edges = [-1, *np.flatnonzero(~equal).tolist(), len(equal)]
    return [Span(a + 1, b) for a, b in pairwise(edges) if b - a > least]


def _uncovered(hits: Iterable[Hit], runs: Iterable[Run], known: Collection[ChunkKey]) -> list[Hit]:
    """The hits of chunks that are not known, at places that are in no run."""
    cover = best_cover(runs, MIN_RUN)
    starts = [run.span.start for run in cover]
    left = list[Hit]()
    for hit in hits:
        at = bisect_right(starts, hit.place) - 1
        is_covered = at >= 0 and hit.place + WINDOW <= cover[at].span.stop
        if hit.key not in known and not is_covered:
            left.append(hit)
    return left


def choose_runs(
    runs: Iterable[Run], least: int, lost: Collection[ChunkKey] = (), n_merged: int = 0, seam: int = 0
) -> tuple[Run, ...]:
    """The runs that cover most without their margins, of at least `least` tokens, ascending, none overlapping.

    lost: donors whose KV cannot be read. n_merged: tokens missing at a donor's beginning that need no margin. seam: of
    the model.
    """
    behind = (_behind_margin(run, n_merged) for run in runs if run.donor not in lost)
    return usable_cover([run for run in behind if len(run.span) >= least], least, seam)


def _behind_margin(run: Run, n_merged: int) -> Run:
    """The run without the tokens that may have attended to other text right before them."""
    n = min(MARGIN, len(run.span)) if run.offset > n_merged else 0
    return run._replace(span=Span(run.span.start + n, run.span.stop), offset=run.offset + n)


def usable_cover(runs: Sequence[Run], least: int, seam: int) -> tuple[Run, ...]:
    """The best cover; with recurrent layers (seam > 0), that of runs with state maps, and other runs beside it.

    The others are computed, and the report says why.
    """
    if not seam:
        return best_cover(runs, least)
    cover = best_cover((run for run in runs if is_usable(run, seam)), least)
    others = (run for run in runs if not any(_overlap(run.span, used.span) for used in cover))
    return tuple(sorted((*cover, *best_cover(others, least)), key=lambda run: run.span.start))


def is_usable(run: Run, seam: int) -> bool:
    """Whether a model can start from the run's KV: with recurrent layers (seam > 0), from a state map alone."""
    return not seam or has_state_map(run.offset, run.n_after, seam)


def _overlap(a: Span, b: Span) -> bool:
    return a.start < b.stop and b.start < a.stop


def best_cover(runs: Iterable[Run], least: int) -> tuple[Run, ...]:
    """The runs that cover most tokens; of equals, the fewest: weighted interval scheduling.

    Where two overlap, the second one begins later, with at least `least` tokens left: segments that were learnt may begin
    with what others end with. Of those in front of a run, the last OVERLAPS are tried.
    """
    ordered = sorted(runs, key=lambda run: (run.span.stop, run.span.start, run.donor))
    stops = [run.span.stop for run in ordered]
    best = [(0, 0, -1)]  # of the first n runs' best cover: tokens, -runs, its last run
    ends = list[
        tuple[int, int, int]
    ]()  # the same of the best cover that ends with the n-th run: the run before it
    for n, (start, stop) in enumerate((run.span.start, run.span.stop) for run in ordered):
        fit = bisect_right(stops, start, 0, n)
        tokens, count, last = best[fit]
        options = [(tokens + stop - start, count - 1, last)]
        overlapping = (m for m in range(max(fit, n - OVERLAPS), n) if stop - stops[m] >= least)
        options += [(ends[m][0] + stop - stops[m], ends[m][1] - 1, m) for m in overlapping]
        ends.append(max(options))
        best.append(max(best[n], (*ends[n][:2], n)))
    cover = list[Run]()
    n = best[-1][2]
    while n >= 0:
        run = ordered[n]
        before = ends[n][2]
        cut = max(0, stops[before] - run.span.start) if before >= 0 else 0
        span = Span(run.span.start + cut, run.span.stop)
        cover.append(run._replace(span=span, offset=run.offset + cut))
        n = before
    return tuple(cover[::-1])


def donor_requests(prompt: Prompt, token_saves_s: float | None) -> list[ChunkRequest]:
    """Requests for the donors of a plain prompt's runs. token_saves_s: seconds that a donor's token saves."""
    return _requests(prompt.runs, token_saves_s)


def _requests(runs: Iterable[Run], token_saves_s: float | None) -> list[ChunkRequest]:
    """token_saves_s: None: fetch every donor."""
    n_tokens = {run.donor: run.n_donor for run in runs}
    return [ChunkRequest(key, n, token_saves_s and n * token_saves_s) for key, n in n_tokens.items()]


def reuse_in_prompt(layout: Layout, fetch: Fetch, token_saves_s: float | None) -> Layout:
    """The layout of a plain prompt with the KV of its runs. A run is fresh if its donor cannot be read."""
    prompt = layout.prompt
    segments = list[Segment]()
    fetch.extend(donor_requests(prompt, token_saves_s))
    runs = [_moved(run, -len(prompt.prefix)) for run in prompt.runs]
    for segment in layout.segments:
        segments += [segment] if segment.chunk is None else with_runs(layout, segment, runs, fetch)
    return replace(layout, segments=tuple(segments))


def reuse_in_chunks(
    layout: Layout, fetch: Fetch, finder: RunFinder, token_saves_s: float | None, seam: int = 0
) -> Layout:
    """The layout with runs of stored chunks in place of missing chunks.

    token_saves_s: seconds that a donor's token saves; None: fetch every donor. Runs of a donor that cannot be read are
    looked for in the other donors. seam: of the model.
    """
    chunks = layout.prompt.chunks
    missing = {s.chunk: chunks[s.chunk].ids for s in layout.segments if s.chunk is not None and s.miss}
    if not missing:
        return layout
    equal = finder.in_chunks(missing, seam)
    errors = {i: dict[ChunkKey, str]() for i in missing}
    lost = set[ChunkKey]()
    while True:
        runs = {i: choose_runs(found, MIN_RUN, lost, seam=seam) for i, found in equal.items()}
        fetch.extend(_requests((run for found in runs.values() for run in found), token_saves_s))
        new = {run.donor for found in runs.values() for run in found if run.donor not in fetch.views}
        if not new:
            break
        lost |= new
        for i, found in runs.items():
            errors[i] |= {run.donor: _reason(fetch, run.donor) for run in found if run.donor in new}
    segments = list[Segment]()
    for segment in layout.segments:
        chosen = runs.get(segment.chunk, ()) if segment.chunk is not None else ()
        segments += with_runs(layout, segment, chosen, fetch)
    why = {i: "; ".join(reasons.values()) for i, reasons in errors.items()}
    return replace(layout, segments=tuple(segments), donor_errors=why)


def _reason(fetch: Fetch, donor: ChunkKey) -> str:
    """Why a donor could not be read."""
    miss = fetch.misses[donor]
    return f"it is damaged ({miss.detail})" if miss.kind == "corrupt" else miss.detail


def _moved(run: Run, by: int) -> Run:
    return run._replace(span=Span(run.span.start + by, run.span.stop + by))
