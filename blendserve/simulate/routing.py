"""Who answers a request, in a cluster of any size: no way of routing looks at all nodes.

    round_robin    the next node
    least_loaded   the node with the fewest requests, of equals the one whose load has not changed for longest
    prefix         the node that the first chunk belongs to, as routers in front of prefix caches do
    chunks         blendserve/routing.py's rule: where most of the chunks are in memory, in any order

The last two keep to that file's bound on load: a node at it passes a request on to the next one (consistent hashing with
bounded loads). In `chunks` the rule ranks only those that hold a chunk, by an index from chunks to nodes; where nobody
within the bound has any, the anchor's home is found by hashing once, not by rendezvous with every node: as steady while
nodes neither come nor go, which here they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from heapq import heappop, heappush
from itertools import islice
from typing import Protocol

import xxhash

from blendserve.routing import anchor, bounded, weight
from blendserve.simulate.cache import key_of
from blendserve.simulate.config import Routing

SEEN = 32  # nodes that a chunk is looked for on: one that is everywhere decides nothing


class Loads:
    """Requests at each node, waiting ones included."""

    def __init__(self, nodes: int, slack: float) -> None:
        self.at, self.total, self._slack = [0] * nodes, 0, slack
        self.changes: list[tuple[int, int, int]] | None = (
            None  # a heap of (load, when, node), where somebody asks
        )
        self._now, self._last = 0, [0] * nodes

    def add(self, node: int, requests: int) -> None:
        """So many more, or fewer."""
        self.at[node] += requests
        self.total += requests
        if self.changes is not None:
            self._now += 1
            self._last[node] = self._now
            heappush(self.changes, (self.at[node], self._now, node))

    def bound(self) -> int:
        """The load that a node may have at most with the next request."""
        return bounded(self.total, self.at[self.least()], len(self.at), self._slack)

    def least(self) -> int:
        """The node with the fewest requests."""
        if self.changes is None:
            self.changes = [(load, 0, node) for node, load in enumerate(self.at)]
            self.changes.sort()
        while self.changes[0][1] != self._last[self.changes[0][2]]:
            heappop(self.changes)
        return self.changes[0][2]

    def from_home(self, home: int) -> int:
        """That node, or the next one behind it that is below the bound."""
        at, n, bound = self.at, len(self.at), self.bound()
        node = home % n
        while at[node] >= bound:
            node = (node + 1) % n
        return node


class Holders:
    """Which nodes have a chunk in memory."""

    def __init__(self) -> None:
        self._of: dict[int, int | dict[int, None]] = {}  # a number where it is one node, as it mostly is

    def __len__(self) -> int:
        return len(self._of)

    def came(self, node: int, chunk: int) -> None:
        there = self._of.get(chunk)
        if there is None:
            self._of[chunk] = node
        elif isinstance(there, dict):
            there[node] = None
        else:
            self._of[chunk] = {there: None, node: None}

    def went(self, node: int, chunk: int) -> None:
        there = self._of[chunk]
        if not isinstance(there, dict):
            del self._of[chunk]
            return
        del there[node]
        if len(there) == 1:
            self._of[chunk] = next(iter(there))

    def of(self, chunk: int) -> Sequence[int]:
        """At most SEEN of them."""
        there = self._of.get(chunk)
        if there is None:
            return ()
        return tuple(islice(there, SEEN)) if isinstance(there, dict) else (there,)


class Router(Protocol):
    """Chooses a node for a request."""

    def choose(self, chunks: Sequence[int]) -> int: ...


class RoundRobin:
    def __init__(self, loads: Loads, holders: Holders) -> None:
        self._n, self._last = len(loads.at), -1

    def choose(self, chunks: Sequence[int]) -> int:
        self._last = (self._last + 1) % self._n
        return self._last


class LeastLoaded:
    def __init__(self, loads: Loads, holders: Holders) -> None:
        self._loads = loads

    def choose(self, chunks: Sequence[int]) -> int:
        return self._loads.least()


class PrefixAffinity:
    def __init__(self, loads: Loads, holders: Holders) -> None:
        self._loads = loads

    def choose(self, chunks: Sequence[int]) -> int:
        return self._loads.from_home(xxhash.xxh3_64_intdigest(key_of(chunks[0])))


class ChunkAffinity:
    def __init__(self, loads: Loads, holders: Holders) -> None:
        self._loads, self._holders = loads, holders

    def choose(self, chunks: Sequence[int]) -> int:
        hits: dict[int, int] = {}
        for chunk in chunks:
            for node in self._holders.of(chunk):
                hits[node] = hits.get(node, 0) + 1
        at, bound = self._loads.at, self._loads.bound()
        free = [(-n, at[node], node) for node, n in hits.items() if at[node] < bound]
        if not free:
            return self._loads.from_home(xxhash.xxh3_64_intdigest(_home(chunks)))
        most, least, first = min(free)
        best = [node for n, load, node in free if n == most and load == least]
        if len(best) == 1:
            return first
        home = _home(chunks)
        return max(best, key=lambda node: weight(name_of(node), home))


def _home(chunks: Sequence[int]) -> bytes:
    return anchor(map(key_of, chunks))


@cache
def name_of(node: int) -> str:
    """As blendserve/routing.py knows a node."""
    return f"node{node}"


ROUTERS: dict[Routing, type[RoundRobin | LeastLoaded | PrefixAffinity | ChunkAffinity]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix": PrefixAffinity,
    "chunks": ChunkAffinity,
}
