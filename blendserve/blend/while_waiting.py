"""No core idles while chunks are on their way: the link delivers from the front, who waits computes from the back.

    chunk        0        1        2        3        4        5
    link       =====>   =====>   =====>   ==>
    here       decoded  decoded                     <=====   <=====        they meet, and the prefill begins

The prefill goes from layer to layer, and so do transfers: when all that is missing is under way it begins, and waits for
each layer. Should one not come, what the prefill has done so far was in vain; it begins again when all is settled.

Which chunk is worth computing is for who delivers to say (Coming.withdraw); what is computed is the KV that a precompute
run would store. Of a link that dies, rises or falls only the place where both meet moves: even what is being computed is
fetched after all where that has become quicker. While no chunk is worth computing, what is here by now is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from blendserve.blend.precompute import ChunkComputer
from blendserve.core import ChunkKV, TokenIds
from blendserve.store import ChunkKey
from blendserve.store.base import Coming

COMPUTED = "computed"  # in place of a tier
LOOK_S = 0.005  # between looks, where there is nothing to do


class Overtaken(Exception):
    """What was being computed will be here sooner."""


class WhileWaiting:
    """Computes or decodes some of a request's chunks while others come. A store.base.Meanwhile."""

    def __init__(
        self,
        chunks: Mapping[ChunkKey, TokenIds],
        seconds: Callable[[int], float],
        computer: Callable[[], ChunkComputer],
        n_layers: int,
    ) -> None:
        """chunks: that may be computed. seconds: that it is expected to take for one of so many tokens."""
        self._chunks, self._seconds, self._computer = dict(chunks), seconds, computer
        self._n_layers = n_layers
        self._coming: Coming | None = None
        self.computed: dict[ChunkKey, ChunkKV] = {}

    @property
    def waited(self) -> float:
        """Seconds in which somebody waited for the link, in the prefill, too."""
        return self._coming.waited if self._coming else 0.0

    def __call__(self, coming: Coming) -> None:
        self._coming = coming
        while coming.wait(0.0):
            left = {key: self._seconds(len(ids)) for key, ids in self._chunks.items()}
            if key := coming.withdraw(left):
                self._take(key, coming)
            elif coming.begin():
                return
            elif not coming.decode():
                coming.wait(LOOK_S)

    def _take(self, key: ChunkKey, coming: Coming) -> None:
        """Compute a chunk, unless the link becomes so quick meanwhile that it comes after all."""
        ids = self._chunks.pop(key)
        seconds = self._seconds(len(ids))

        def before_layer(l: int) -> None:
            if coming.overtakes(key, (1 - l / self._n_layers) * seconds):
                raise Overtaken

        with suppress(Overtaken):
            self.computed[key] = self._computer().compute([ids], before_layer)[0]
