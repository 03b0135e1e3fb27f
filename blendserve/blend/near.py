"""Near-duplicates: a chunk that is not stored may share text with stored ones (an edited page, boilerplate).

    the chunk         | a a a a a a a | x x | a a a a a a a a a a | b b b b b b |        x: in no donor
    donors                 a a a a a a a y a a a a a a a a a a        b b b b b b        y: what x was
    starts from       | reused        | fresh        | reused     | fr.  | reused |

Only tokens with equal ids are reused, in runs of at least MIN_RUN, from anywhere in stored chunks. All others are fresh,
in the same prefill, so a changed number, name or "not" is never read from the old text. A donor's tokens may have
attended to other text before the run, so the first CONTEXT_MARGIN tokens of a run are fresh as well, unless the run
starts its donor. Policies and corrections treat reused tokens like those of any chunk.

A donor has the same model, context, dtype and namespace: it is one only if its tokens give its own key.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import NamedTuple

from blendserve.blend.keys import ChunkKeys
from blendserve.blend.layout import Layout, Segment
from blendserve.core import Span, TokenIds
from blendserve.errors import StoreError
from blendserve.fetch.fetcher import Fetch
from blendserve.fetch.incoming import ChunkRequest
from blendserve.fetch.tiered import stores_of
from blendserve.store import ChunkKey, KVStore
from blendserve.store.base import Miss
from blendserve.store.shingles import NearIndex, fingerprints

MIN_RUN = 16  # reused tokens of a run
CONTEXT_MARGIN = 8  # tokens of a run before those
MAX_DONORS = 4  # of one chunk
PAIRS_PER_TOKEN = 256  # equal pairs of a chunk's and a donor's tokens to compare, for each token of the chunk
IDS_PER_READ = 256  # chunks whose tokens are read at a time: some 300 KB of headers in a round trip
FIRST_WAIT_S = 0.5  # for an index that is being built: enough for some thousand chunks
REFRESH_S = 300.0  # until chunks that other processes store are found

Available = Callable[[Mapping[ChunkKey, int]], Collection[ChunkKey]]
"""donors by key, with their numbers of tokens -> the readable ones"""

log = logging.getLogger(__name__)


class Run(NamedTuple):
    """Tokens that a chunk has in common with a stored one."""

    span: Span  # in the chunk
    donor: ChunkKey
    offset: int  # where they start in the donor


class NearMatch(NamedTuple):
    """What stored chunks have of one chunk."""

    runs: tuple[Run, ...]  # ascending
    unavailable: tuple[ChunkKey, ...]  # donors that could not be read


class NearDuplicates:
    """Finds text of a chunk in the stored chunks of one namespace. Thread-safe.

    A thread of its own builds the index from the store when it is first asked for. The index is a hint: what is read is
    what a request's snapshot has.
    """

    def __init__(self, store: KVStore, key: ChunkKeys) -> None:
        self._store, self._key = store, key
        self.index = NearIndex()
        self._not_donors: set[ChunkKey] = set()  # stored chunks of other contexts
        self._next_refresh = 0.0  # 0: the index is not used yet
        self._lock = threading.Lock()

    def find(self, chunks: Mapping[int, TokenIds], available: Available) -> dict[int, NearMatch]:
        """Runs of stored chunks for each of these chunks. Raises StoreError.

        The tokens of all donors are read at once, and then their KV; a run of a donor that is not available may be found
        in another one.
        """
        self._keep_up()
        near = {i: self.index.find(fingerprints(ids), MAX_DONORS) for i, ids in chunks.items()}
        donors = self._donors(dict.fromkeys(key for keys in near.values() for key in keys))
        readable = set[ChunkKey]()
        unavailable: dict[int, tuple[ChunkKey, ...]] = dict.fromkeys(chunks, ())
        while True:
            runs = {
                i: _runs(ids, {key: donors[key] for key in near[i] if key in donors})
                for i, ids in chunks.items()
            }
            asked = {run.donor: len(donors[run.donor]) for found in runs.values() for run in found}
            asked = {key: n for key, n in asked.items() if key not in readable}
            readable |= set(available(asked)) if asked else set()
            gone = asked.keys() - readable
            if not gone:
                return {i: NearMatch(tuple(found), unavailable[i]) for i, found in runs.items()}
            for i, found in runs.items():
                unavailable[i] += tuple(dict.fromkeys(run.donor for run in found if run.donor in gone))
            for key in gone:
                del donors[key]

    def add(self, ids: TokenIds) -> None:
        """This process has stored a chunk."""
        if self._next_refresh:
            self.index.add([(self._key(ids), fingerprints(ids))])

    def refresh(self) -> None:
        """Make the index that of the store as it is now. Chunks that cannot be listed or read stay as they are."""
        self._next_refresh = time.monotonic() + REFRESH_S
        before = self.index.keys  # chunks that are added from here on may not be listed, and stay
        stored, is_whole = self._stored_keys()
        if is_whole:
            self.index.discard(before - stored)
            self._not_donors &= stored
        new = sorted(stored - self.index.keys - self._not_donors)
        for some in (new[at : at + IDS_PER_READ] for at in range(0, len(new), IDS_PER_READ)):
            found, is_whole = self._token_ids(some)
            donors = {key: ids for key, ids in found.items() if self._key(ids) == key}
            self.index.add((key, fingerprints(ids)) for key, ids in donors.items())
            self._not_donors |= set(some if is_whole else found) - donors.keys()

    def _donors(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, TokenIds]:
        """The tokens of these chunks, if they are stored and donors."""
        asked = list(keys)
        stored, is_whole = self._token_ids(asked)
        if is_whole:  # else some may be stored where they cannot be asked for
            self.index.discard(key for key in asked if key not in stored)
        return {key: ids for key, ids in stored.items() if self._key(ids) == key}

    def _token_ids(self, keys: Sequence[ChunkKey]) -> tuple[dict[ChunkKey, TokenIds], bool]:
        """The tokens of stored chunks, and whether every store answered."""
        found, is_whole = dict[ChunkKey, TokenIds](), True
        for store in stores_of(self._store):
            try:
                for at in range(0, len(keys), IDS_PER_READ):
                    some = [key for key in keys[at : at + IDS_PER_READ] if key not in found]
                    infos = store.describe(some) if some else {}
                    found |= {key: info.token_ids for key, info in infos.items() if info.token_ids}
            except StoreError as error:
                log.debug("some chunks are not searched for near-duplicates, as %s", error)
                is_whole = False
        return found, is_whole

    def _stored_keys(self) -> tuple[set[ChunkKey], bool]:
        """The chunks of the namespace, and whether every store answered."""
        found, is_whole = set[ChunkKey](), True
        for store in stores_of(self._store):
            try:
                found.update(store.keys(self._key.namespace))
            except StoreError as error:
                log.debug("some chunks are not searched for near-duplicates, as %s", error)
                is_whole = False
        return found, is_whole

    def _keep_up(self) -> None:
        """Refresh in the background when that is due; the first caller waits a moment for the index."""
        now = time.monotonic()
        with self._lock:
            is_first, is_due = not self._next_refresh, now >= self._next_refresh
            if is_due:
                self._next_refresh = now + REFRESH_S
        if is_due:
            thread = threading.Thread(target=self.refresh, name="blendserve-near", daemon=True)
            thread.start()
            if is_first:
                thread.join(FIRST_WAIT_S)


def _runs(ids: TokenIds, donors: Mapping[ChunkKey, TokenIds]) -> list[Run]:
    """Runs of these donors in a chunk, ascending; a later donor gets what earlier ones leave."""
    left, runs = [Span(0, len(ids))], list[Run]()
    for key, donor in donors.items():
        found, left = matching_runs(ids, donor, left)
        runs += [Run(span, key, offset) for span, offset in found]
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


def reuse_near(
    layout: Layout, fetch: Fetch, near: NearDuplicates, n_layers: int, token_saves_s: float | None
) -> Layout:
    """The layout with runs of stored chunks in place of missing chunks. Raises StoreError.

    token_saves_s: seconds that a donor's token saves; None: fetch every donor.
    """

    def available(donors: Mapping[ChunkKey, int]) -> list[ChunkKey]:
        token_s = token_saves_s
        fetch.extend(
            [ChunkRequest(key, n, None if token_s is None else n * token_s) for key, n in donors.items()]
        )
        views = {key: fetch.views.get(key) for key in donors}
        return [key for key, view in views.items() if view and view.n_layers == n_layers]

    chunks = layout.prompt.chunks
    missing = {s.chunk: chunks[s.chunk].ids for s in layout.segments if s.chunk is not None and s.miss}
    matches = near.find(missing, available) if missing else {}
    segments = list[Segment]()
    for segment in layout.segments:
        match = matches.get(segment.chunk) if segment.chunk is not None else None
        segments += _with_runs(layout, segment, match.runs, fetch) if match else [segment]
    why = {
        i: "; ".join(_reason(fetch.misses.get(key)) for key in match.unavailable)
        for i, match in matches.items()
    }
    return replace(layout, segments=tuple(segments), donor_errors=why)


def _with_runs(layout: Layout, missing: Segment, runs: Sequence[Run], fetch: Fetch) -> Iterator[Segment]:
    """A missing chunk as runs of stored chunks, and the fresh tokens between them."""
    start, done = missing.span.start, missing.span.start
    for span, donor, offset in runs:
        at = Span(start + span.start, start + span.stop)
        if done < at.start:
            yield replace(missing, span=Span(done, at.start))
        state = layout.state_at(at.start, offset)
        yield replace(missing, span=at, state=state, view=fetch.views[donor], offset=offset, donor=donor)
        done = at.stop
    if done < missing.span.stop:
        yield replace(missing, span=Span(done, missing.span.stop))


def _reason(miss: Miss | None) -> str:
    if miss is None:
        return "it has gone"
    return f"it is damaged ({miss.detail})" if miss.kind == "corrupt" else miss.detail
