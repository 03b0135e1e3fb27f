"""Requests: chunks by Zipf's law over a corpus of any size, and arrival times.

A table of 10^9 probabilities would take gigabytes. Rejection-inversion (Hoermann and Derflinger, "Rejection-inversion to
generate variates from monotone discrete distributions", 1996) needs none: it inverts the integral of the law's
continuous envelope, and rejects at most about one draw in ten.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blendserve.simulate.config import CorpusConfig, SimulateConfig

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
BLOCK = 1 << 14  # requests per block
TOPIC_TRIES = 8  # draws of a chunk from the request's own topic, which may have too few
MAX_TRIES = 64  # draws by the law: with a lifetime, two ranks may share a topic and other topics have none


class Zipf:
    """Numbers 0 .. n - 1; the k-th has a probability proportional to (k + 1) ** -s."""

    def __init__(self, n: int, s: float) -> None:
        self.n = n
        self.s = s
        self._low, self._high = self._integral(1.5) - 1.0, self._integral(n + 0.5)
        self._sure = 2.0 - self._inverse(self._integral(2.5) - 2.0**-s)

    def draw(self, rng: np.random.Generator, size: int) -> Ints:
        """-> int64 [size]"""
        found = np.empty(0, np.int64)
        while len(found) < size:
            u = rng.uniform(self._low, self._high, size - len(found))
            x = self._inverse(u)
            k = np.clip(np.rint(x), 1, self.n)
            accepted = k[(k - x <= self._sure) | (u >= self._integral(k + 0.5) - k**-self.s)]
            found = np.concatenate([found, accepted.astype(np.int64) - 1])
        return found

    def _integral(self, x: Any) -> Any:
        """The integral of x ** -s, from 1."""
        log = np.log(x)
        return log if self.s == 1 else np.expm1((1 - self.s) * log) / (1 - self.s)

    def _inverse(self, u: Any) -> Any:
        return np.exp(u if self.s == 1 else np.log1p((1 - self.s) * u) / (1 - self.s))


def requests(config: SimulateConfig, nodes: int) -> Iterator[tuple[Floats, Ints]]:
    """Blocks of (arrival times [B], different chunks of each request [B, n]), in order.

    In a closed loop all times are 0. A seed gives the same chunks for any number of nodes.
    """
    rng = np.random.default_rng([config.seed, 0])
    clock = np.random.default_rng([config.seed, 1])
    popularity = _Popularity(config.corpus)
    now = 0.0
    wanted = config.requests
    for first in range(0, wanted.number, BLOCK):
        numbers = np.arange(first, min(first + BLOCK, wanted.number))
        times = np.zeros(len(numbers))
        if wanted.rate:
            times = now + np.cumsum(clock.exponential(1 / (wanted.rate * nodes), len(numbers)))
            now = float(times[-1])
        yield times, popularity.requests(rng, numbers, wanted.chunks)


class _Popularity:
    """Topics by Zipf, chunks of a topic by Zipf; the topic of a popularity rank changes with time."""

    def __init__(self, corpus: CorpusConfig) -> None:
        self._corpus = corpus
        self._per_topic = min(corpus.topic_chunks, corpus.chunks)
        self._topic = Zipf(-(-corpus.chunks // self._per_topic), corpus.zipf)
        self._within = Zipf(self._per_topic, corpus.zipf if self._per_topic > 1 else 0.0)

    def requests(self, rng: np.random.Generator, numbers: Ints, wanted: int) -> Ints:
        """Chunks [B, wanted] of the requests with these numbers [B], no chunk twice in a request."""
        main = self._topic.draw(rng, len(numbers))
        chunks = np.full((len(numbers), wanted), -1, np.int64)
        row, column = np.indices(chunks.shape).reshape(2, -1)
        for tries in count():
            coherent = (rng.random(len(row)) < self._corpus.coherence) & (tries < TOPIC_TRIES)
            topics = np.where(coherent, main[row], self._topic.draw(rng, len(row)))
            drawn = self._chunk(topics, self._within.draw(rng, len(row)), numbers[row], rng)
            if tries >= MAX_TRIES:
                drawn = rng.integers(0, self._corpus.chunks, len(row))
            chunks[row, column] = drawn
            same = chunks[:, :, None] == chunks[:, None, :]
            row, column = np.tril(same, -1).any(axis=2).nonzero()  # repeats of an earlier chunk
            if not len(row):
                break
        return chunks

    def _chunk(self, topics: Ints, within: Ints, at: Ints, rng: np.random.Generator) -> Ints:
        lifetime = self._corpus.lifetime
        n_chunks = self._corpus.chunks
        if lifetime:  # the k-th most popular topic is another one after each lifetime
            turn = (at + _mixed(topics) % lifetime) // lifetime
            topics = _mixed(topics + turn * self._topic.n) % self._topic.n
        chunks = topics * self._per_topic + within
        return np.where(chunks < n_chunks, chunks, rng.integers(0, n_chunks, len(chunks)))


def _mixed(numbers: Ints) -> Ints:
    """Hashes of numbers >= 0 (splitmix64)."""
    x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Ints = ((x ^ (x >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
    return mixed
