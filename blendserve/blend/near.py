"""A chunk that is not stored may be nearly there: an edited page, another cut of the same document, boilerplate.

    the chunk         | a a a a a a a | x x | a a a a a a a a a a | b b b b b b |        x: in no donor
    donors                 a a a a a a a y a a a a a a a a a a        b b b b b b        y: what x was
    starts from       | reused        | fresh        | reused     | fr.  | reused |

Only tokens whose ids are equal are reused, in runs of LEAST at least, from anywhere in some stored chunks; all others are
fresh, in the same prefill. So a number, a name or a "not" that was changed is never read from what was there before.
What a donor's tokens have read before them may be another text, though: the first MARGIN of a run, the nearest to it, are
fresh as well, but where a run starts a donor and has read nothing else. What is reused is selected and corrected like any
chunk.

A donor is one of the same reader, prefix, dtype and namespace: a chunk's key is a hash of all of those and of its tokens,
so one whose tokens do not give its own key is none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from blendserve.blend.layout import Run
from blendserve.core import Span, TokenIds
from blendserve.errors import StoreError
from blendserve.store import ChunkKey, ChunkView, KVStore
from blendserve.store.near import NearIndex, fingerprints

LEAST = 16  # tokens of a run that are reused
MARGIN = 8  # of a run, before those
DONORS = 4  # of one chunk
BATCH = 1024  # chunks whose tokens are read at a time
FIRST_WAIT_S = 0.5  # for an index that is being made: enough for some thousand chunks
REFRESH_S = 300.0  # what other processes have stored is seen this late

log = logging.getLogger(__name__)


class Match(NamedTuple):
    """Tokens that a chunk has in common with a donor."""

    span: Span  # in the chunk
    at: int  # where they start in the donor


class Donors:
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

    def find(
        self,
        ids: TokenIds,
        view_of: Callable[[ChunkKey, int], ChunkView | None],
        damaged: Collection[ChunkKey],
    ) -> tuple[Run, ...]:
        """What stored chunks have of this one, ascending.

        view_of: a donor by its key and number of tokens, None where it cannot be used. Raises StoreError.
        """
        self._keep_up()
        runs: list[Run] = []
        left = [Span(0, len(ids))]
        keys = [key for key in self.index.find(fingerprints(ids), DONORS) if key not in damaged]
        there = self._tokens(keys)
        self.index.discard(key for key in keys if key not in there)
        for key in keys:
            donor = there.get(key)
            if donor and self._key_of(donor) == key and (view := view_of(key, len(donor))):
                found, left = matches(ids, donor, left)
                runs += [Run(span, view, at, key) for span, at in found]
        return tuple(sorted(runs, key=lambda run: run.span.start))

    def _tokens(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, TokenIds]:
        """What the store tells now; nothing where it cannot be read, though another one behind it may be."""
        try:
            return dict(self._store.ids(keys))
        except StoreError:
            return {}

    def stored(self, ids: TokenIds) -> None:
        """This process has stored a chunk."""
        if self._next:
            self.index.add([(self._key_of(ids), fingerprints(ids))])

    def refresh(self) -> None:
        """Take over what the store holds now. A store that cannot be read tells of no donors."""
        self._next = time.monotonic() + REFRESH_S
        try:
            there = set(self._store.keys(self._namespace))
            self.index.discard(self.index.keys - there)
            self._others &= there
            new = sorted(there - self.index.keys - self._others)
            for at in range(0, len(new), BATCH):
                keys = new[at : at + BATCH]
                mine = [(key, ids) for key, ids in self._store.ids(keys) if self._key_of(ids) == key]
                self.index.add((key, fingerprints(ids)) for key, ids in mine)
                self._others.update(set(keys) - {key for key, _ in mine})
        except StoreError as error:
            log.warning("near-duplicates of stored chunks are not looked for, as %s", error)

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


def matches(ids: TokenIds, donor: TokenIds, left: Sequence[Span]) -> tuple[list[Match], list[Span]]:
    """What these stretches of a chunk have in common with a donor, the longest runs first, and what is left of them."""
    matcher = SequenceMatcher(None, ids, donor, autojunk=False)
    todo, found, rest = list(left), list[Match](), list[Span]()
    while todo:
        gap = todo.pop()
        a, b, n = matcher.find_longest_match(gap.start, gap.stop)
        fresh = _margin(ids, donor, a, b)
        if n < LEAST + fresh:
            rest.append(gap)
            continue
        found.append(Match(Span(a + fresh, a + n), b + fresh))
        around = Span(gap.start, a + fresh), Span(a + n, gap.stop)
        todo += [span for span in around if len(span) >= LEAST]
    return found, rest


def _margin(ids: TokenIds, donor: TokenIds, a: int, b: int) -> int:
    """How many tokens of a run are left fresh that starts at token a of the chunk and b of the donor."""
    context = len(list(_equal_before(ids, donor, a, b)))
    return 0 if context == b else MARGIN - context


def _equal_before(ids: TokenIds, donor: TokenIds, a: int, b: int) -> Iterator[int]:
    """Tokens in front of both that are equal, the nearest first, at most MARGIN."""
    for n in range(1, min(a, b, MARGIN) + 1):
        if ids[a - n] != donor[b - n]:
            return
        yield n
