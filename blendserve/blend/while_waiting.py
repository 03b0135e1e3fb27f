"""No core idles while chunks are on their way: the link delivers from the front, who waits computes from the back.

    chunk        0        1        2        3        4        5
    link       =====>   =====>   =====>   ==>
    here       decoded  decoded                     <=====   <=====        they meet, and the prefill begins

Which chunk is worth computing is for who delivers to say (Coming.withdraw); what is computed is the KV that a precompute
run would store. Of a link that dies, rises or falls only the place where both meet moves. While none is, what is here by
now is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from blendserve.core import ChunkKV, TokenIds
from blendserve.store import ChunkKey
from blendserve.store.base import Coming

COMPUTED = "computed"  # in place of a tier
LOOK_S = 0.005  # between looks, where there is nothing to do


class WhileWaiting:
    """Computes or decodes some of a request's chunks while others come. A store.base.Meanwhile."""

    def __init__(
        self,
        chunks: Mapping[ChunkKey, TokenIds],
        seconds: Callable[[int], float],
        compute: Callable[[TokenIds], ChunkKV],
    ) -> None:
        """chunks: that may be computed. seconds: that it is expected to take for one of so many tokens."""
        self._chunks, self._seconds, self._compute = chunks, seconds, compute
        self.computed: dict[ChunkKey, ChunkKV] = {}

    def __call__(self, coming: Coming) -> None:
        while coming.wait(0.0):
            if key := coming.withdraw(self._left()):
                self.computed[key] = self._compute(self._chunks[key])
            elif not coming.decode():
                coming.wait(LOOK_S)

    def _left(self) -> dict[ChunkKey, float]:
        left = {key: ids for key, ids in self._chunks.items() if key not in self.computed}
        return {key: self._seconds(len(ids)) for key, ids in left.items()}
