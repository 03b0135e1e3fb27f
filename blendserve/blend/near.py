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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from blendserve.blend.chunk_kv import ChunkKeys
from blendserve.blend.donors import DonorIndex, Donors
from blendserve.blend.layout import Layout, Segment, usable_view, with_runs
from blendserve.core import Run, Span, TokenIds
from blendserve.fetch.fetcher import Fetch
from blendserve.fetch.incoming import ChunkRequest
from blendserve.store import ChunkKey, KVStore
from blendserve.store.shingles import NearIndex, fingerprints

MIN_RUN = 16  # reused tokens of a run
CONTEXT_MARGIN = 8  # tokens of a run before those
MAX_DONORS = 4  # of one chunk
PAIRS_PER_TOKEN = 256  # equal pairs of a chunk's and a donor's tokens to compare, for each token of the chunk


class NearDuplicates(DonorIndex):
    """Finds stored chunks of one namespace that share text with a chunk. Thread-safe."""

    def __init__(self, store: KVStore, key: ChunkKeys) -> None:
        self.index = NearIndex()
        super().__init__(store, key, self.index, fingerprints)

    def donors(self, chunks: Mapping[int, TokenIds]) -> dict[int, Donors]:
        """For each of these chunks, stored chunks that share text with it, the best first, with their tokens."""
        self.refresh_if_due()
        near = {i: self.index.find(fingerprints(ids), MAX_DONORS) for i, ids in chunks.items()}
        donors = self.read(list(dict.fromkeys(key for keys in near.values() for key in keys)))
        return {i: {key: donors[key] for key in keys if key in donors} for i, keys in near.items()}


def reuse_near(
    layout: Layout, fetch: Fetch, near: NearDuplicates, n_layers: int, token_saves_s: float | None
) -> Layout:
    """The layout with runs of stored chunks in place of missing chunks.

    token_saves_s: seconds that a donor's token saves; None: fetch every donor. Runs of a donor that cannot be read are
    looked for in the chunk's other donors.
    """
    chunks = layout.prompt.chunks
    missing = {s.chunk: chunks[s.chunk].ids for s in layout.segments if s.chunk is not None and s.miss}
    if not missing:
        return layout
    donors, errors = near.donors(missing), {i: dict[ChunkKey, str]() for i in missing}
    while True:
        runs = {i: find_runs(ids, donors[i]) for i, ids in missing.items()}
        used = {run.donor: len(donors[i][run.donor]) for i, found in runs.items() for run in found}
        fetch.extend([ChunkRequest(key, n, token_saves_s and n * token_saves_s) for key, n in used.items()])
        lost = {key for key in used if usable_view(fetch, key, n_layers) is None}
        if not lost:
            break
        for i, found in runs.items():
            errors[i] |= {run.donor: _reason(fetch, run.donor) for run in found if run.donor in lost}
            donors[i] = {key: ids for key, ids in donors[i].items() if key not in lost}
    segments = list[Segment]()
    for segment in layout.segments:
        found = runs.get(segment.chunk, []) if segment.chunk is not None else []
        segments += with_runs(layout, segment, found, fetch)
    why = {i: "; ".join(found.values()) for i, found in errors.items()}
    return replace(layout, segments=tuple(segments), donor_errors=why)


def find_runs(ids: TokenIds, donors: Mapping[ChunkKey, TokenIds]) -> list[Run]:
    """Runs of these donors in a chunk, ascending; a later donor gets what earlier ones leave."""
    left, runs = [Span(0, len(ids))], list[Run]()
    for key, donor in donors.items():
        found, left = matching_runs(ids, donor, left)
        runs += [Run(span, key, offset, len(donor) - offset - len(span)) for span, offset in found]
    return sorted(runs, key=lambda run: run.span.start)


def matching_runs(
    ids: TokenIds, donor: TokenIds, left: Sequence[Span]
) -> tuple[list[tuple[Span, int]], list[Span]]:
    """Runs of a donor in these stretches of a chunk, with their offsets in the donor; and the stretches that are left.

    The longest runs come first. Text that repeats itself over and over is given up after PAIRS_PER_TOKEN; other text does
    not come near that.
    """
    matcher = SequenceMatcher(None, ids, donor, autojunk=False)
    n_equal, work = Counter(donor), PAIRS_PER_TOKEN * len(ids)
    todo, found, rest = list(left), list[tuple[Span, int]](), list[Span]()
    while todo:
        gap = todo.pop()
        work -= sum(n_equal[i] for i in ids[gap.start : gap.stop])
        if len(gap) < MIN_RUN or work < 0:
            rest.append(gap)
            continue
        a, b, n = matcher.find_longest_match(gap.start, gap.stop)
        margin = _margin(ids, donor, a, b)
        if n < MIN_RUN + margin:
            rest.append(gap)
            continue
        found.append((Span(a + margin, a + n), b + margin))
        todo += [Span(gap.start, a + margin), Span(a + n, gap.stop)]
    return found, rest


def _margin(ids: TokenIds, donor: TokenIds, a: int, b: int) -> int:
    """Fresh tokens at the start of a run, which begins at token a of the chunk and b of the donor."""
    n = 0  # equal tokens before both
    while n < min(a, b, CONTEXT_MARGIN) and ids[a - n - 1] == donor[b - n - 1]:
        n += 1
    return 0 if n == b else CONTEXT_MARGIN - n


def _reason(fetch: Fetch, donor: ChunkKey) -> str:
    """Why a donor could not be read."""
    miss = fetch.misses[donor]
    return f"it is damaged ({miss.detail})" if miss.kind == "corrupt" else miss.detail
