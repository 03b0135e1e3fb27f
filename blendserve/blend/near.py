"""Near-duplicates: a chunk that is not stored may share text with stored ones (an edited page, boilerplate).

    the chunk         | a a a a a a a | x x | a a a a a a a a a a | b b b b b b |        x: in no donor
    donors                 a a a a a a a y a a a a a a a a a a        b b b b b b        y: what x was
    starts from       | reused        | fresh        | reused     | fr.  | reused |

Only tokens with equal ids are reused, in runs of at least MIN_RUN, from anywhere in stored chunks. All others are fresh,
in the same prefill, so a changed number, name or "not" is never read from the old text. A donor's tokens may have
attended to other text before the run, so the first CONTEXT_MARGIN tokens of a run are fresh as well, unless the run
starts its donor. Policies and corrections treat reused tokens like those of any chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from blendserve.blend.chunk_kv import ChunkKeys
from blendserve.blend.donors import DonorIndex
from blendserve.blend.layout import Layout, Segment, with_runs
from blendserve.blend.match import WORK, best_cover
from blendserve.core import Run, Span, TokenIds
from blendserve.fetch.fetcher import Fetch
from blendserve.fetch.incoming import ChunkRequest
from blendserve.store import ChunkKey, KVStore
from blendserve.store.spans import Hit, SpanIndex, Tokens

STRIDE = 16  # tokens from anchor to anchor, and of each
SURE = 2 * STRIDE - 1  # tokens of a run that has an anchor for certain
MIN_RUN = 16  # reused tokens of a run
CONTEXT_MARGIN = 8  # tokens of a run before those
MAX_DONORS = 4  # of one chunk


class NearDuplicates(DonorIndex):
    """Finds stored chunks of one namespace that share text with a chunk. Thread-safe."""

    def __init__(self, store: KVStore, key: ChunkKeys) -> None:
        self.index = SpanIndex(STRIDE, STRIDE)
        super().__init__(store, key, self.index, self.index.anchors)

    def find(self, chunks: Mapping[int, TokenIds]) -> dict[int, list[Run]]:
        """The runs that each of these chunks has in common with at most MAX_DONORS stored ones."""
        self.refresh_if_due()
        tokens = {i: np.asarray(ids, np.int64) for i, ids in chunks.items()}
        hits = {i: self.index.find(ids) for i, ids in tokens.items()}
        keys = {i: best_donors(found) for i, found in hits.items()}
        asked = list(dict.fromkeys(key for found in keys.values() for key in found))
        donors = self.read(asked) if asked else {}
        return {
            i: equal_runs(ids, hits[i], {key: donors[key] for key in keys[i] if key in donors}, self.index)
            for i, ids in tokens.items()
        }


def best_donors(hits: Iterable[Hit], most: int = MAX_DONORS) -> list[ChunkKey]:
    """First the chunk with most anchors in a text, then the one with most of the rest, and so on."""
    at: dict[int, list[ChunkKey]] = {}
    for hit in hits:
        at.setdefault(hit.place, []).append(hit.key)
    left, found = [*at.values()], list[ChunkKey]()
    while left and len(found) < most:
        counts = Counter(key for keys in left for key in keys)
        found.append(max(counts, key=counts.__getitem__))
        left = [keys for keys in left if found[-1] not in keys]
    return found


def equal_runs(
    ids: Tokens, hits: Sequence[Hit], donors: Mapping[ChunkKey, TokenIds | Tokens], index: SpanIndex
) -> list[Run]:
    """Every run of at least MIN_RUN tokens of a donor in a text, at the shifts that hits show.

    Text that repeats itself over and over has many shifts; they are given up when WORK is done.
    """
    tokens, left = {key: np.asarray(donor, np.int64) for key, donor in donors.items()}, WORK * len(ids)
    places = {key: index.places(donor) for key, donor in tokens.items()}
    found = [(hit, at) for hit in hits if hit.key in places for at in places[hit.key].get(hit.hash, ())]
    shifts = dict.fromkeys((hit.key, hit.place - at) for hit, at in found)
    runs = list[Run]()
    for key, start in shifts:
        donor = tokens[key]
        first, last = max(0, -start), min(len(donor), len(ids) - start)
        left -= last - first
        if left < 0:
            break
        differs = np.flatnonzero(ids[start + first : start + last] != donor[first:last]) + first
        edges = [first - 1, *differs.tolist(), last]
        for before, after in pairwise(edges):
            if after - before > MIN_RUN:
                span = Span(start + before + 1, start + after)
                runs.append(Run(span, key, before + 1, len(donor) - after))
    return runs


def choose_runs(runs: Iterable[Run], lost: Collection[ChunkKey] = ()) -> tuple[Run, ...]:
    """The reused ones of equal runs: the ones that cover most, without their margins."""
    left = (_behind_margin(run) for run in runs if run.donor not in lost)
    return best_cover((run for run in left if len(run.span) >= MIN_RUN), MIN_RUN)


def _behind_margin(run: Run) -> Run:
    """The run without the tokens that may have attended to other text right before them."""
    n = min(CONTEXT_MARGIN, len(run.span)) if run.offset else 0
    return run._replace(span=Span(run.span.start + n, run.span.stop), offset=run.offset + n)


def reuse_near(layout: Layout, fetch: Fetch, near: NearDuplicates, token_saves_s: float | None) -> Layout:
    """The layout with runs of stored chunks in place of missing chunks.

    token_saves_s: seconds that a donor's token saves; None: fetch every donor. Runs of a donor that cannot be read are
    looked for in the chunk's other donors.
    """
    chunks = layout.prompt.chunks
    missing = {s.chunk: chunks[s.chunk].ids for s in layout.segments if s.chunk is not None and s.miss}
    if not missing:
        return layout
    equal, errors, lost = near.find(missing), {i: dict[ChunkKey, str]() for i in missing}, set[ChunkKey]()
    while True:
        runs = {i: choose_runs(found, lost) for i, found in equal.items()}
        used = {run.donor: run.n_donor for found in runs.values() for run in found}
        fetch.extend([ChunkRequest(key, n, token_saves_s and n * token_saves_s) for key, n in used.items()])
        new = {key for key in used if key not in fetch.views}
        if not new:
            break
        lost |= new
        for i, found in runs.items():
            errors[i] |= {run.donor: _reason(fetch, run.donor) for run in found if run.donor in new}
    segments = list[Segment]()
    for segment in layout.segments:
        found = runs.get(segment.chunk, ()) if segment.chunk is not None else ()
        segments += with_runs(layout, segment, found, fetch)
    why = {i: "; ".join(found.values()) for i, found in errors.items()}
    return replace(layout, segments=tuple(segments), donor_errors=why)


def _reason(fetch: Fetch, donor: ChunkKey) -> str:
    """Why a donor could not be read."""
    miss = fetch.misses[donor]
    return f"it is damaged ({miss.detail})" if miss.kind == "corrupt" else miss.detail
