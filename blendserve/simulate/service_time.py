"""Prefill time from hits and misses alone, by the engine's cost model (blend/cost.py), transfers, and shared machines.

Chunks of C tokens follow a prefix of P tokens; the question's Q tokens come last. All rows of a missing chunk run. Of
the cached tokens a ratio is recomputed, at positions that see a mean number of keys. A cached first chunk is exact: its
tokens count for the ratio and need no recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from blendserve.simulate.config import LinksConfig, SimulateConfig


class ServiceTime:
    """Prefill times of one prompt shape."""

    def __init__(self, config: SimulateConfig) -> None:
        self._compute = config.compute
        self._chunk = config.corpus.chunk_tokens
        self._prefix = config.requests.prefix_tokens
        self._question = config.requests.question_tokens

    def counts(self, hits: Sequence[bool]) -> tuple[int, float, float, int]:
        """Passes, rows, (row, key) pairs and loaded tokens of a prompt, by whether each chunk is a hit."""
        size = self._chunk
        prefix = self._prefix
        question = self._question
        n_hits = sum(hits)
        length = prefix + len(hits) * size + question
        rows = float(question)
        pairs = _pairs(length - question, question)
        for i, hit in enumerate(hits):
            if not hit:
                rows += size
                pairs += _pairs(prefix + i * size, size)
        reusable = n_hits - hits[0]
        chosen = min(round(self._compute.ratio * (n_hits * size)), reusable * size)
        if chosen:
            at = sum(i for i, hit in enumerate(hits) if hit)
            rows += chosen
            pairs += chosen * (prefix + at / reusable * size + (size + 1) / 2)
        scored = self._compute.scoring_pass and 0 < chosen < reusable * size
        if scored:
            rows += question
            pairs += question * length
        return 1 + scored, rows, pairs, prefix + n_hits * size

    def prefill(self, hits: Sequence[bool]) -> float:
        """Seconds, with every hit in memory and decoded."""
        passes, rows, pairs, loaded = self.counts(hits)
        c = self._compute
        return passes * c.per_pass + rows * c.per_row + pairs * c.per_pair + loaded * c.per_loaded


class StoreLink:
    """Transfers from the shared store, which sends whole responses in order of request, at its own rate.

    A node fetches for one request at a time, so its own rate is never shared. Writes take no request's time.
    """

    def __init__(self, links: LinksConfig) -> None:
        self._delay = links.delay
        self._store = 1 / links.store_rate if links.store_rate else 0.0
        self._node = 1 / links.node_rate if links.node_rate else 0.0
        self._free_at = 0.0  # when the store has sent all requested bytes

    def fetch(self, now: float, n_bytes: float) -> float:
        """Seconds until bytes that are requested now have arrived. Times must not decrease."""
        begins = max(now + self._delay, self._free_at)
        self._free_at = begins + n_bytes * self._store
        return max(self._free_at, begins + n_bytes * self._node) - now


class Machine:
    """The nodes of one machine that compute. They slow each other down (processor sharing).

    All compute at one rate, which changes when one begins or ends. So the service attained since the machine started
    orders their completions, whatever the rate was.
    """

    def __init__(self, slowdown: Sequence[float]) -> None:
        """slowdown: the n-th is the factor while n nodes compute."""
        self._slowdown = slowdown
        self._attained = self._now = 0.0  # service of a node that always computes; time of its last update
        self._ends: list[tuple[float, int]] = []  # heap: attained service at which a node's work is done
        self.due = inf  # time of the next completion if no node begins

    def add(self, now: float, node: int, work: float) -> None:
        """A node starts to compute."""
        if self._ends:
            self._attained += (now - self._now) / self._slowdown[len(self._ends) - 1]
        heappush(self._ends, (self._attained + work, node))
        self._schedule(now)

    def complete(self) -> int:
        """The node that completes at `due`."""
        self._attained, node = heappop(self._ends)
        self._schedule(self.due)
        return node

    def _schedule(self, now: float) -> None:
        self._now = now
        n = len(self._ends)
        self.due = now + (self._ends[0][0] - self._attained) * self._slowdown[n - 1] if n else inf


def _pairs(before: int, rows: int) -> float:
    """(row, key) pairs of consecutive rows after `before` tokens."""
    return rows * before + rows * (rows + 1) / 2
