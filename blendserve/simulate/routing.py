"""Routing methods, for clusters of any size: none of them looks at all nodes.

    round_robin    the next node
    least_loaded   the node with the fewest requests; of equals, the one whose load has not changed for longest
    prefix         the home node of the first chunk, as routers in front of prefix caches do
    chunks         the rule of blendserve/routing.py: the node with most of the chunks in memory

The last two bound the load: a node at the bound passes a request on to the next one (consistent hashing with bounded
loads). `chunks` ranks only nodes that hold a chunk, by a directory of chunks; where none of these is below the bound, it
finds the anchor's home by one hash instead of rendezvous hashing over all nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from heapq import heappop, heappush
from itertools import count

import xxhash

from blendserve.routing import anchor, bounded, weight
from blendserve.simulate.cache import ChunkDirectory, key_of
from blendserve.simulate.config import Routing

Router = Callable[[Sequence[int]], int]
"""chunks of a request -> node"""


class Loads:
    """Requests at each node, queued ones included."""

    def __init__(self, nodes: int, slack: float) -> None:
        self.at = [0] * nodes
        self.total = 0
        self._slack = slack
        self._heap: list[tuple[int, int, int]] | None = None  # (load, time, node); made on first use
        self._now = 0
        self._changed_at = [0] * nodes

    def add(self, node: int, requests: int) -> None:
        """Change a node's load."""
        self.at[node] += requests
        self.total += requests
        if self._heap is not None:
            self._now += 1
            self._changed_at[node] = self._now
            heappush(self._heap, (self.at[node], self._now, node))

    def bound(self) -> int:
        """The highest load of a node with the next request."""
        return bounded(self.total, self.at[self.least()], len(self.at), self._slack)

    def least(self) -> int:
        """The least loaded node."""
        if self._heap is None:
            self._heap = sorted((load, 0, node) for node, load in enumerate(self.at))
        while self._heap[0][1] != self._changed_at[self._heap[0][2]]:
            heappop(self._heap)
        return self._heap[0][2]

    def from_home(self, home: int) -> int:
        """The home node, or the next one that is below the bound."""
        bound = self.bound()
        node = home % len(self.at)
        while self.at[node] >= bound:
            node = (node + 1) % len(self.at)
        return node


def make_router(routing: Routing, loads: Loads, directory: ChunkDirectory) -> Router:
    """The router of a cluster."""
    if routing == "round_robin":
        turn = count()
        nodes = len(loads.at)
        return lambda chunks: next(turn) % nodes
    if routing == "least_loaded":
        return lambda chunks: loads.least()
    if routing == "prefix":
        return lambda chunks: loads.from_home(xxhash.xxh3_64_intdigest(key_of(chunks[0])))
    return lambda chunks: _by_chunks(chunks, loads, directory)


def _by_chunks(chunks: Sequence[int], loads: Loads, directory: ChunkDirectory) -> int:
    hits = Counter(node for chunk in chunks for node in directory.holders(chunk))
    at = loads.at
    bound = loads.bound()
    free = [(-n, at[node], node) for node, n in hits.items() if at[node] < bound]
    if not free:
        return loads.from_home(xxhash.xxh3_64_intdigest(anchor(map(key_of, chunks))))
    most, load, _ = min(free)
    best = [node for n, own, node in free if (n, own) == (most, load)]
    if len(best) == 1:  # no hash decides
        return best[0]
    home = anchor(map(key_of, chunks))
    return max(best, key=lambda node: weight(name_of(node), home))


@cache
def name_of(node: int) -> str:
    """A node's name in blendserve/routing.py."""
    return f"node{node}"
