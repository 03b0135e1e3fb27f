"""A cache of chunks of one size, LRU with an admission policy of the engine, and which nodes have a chunk in theirs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from blendserve.store.key import ChunkKey
from blendserve.store.policies import Admission, Candidate

MAX_HOLDERS = 32  # nodes of a chunk to rank: a chunk that all nodes hold decides nothing


class ChunkDirectory:
    """Which nodes hold a chunk in memory."""

    def __init__(self) -> None:
        self._nodes: dict[int, int | dict[int, None]] = {}  # most chunks have one node: a number saves memory

    def add(self, node: int, chunk: int) -> None:
        """The node holds the chunk from now on."""
        nodes = self._nodes.setdefault(chunk, node)
        if isinstance(nodes, dict):
            nodes[node] = None
        elif nodes != node:
            self._nodes[chunk] = {nodes: None, node: None}

    def remove(self, node: int, chunk: int) -> None:
        """The node has evicted the chunk."""
        nodes = self._nodes[chunk]
        if not isinstance(nodes, dict):
            del self._nodes[chunk]
            return
        del nodes[node]
        if len(nodes) == 1:
            (self._nodes[chunk],) = nodes

    def holders(self, chunk: int) -> Sequence[int]:
        """Return at most MAX_HOLDERS nodes that hold a chunk."""
        nodes = self._nodes.get(chunk, {})
        return tuple(islice(nodes, MAX_HOLDERS)) if isinstance(nodes, dict) else (nodes,)


class Cache(OrderedDict[int, None]):
    """A cache of at most `capacity` chunks, the least recently used one first."""

    def __init__(
        self,
        capacity: float,
        admission: Admission | None = None,
        directory: ChunkDirectory | None = None,
        node: int = 0,
    ) -> None:
        """admission: None admits everything. directory: is told what this node holds."""
        super().__init__()
        self._capacity = capacity
        self._admission = admission
        self._directory = directory
        self._node = node

    def hit(self, chunk: int) -> bool:
        """Whether the chunk is here; it becomes the most recently used one."""
        if chunk in self:
            self.move_to_end(chunk)
            return True
        return False

    def insert(self, chunk: int) -> bool:
        """Whether the chunk is admitted; at capacity it replaces the least recently used one."""
        if self.hit(chunk):
            return True
        if len(self) >= self._capacity:
            if not self:
                return False
            victim = next(iter(self))
            candidates = [Candidate(key_of(victim), 1)]
            if self._admission and not self._admission.admits(key_of(chunk), 1, candidates, len(self)):
                return False
            del self[victim]
            if self._directory:
                self._directory.remove(self._node, victim)
        self[chunk] = None
        if self._directory:
            self._directory.add(self._node, chunk)
        return True


def key_of(chunk: int) -> ChunkKey:
    """The chunk's key in the engine's policies."""
    return chunk.to_bytes(8, "little")
