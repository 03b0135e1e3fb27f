"""The words of an index's passages in memory, and the search by them: it finds names, numbers and code.

BM25 (Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009), with the usual constants.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blendserve.retrieve.tables import Rows, read_words
from blendserve.retrieve.terms import hash_of, unpack, words_of

K1, B = 1.2, 0.75
# Words of questions. Some are rare in passages, so they would count too much.
_ASKING = (
    "what which who whom whose where when why how do does did is are was were can could should would "
    "a an the of in on to for and or from with by at as it that this there has have had"
)
ASKING = frozenset(_ASKING.split())
MANY = 1000  # passages from which on words that most of them have are skipped
DIGITS = 6  # of a score; further ones depend on the order of sums
MERGED = 2  # segments are merged until each has at least this many times the words of the next


@dataclass(frozen=True, slots=True)
class WordSegment:
    """The words of some passages, sorted by their hashes."""

    hashes: np.ndarray  # [words] uint32, ascending
    numbers: np.ndarray  # [words] uint32: of the passages
    counts: np.ndarray  # [words] uint8

    def merge(self, other: WordSegment) -> WordSegment:
        """Return a segment with the words of both."""
        pairs = zip(
            (self.hashes, self.numbers, self.counts), (other.hashes, other.numbers, other.counts), strict=True
        )
        hashes, numbers, counts = (np.concatenate(pair) for pair in pairs)
        order = np.argsort(hashes, kind="stable")
        return WordSegment(hashes[order], numbers[order], counts[order])


@dataclass(frozen=True, slots=True)
class Words:
    """The words of all passages in one state of an index. Those of deleted passages stay, and are skipped."""

    numbers: np.ndarray  # [passages] int64, ascending
    lengths: np.ndarray  # [passages] words
    places: np.ndarray  # [largest number + 2] int32: passage number -> place in these arrays, -1 if deleted
    segments: Sequence[WordSegment]

    @classmethod
    def load(cls, rows: Rows, numbers: np.ndarray, before: Words | None) -> Words:
        """Count the words of the passages of these numbers. before: those of an earlier state of the same index."""
        none = np.zeros(0, np.int64)
        known = before or cls(none, none, none, ())
        last = int(known.numbers[-1]) if len(known.numbers) else 0
        segment, lengths = _read(rows, last)
        segments = [*known.segments, *([segment] if len(lengths) else [])]
        while len(segments) > 1 and len(segments[-2].hashes) < MERGED * len(segments[-1].hashes):
            segments[-2:] = [segments[-2].merge(segments[-1])]
        places = np.full(2 + max(last, int(numbers.max(initial=-1))), -1, np.int32)
        places[numbers] = np.arange(len(numbers))
        left = known.lengths[places[known.numbers] >= 0]
        return cls(numbers, np.concatenate([left, lengths]), places, segments)

    def best(self, question: str, k: int, texts: np.ndarray, allowed: np.ndarray | None) -> dict[int, float]:
        """Return the k best passages of different texts that share a word with the question: passage number -> score.

        Passages with equal scores are included. texts: a hash of each passage's text. allowed: [passages] bool.
        """
        n = len(self.numbers)
        scores = np.zeros(len(self.numbers))
        mean = max(1.0, float(self.lengths.mean())) if n else 1.0
        norm = K1 * (1 - B + B * self.lengths / mean)
        words = dict.fromkeys(words_of(question))
        for word in [word for word in words if word not in ASKING] or words:
            places, counts = self._passages(hash_of(word))
            idf = np.log1p((n - len(places) + 0.5) / (len(places) + 0.5))
            scores[places] += idf * counts * (K1 + 1) / (counts + norm[places])
        scores = scores.round(DIGITS)
        if allowed is not None:
            scores[~allowed] = 0
        found = np.flatnonzero(scores > 0)
        n_copies = 1  # passages per text among the best, as far as known
        while len(found) > k * n_copies:
            least = np.partition(scores[found], -k * n_copies)[-k * n_copies]
            best = found[scores[found] >= least]
            if len(np.unique(texts[best])) >= k:
                found = best
                break
            n_copies *= 4
        return dict(zip(self.numbers[found].tolist(), scores[found].tolist(), strict=True))

    def _passages(self, hash: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of the passages with a word, and its counts; none for a word that most of many have."""
        numbers = [np.zeros(0, np.uint32)]
        counts = [np.zeros(0, np.uint8)]
        for segment in self.segments:
            start = np.searchsorted(segment.hashes, np.uint32(hash), "left")
            end = np.searchsorted(segment.hashes, np.uint32(hash), "right")
            numbers.append(segment.numbers[start:end])
            counts.append(segment.counts[start:end])
        all_numbers = np.concatenate(numbers)
        if MANY <= len(self.numbers) < 2 * len(all_numbers):
            return np.zeros(0, np.int32), np.zeros(0)
        places = self.places[np.minimum(all_numbers, len(self.places) - 1)]  # the last is no passage's
        is_left = places >= 0
        return places[is_left], np.concatenate(counts)[is_left].astype(np.float64)


def _read(rows: Rows, after: int) -> tuple[WordSegment, np.ndarray]:
    """Return the words of passages after this number, and the passages' lengths. Raises DatabaseError."""
    try:
        found = [(number, *unpack(content)) for number, content in read_words(rows, after)]
    except ValueError as error:
        raise sqlite3.DatabaseError(str(error)) from None
    sizes = np.array([len(counts) for *_, counts in found], np.int64)
    hashes = np.frombuffer(b"".join(hashes for _, hashes, _ in found), "<u4")
    counts = np.frombuffer(b"".join(counts for *_, counts in found), np.uint8)
    numbers = np.array([number for number, *_ in found], np.int64)
    owner = np.repeat(np.arange(len(found)), sizes)
    lengths = np.bincount(owner, counts, len(found)).astype(np.int64)
    order = np.argsort(hashes, kind="stable")
    segment = WordSegment(hashes[order], numbers[owner][order].astype(np.uint32), counts[order])
    return segment, lengths
