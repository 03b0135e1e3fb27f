"""What is asked for: chunk numbers by Zipf's law in any corpus, without a table of it, and times of arrival.

A corpus of 10^9 chunks would need gigabytes of probabilities. Rejection-inversion (Hoermann and Derflinger, "Rejection-
inversion to generate variates from monotone discrete distributions", 1996) needs none: it inverts the integral of the
law's continuous envelope and rejects what lies between, about one draw in ten at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blendserve.simulate.config import SimulateConfig

Numbers = NDArray[np.int64]
Reals = NDArray[np.float64]
BLOCK = 1 << 14  # requests drawn at a time
PATIENCE = 64  # draws by the law for a chunk that the request does not have yet


class Zipf:
    """Numbers 0 .. n - 1, the k-th with a probability in proportion to (k + 1) ** -s."""

    def __init__(self, n: int, s: float) -> None:
        self.n, self.s = n, s
        self._low, self._high = self._integral(1.5) - 1.0, self._integral(n + 0.5)
        self._sure = 2.0 - self._inverse(self._integral(2.5) - 2.0**-s)

    def draw(self, rng: np.random.Generator, count: int) -> Numbers:
        """-> int64 [count]"""
        found = np.empty(count, np.int64)
        done = 0
        while done < count:
            u = rng.uniform(self._low, self._high, count - done)
            x = self._inverse(u)
            k = np.clip(np.rint(x), 1, self.n)
            kept = k[(k - x <= self._sure) | (u >= self._integral(k + 0.5) - k**-self.s)].astype(np.int64)
            found[done : done + len(kept)] = kept - 1
            done += len(kept)
        return found

    def _integral(self, x: Any) -> Any:
        """Of x ** -s, from 1."""
        log = np.log(x)
        return log if self.s == 1 else np.expm1((1 - self.s) * log) / (1 - self.s)

    def _inverse(self, u: Any) -> Any:
        return np.exp(u if self.s == 1 else np.log1p((1 - self.s) * u) / (1 - self.s))


def requests(config: SimulateConfig, nodes: int) -> Iterator[tuple[Reals, Numbers]]:
    """Blocks of (times of arrival [B], different chunks of each request [B, n]), in order.

    In a closed loop times are 0: a request comes when a client is free. The same seed gives the same chunks whatever the
    number of nodes. Raises ValueError when the corpus is smaller than a request.
    """
    wanted, corpus = config.requests, config.corpus
    if wanted.chunks > corpus.chunks:
        raise ValueError(f"a request of {wanted.chunks} chunks cannot be drawn from {corpus.chunks}")
    rng, clock = np.random.default_rng([config.seed, 0]), np.random.default_rng([config.seed, 1])
    law, now = _Law(config), 0.0
    for first in range(0, wanted.number, BLOCK):
        size = min(BLOCK, wanted.number - first)
        times = np.zeros(size)
        if wanted.rate:
            times = now + np.cumsum(clock.exponential(1 / (wanted.rate * nodes), size))
            now = float(times[-1])
        yield times, law.requests(rng, first, size)


class _Law:
    """Topics by Zipf, chunks within a topic by Zipf; what a popular topic is about changes with time."""

    def __init__(self, config: SimulateConfig) -> None:
        corpus = config.corpus
        self._per_topic = min(corpus.topic_chunks, corpus.chunks)
        self._topics, self._chunks = -(-corpus.chunks // self._per_topic), corpus.chunks
        self._which = Zipf(self._topics, corpus.zipf)
        self._within = Zipf(self._per_topic, corpus.zipf if self._per_topic > 1 else 0.0)
        self._coherence, self._lifetime, self._wanted = (
            corpus.coherence,
            corpus.lifetime,
            config.requests.chunks,
        )

    def requests(self, rng: np.random.Generator, first: int, size: int) -> Numbers:
        """Chunks [size, n] of the requests from number `first` on; none twice in one."""
        at = np.arange(first, first + size)
        main = self._which.draw(rng, size)
        chunks = np.full((size, self._wanted), -1, np.int64)
        places = np.ones_like(chunks, dtype=bool)  # to draw
        for patience in range(1 << 20):
            row, column = places.nonzero()
            if not len(row):
                break
            # A topic may have too few chunks for a request: what cannot be found there comes from anywhere.
            coherent = (rng.random(len(row)) < self._coherence) & (patience < 8)
            topics = np.where(coherent, main[row], self._which.draw(rng, len(row)))
            drawn = self._chunk(topics, self._within.draw(rng, len(row)), at[row], rng)
            if patience >= PATIENCE:  # with a lifetime, two ranks may share a topic and others have none
                drawn = rng.integers(0, self._chunks, len(row))
            chunks[row, column] = drawn
            places = _repeated(chunks)
        return chunks

    def _chunk(self, topics: Numbers, within: Numbers, at: Numbers, rng: np.random.Generator) -> Numbers:
        if self._lifetime:  # the k-th most popular topic is another one after each lifetime
            phase = _mixed(topics) % self._lifetime
            turn = (at + phase) // self._lifetime
            topics = _mixed(topics + turn * self._topics) % self._topics
        chunks = topics * self._per_topic + within
        return np.where(chunks < self._chunks, chunks, rng.integers(0, self._chunks, len(chunks)))


def _repeated(chunks: Numbers) -> NDArray[np.bool_]:
    """Which entries of a row [B, n] stand in it already, further left."""
    order = np.argsort(chunks, axis=1, kind="stable")
    ordered = np.take_along_axis(chunks, order, axis=1)
    same = np.zeros_like(chunks, dtype=bool)
    same[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    repeated = np.zeros_like(same)
    np.put_along_axis(repeated, order, same, axis=1)
    return repeated


def _mixed(numbers: Numbers) -> Numbers:
    """Numbers >= 0 that look as if they were drawn (splitmix64)."""
    x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Numbers = ((x ^ (x >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
    return mixed
