"""A cache of chunks of one size: LRU, and at its capacity an admission policy of the engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from blendserve.store.key import ChunkKey
from blendserve.store.policies import Admission, Candidate


class Cache:
    """Holds at most `capacity` chunks."""

    __slots__ = ("_admission", "_capacity", "_chunks", "_node", "added", "evicted")

    def __init__(self, capacity: float, admission: Admission | None = None, node: int = 0) -> None:
        """admission: None admits everything. node: what `added` and `evicted` are called with, before the chunk."""
        self._capacity, self._admission, self._node = capacity, admission, node
        self._chunks: OrderedDict[int, None] = OrderedDict()
        self.added: Callable[[int, int], None] | None = None
        self.evicted: Callable[[int, int], None] | None = None

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, chunk: int) -> bool:
        """Whether it is a hit; a hit becomes the most recently used chunk."""
        if chunk in self._chunks:
            self._chunks.move_to_end(chunk)
            return True
        return False

    def insert(self, chunk: int) -> bool:
        """Whether the chunk is admitted; at capacity it replaces the least recently used one."""
        if self.get(chunk):
            return True
        if len(self._chunks) >= self._capacity:
            if not self._capacity:
                return False
            victim = next(iter(self._chunks))
            candidates = [Candidate(key_of(victim), 1)]
            if self._admission and not self._admission.admits(
                key_of(chunk), 1, candidates, len(self._chunks)
            ):
                return False
            del self._chunks[victim]
            if self.evicted:
                self.evicted(self._node, victim)
        self._chunks[chunk] = None
        if self.added:
            self.added(self._node, chunk)
        return True


def key_of(chunk: int) -> ChunkKey:
    """The chunk's key in the engine's policies."""
    return chunk.to_bytes(8, "little")
