"""Chunks learnt from traffic: text that a second plain prompt repeats behind other text.

    earlier prompt   | head | A | B | C | question |
    this prompt      | head | D | B | E | another  |      B: a chunk from now on     head: the prefix cache's, exact there

A segment ends where two prompts part, so it is a passage, whatever its client puts around it. Its KV is computed alone,
as that of any chunk, in the background. What was seen once is never stored, nor is what the assistant wrote, nor KV out
of a request. A scope's prompts are compared only with each other, and its chunks are found only in its prompts.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from blendserve.blend.precompute import ChunkWriter
from blendserve.blend.runs import WORK, equal_runs
from blendserve.core import Prompt, Span, TokenIds
from blendserve.errors import StoreError
from blendserve.store import ChunkKey
from blendserve.store.spans import SpanIndex

LEAST = 64  # tokens of a segment: fewer have too little context of their own
MOST = 1024  # tokens of a segment; a longer one is cut at the end of a line
RECENT_TOKENS = 1 << 20  # of the earlier prompts of a scope
TOKENS_PER_S = 1000.0  # that are learnt in a namespace
BURST_S = 60.0  # of that rate, at once


class LearntChunks:
    """The chunks learnt in a namespace: at most `cap_bytes`; the least recently found one is deleted first."""

    def __init__(self, cap_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.cap_bytes = cap_bytes
        self._clock = clock
        self._spent_until = 0.0
        self._bytes: OrderedDict[ChunkKey, int] | None = None  # None: the store was not asked yet
        self.n_bytes = 0  # of them all, as stored, about

    def found(self, keys: Sequence[ChunkKey]) -> None:
        """They were in a prompt."""
        for key in keys:
            if self._bytes and key in self._bytes:
                self._bytes.move_to_end(key)

    def admits(self, ids: TokenIds, writer: ChunkWriter) -> bool:
        """Count a chunk that is to be stored by this writer, and delete others for it -> False: it is not learnt."""
        key = writer.key(ids)
        n_bytes = writer.expected_bytes(len(ids))
        if self._bytes is None:
            self._bytes = OrderedDict(writer.stored_bytes())
            self.n_bytes = sum(self._bytes.values())
        is_stored = key in self._bytes and not writer.missing([ids])  # else the store has evicted it
        now = self._clock()
        self._spent_until = max(self._spent_until, now)
        if is_stored or n_bytes > self.cap_bytes or self._spent_until > now + BURST_S:
            return False
        before = self._bytes.get(key, 0)
        gone = self._oldest(key, self.n_bytes - before + n_bytes - self.cap_bytes)
        try:
            if gone:
                writer.delete_keys(gone, wait=False)
        except StoreError:  # the store cannot be written now, and has logged why
            return False
        for old in (key, *gone):
            self.n_bytes -= self._bytes.pop(old, 0)
        self._spent_until += len(ids) / TOKENS_PER_S
        self.n_bytes += n_bytes
        self._bytes[key] = n_bytes
        return True

    def _oldest(self, spare: ChunkKey, n_bytes: int) -> list[ChunkKey]:
        """The least recently found chunks except `spare` that have this many bytes together, or all."""
        found = list[ChunkKey]()
        for key, size in (self._bytes or {}).items():
            if n_bytes <= 0:
                break
            if key != spare:
                found.append(key)
                n_bytes -= size
        return found


class Learner:
    """The recent prompts of one scope. For one thread."""

    def __init__(self, ends_line: Callable[[int], bool], recent_tokens: int = RECENT_TOKENS) -> None:
        """ends_line: whether the text of a token ends a line."""
        self._ends_line = ends_line
        self._recent_tokens = recent_tokens
        self._index = SpanIndex()
        self._prompts: dict[ChunkKey, np.ndarray] = {}  # ids by number, the latest last
        self._n_seen = 0
        self.n_tokens = 0  # of the recent prompts

    def see(self, prompt: Prompt, start: int) -> list[TokenIds]:
        """The segments of a prompt that earlier ones have behind other text, the shortest first; then it is one of those.

        start: of what the prefix cache did not have. What stored chunks were found in is left out.
        """
        ids = np.asarray(prompt.ids, np.int64)
        found = list[Span]()
        for gap in _gaps(prompt, start):
            text = ids[gap.start : gap.stop]
            hits = self._index.find(text)
            donors = {key: self._prompts[key] for key in dict.fromkeys(hit.key for hit in hits)}
            runs, _ = equal_runs(text, hits, donors, self._index, LEAST, WORK * len(text))
            for run in runs:
                at = gap.start + run.span.start
                is_beginning = run.offset == at and np.array_equal(donors[run.donor][:at], ids[:at])
                if not is_beginning:
                    found += self._pieces(prompt.ids, at, at + len(run.span))
        self._remember(ids)
        return list(dict.fromkeys(prompt.ids[s.start : s.stop] for s in sorted(set(found), key=len)))

    def _pieces(self, ids: TokenIds, start: int, stop: int) -> Iterator[Span]:
        while stop - start > MOST:
            ends = range(start + MOST, start + MOST // 2, -1)
            end = next((end for end in ends if self._ends_line(ids[end - 1])), start + MOST)
            yield Span(start, end)
            start = end
        if stop - start >= LEAST:
            yield Span(start, stop)

    def _remember(self, ids: np.ndarray) -> None:
        self._n_seen += 1
        key = self._n_seen.to_bytes(8, "big")
        self._prompts[key] = ids.astype(np.int32)
        self._index.add([(key, self._index.anchors(ids))])
        self.n_tokens += len(ids)
        forgotten = list[ChunkKey]()
        for old, prompt in self._prompts.items():
            if self.n_tokens <= self._recent_tokens:
                break
            forgotten.append(old)
            self.n_tokens -= len(prompt)
        for old in forgotten:
            del self._prompts[old]
        self._index.discard(forgotten)


def _gaps(prompt: Prompt, start: int) -> Iterator[Span]:
    """The client's own texts from a position on, without what stored chunks were found in."""
    for text in prompt.texts:
        at = max(text.start, start)
        for run in prompt.runs:
            if run.span.stop > at and run.span.start < text.stop:
                yield from _long(Span(at, min(run.span.start, text.stop)))
                at = run.span.stop
        yield from _long(Span(at, text.stop))


def _long(span: Span) -> Iterator[Span]:
    if span.stop - span.start >= LEAST:
        yield span
