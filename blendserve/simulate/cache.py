"""A tier of a node, or the shared store, as the engine keeps them: LRU, and at the cap by an admission policy.

All chunks have one size, so a tier is a number of places. Its entries are the keys of one ordered dictionary of numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from blendserve.store.key import ChunkKey
from blendserve.store.policies import Admission, Candidate

Moved = Callable[[int, int], None]  # a node's number, and a chunk


def _unheard(node: int, chunk: int) -> None:
    pass


class Cache:
    """At most `places` chunks, the least recently used first."""

    __slots__ = ("_admission", "_came", "_entries", "_node", "_places", "_went")

    def __init__(
        self,
        places: int,
        admission: Admission | None = None,
        node: int = 0,
        came: Moved = _unheard,
        went: Moved = _unheard,
    ) -> None:
        """admission: None admits everything. came, went: are told of every chunk that enters and leaves."""
        self._places, self._admission, self._node = places, admission, node
        self._came, self._went = came, went
        self._entries: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def use(self, chunk: int) -> bool:
        """Whether the chunk is here; it is the most recently used one now."""
        if chunk in self._entries:
            self._entries.move_to_end(chunk)
            return True
        return False

    def offer(self, chunk: int) -> bool:
        """Whether the chunk is let in, in place of the least recently used one where there is no room."""
        entries = self._entries
        if chunk in entries:
            entries.move_to_end(chunk)
            return True
        if len(entries) >= self._places:
            if not self._places:
                return False
            victim = next(iter(entries))
            if self._admission and not self._admission.admits(
                key_of(chunk), 1, [Candidate(key_of(victim), 1)], len(entries)
            ):
                return False
            del entries[victim]
            self._went(self._node, victim)
        entries[chunk] = None
        self._came(self._node, chunk)
        return True


def key_of(chunk: int) -> ChunkKey:
    """As the engine's policies know a chunk."""
    return chunk.to_bytes(8, "little")
