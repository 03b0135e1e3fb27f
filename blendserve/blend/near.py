"""A chunk that is not stored may be nearly there: an edited page, another cut of the same document, boilerplate.

    the chunk         | a a a a a a a | x x | a a a a a a a a a a | b b b b b b |        x: in no donor
    donors                 a a a a a a a y a a a a a a a a a a        b b b b b b        y: what x was
    starts from       | reused        | fresh        | reused     | fr.  | reused |

Only tokens with equal ids are reused, in runs of at least MIN_RUN, from anywhere in stored chunks. All others are fresh,
in the same prefill, so a changed number, name or "not" is never read from the old text. A donor's tokens may have
attended to another text before the run, so the first CONTEXT_MARGIN tokens of a run are fresh as well, except where the
run starts its donor. Policies and corrections treat reused tokens like those of any chunk.

A donor is one of the same reader, prefix, dtype and namespace: a chunk's key is a hash of all of those and of its tokens,
so one whose tokens do not give its own key is none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import NamedTuple, TypeVar

from blendserve.blend.layout import Layout, Segment
from blendserve.core import Span, TokenIds
from blendserve.errors import StoreError
from blendserve.fetch.fetcher import ChunkRequest, Fetch
from blendserve.store import ChunkKey, KVStore
from blendserve.store.base import Miss
from blendserve.store.shingles import NearIndex, fingerprints
from blendserve.store.view import ChunkView

MIN_RUN = 16  # tokens of a run that are reused
CONTEXT_MARGIN = 8  # of a run, before those
MAX_DONORS = 4  # of one chunk
PAIRS_PER_TOKEN = (
    256  # pairs of equal tokens, of a chunk and a donor, that are looked at for each of the chunk's tokens
)
IDS_PER_READ = 1024  # chunks whose tokens are read at a time
FIRST_WAIT_S = 0.5  # for an index that is being made: enough for some thousand chunks
REFRESH_S = 300.0  # what other processes have stored is seen this late

T = TypeVar("T")
Views = Callable[[Mapping[ChunkKey, int]], Mapping[ChunkKey, ChunkView]]
"""donors by key, with their numbers of tokens -> those that can be used"""

log = logging.getLogger(__name__)


class Match(NamedTuple):
    """Tokens that a chunk has in common with a donor."""

    span: Span  # in the chunk
    at: int  # where they start in the donor


class Run(NamedTuple):
    """Tokens that a chunk has in common with a stored one."""

    span: Span  # in the chunk
    view: ChunkView
    offset: int  # where they start in the stored chunk
    donor: ChunkKey


class NearMatch(NamedTuple):
    """What was found of a chunk."""

    runs: tuple[Run, ...]  # ascending
    unavailable: tuple[ChunkKey, ...]  # donors that could not be used


class NearDuplicates:
    """Which chunks of a store have text in common with one that is not there. Safe to share between threads.

    The index is made of what the store holds, in a thread of its own, when it is first asked for. It is a hint: what is
    read is what a snapshot has.
    """

    def __init__(self, store: KVStore, key_of: Callable[[TokenIds], ChunkKey], namespace: str) -> None:
        """key_of: the key that a donor with these tokens has; all are of this namespace."""
        self._store, self._key_of, self._namespace = store, key_of, namespace
        self.index = NearIndex()
        self._others: set[ChunkKey] = set()  # chunks of the namespace that are no donors
        self._next = 0.0  # when to look for what others stored
        self._lock = threading.Lock()

    def find(self, chunks: Mapping[int, TokenIds], views: Views) -> dict[int, NearMatch]:
        """What stored chunks have of each of these. Raises StoreError.

        However many chunks there are: their donors' tokens are asked for once, and then their KV.
        """
        self._keep_up()
        near = {i: self.index.find(fingerprints(ids), MAX_DONORS) for i, ids in chunks.items()}
        donors = self._donors(dict.fromkeys(key for keys in near.values() for key in keys))
        read: dict[ChunkKey, ChunkView] = {}
        unavailable: dict[int, tuple[ChunkKey, ...]] = dict.fromkeys(chunks, ())
        while True:
            found = {
                i: _runs(ids, {key: donors[key] for key in near[i] if key in donors})
                for i, ids in chunks.items()
            }
            used = {i: list(dict.fromkeys(key for key, _ in runs)) for i, runs in found.items()}
            asked = {key: len(donors[key]) for keys in used.values() for key in keys if key not in read}
            read |= views(asked) if asked else {}
            gone = asked.keys() - read.keys()
            if not gone:
                break
            for i, keys in used.items():
                unavailable[i] += tuple(key for key in keys if key in gone)
            for key in gone:  # what it would have given, others may
                del donors[key]
        return {i: NearMatch(_placed(runs, read), unavailable[i]) for i, runs in found.items()}

    def _donors(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, TokenIds]:
        """The tokens of those that are there and ours."""
        asked = list(keys)
        told, whole = _told(self._store.ids(asked)) if asked else ([], True)
        there = dict(told)
        if whole:  # else others may be there as well, behind what cannot be reached
            self.index.discard(key for key in asked if key not in there)
        return {key: ids for key, ids in there.items() if self._key_of(ids) == key}

    def stored(self, ids: TokenIds) -> None:
        """This process has stored a chunk."""
        if self._next:
            self.index.add([(self._key_of(ids), fingerprints(ids))])

    def refresh(self) -> None:
        """Take over what the store holds now. What cannot be reached is as it was, and asked for again next time."""
        self._next = time.monotonic() + REFRESH_S
        known = self.index.keys  # what is stored from here on may not be listed, and stays
        keys, whole = _told(self._store.donor_keys(self._namespace))
        there = set(keys)
        if whole:
            self.index.discard(known - there)
            self._others &= there
        new = sorted(there - self.index.keys - self._others)
        for some in (new[at : at + IDS_PER_READ] for at in range(0, len(new), IDS_PER_READ)):
            told, whole = _told(self._store.ids(some))
            mine = [(key, ids) for key, ids in told if self._key_of(ids) == key]
            self.index.add((key, fingerprints(ids)) for key, ids in mine)
            others = some if whole else [key for key, _ in told]
            self._others.update(set(others) - {key for key, _ in mine})

    def _keep_up(self) -> None:
        """Refresh now and then, behind the requests; the first one waits a moment for it."""
        now = time.monotonic()
        with self._lock:
            first, due = not self._next, now >= self._next
            if due:
                self._next = now + REFRESH_S
        if due:
            thread = threading.Thread(target=self.refresh, name="blendserve-near", daemon=True)
            thread.start()
            if first:
                thread.join(FIRST_WAIT_S)


def _told(items: Iterator[T]) -> tuple[list[T], bool]:
    """What a store tells, and whether that is all of it."""
    found: list[T] = []
    try:
        found.extend(items)  # one by one: those in front of a failure stay
    except StoreError as error:
        log.debug("some chunks are not looked at for near-duplicates, as %s", error)
        return found, False
    return found, True


def _placed(found: Sequence[tuple[ChunkKey, Match]], read: Mapping[ChunkKey, ChunkView]) -> tuple[Run, ...]:
    """Ascending."""
    runs = (Run(span, read[key], at, key) for key, (span, at) in found)
    return tuple(sorted(runs, key=lambda run: run.span.start))


def _runs(ids: TokenIds, donors: Mapping[ChunkKey, TokenIds]) -> list[tuple[ChunkKey, Match]]:
    """What these have of a chunk, each of what those before it have left."""
    left, runs = [Span(0, len(ids))], list[tuple[ChunkKey, Match]]()
    for key, donor in donors.items():
        found, left = matching_runs(ids, donor, left)
        runs += [(key, match) for match in found]
    return runs


def matching_runs(ids: TokenIds, donor: TokenIds, left: Sequence[Span]) -> tuple[list[Match], list[Span]]:
    """What these stretches of a chunk have in common with a donor, the longest runs first, and what is left of them.

    Text that repeats itself over and over is given up after PAIRS_PER_TOKEN; no other comes near that.
    """
    matcher = SequenceMatcher(None, ids, donor, autojunk=False)
    times, work = Counter(donor), PAIRS_PER_TOKEN * len(ids)
    todo, found, rest = list(left), list[Match](), list[Span]()
    while todo:
        gap = todo.pop()
        work -= sum(times[i] for i in ids[gap.start : gap.stop])
        if len(gap) < MIN_RUN or work < 0:
            rest.append(gap)
            continue
        a, b, n = matcher.find_longest_match(gap.start, gap.stop)
        fresh = _margin(ids, donor, a, b)
        if n < MIN_RUN + fresh:
            rest.append(gap)
            continue
        found.append(Match(Span(a + fresh, a + n), b + fresh))
        todo += [Span(gap.start, a + fresh), Span(a + n, gap.stop)]
    return found, rest


def _margin(ids: TokenIds, donor: TokenIds, a: int, b: int) -> int:
    """How many tokens of a run are left fresh that starts at token a of the chunk and b of the donor."""
    context = len(list(_equal_before(ids, donor, a, b)))
    return 0 if context == b else CONTEXT_MARGIN - context


def _equal_before(ids: TokenIds, donor: TokenIds, a: int, b: int) -> Iterator[int]:
    """Tokens in front of both that are equal, the nearest first, at most CONTEXT_MARGIN."""
    for n in range(1, min(a, b, CONTEXT_MARGIN) + 1):
        if ids[a - n] != donor[b - n]:
            return
        yield n


def reuse_near(
    layout: Layout, fetch: Fetch, near: NearDuplicates, n_layers: int, saved_s_per_token: float | None
) -> Layout:
    """The layout with the runs that stored chunks have of those that are missing. Raises StoreError.

    saved_s_per_token: seconds that a donor's token saves; None: fetch every donor.
    """
    errors: dict[ChunkKey, str] = {}

    def views(donors: Mapping[ChunkKey, int]) -> dict[ChunkKey, ChunkView]:
        per_token = saved_s_per_token
        fetch.extend(
            [ChunkRequest(k, n, None if per_token is None else n * per_token) for k, n in donors.items()]
        )
        errors.update({key: _reason(fetch.misses[key]) for key in donors if key in fetch.misses})
        found = {key: fetch.views[key] for key in donors if key in fetch.views}
        return {key: view for key, view in found.items() if view.n_layers == n_layers}

    chunks = layout.prompt.chunks
    missing = {s.chunk: chunks[s.chunk].ids for s in layout.segments if s.chunk is not None and s.miss}
    found = near.find(missing, views) if missing else {}
    segments = list[Segment]()
    for segment in layout.segments:
        runs = found[segment.chunk].runs if segment.chunk in found else ()
        segments += _with_runs(layout, segment, runs)
    why = {i: "; ".join(errors.get(key) or "it has gone" for key in x.unavailable) for i, x in found.items()}
    return replace(layout, segments=tuple(segments), donor_errors=why)


def _with_runs(layout: Layout, missing: Segment, runs: Sequence[Run]) -> Iterator[Segment]:
    """A missing chunk as runs of stored chunks, and the fresh tokens between them."""
    start, done = missing.span.start, missing.span.start
    for run in runs:
        at = Span(start + run.span.start, start + run.span.stop)
        if done < at.start:
            yield replace(missing, span=Span(done, at.start))
        state = layout.state_at(at.start, run.offset)
        yield replace(missing, span=at, state=state, view=run.view, offset=run.offset, donor=run.donor)
        done = at.stop
    if done < missing.span.stop:
        yield replace(missing, span=Span(done, missing.span.stop))


def _reason(miss: Miss) -> str:
    return f"it is damaged ({miss.detail})" if miss.kind == "corrupt" else miss.detail
