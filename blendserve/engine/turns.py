"""Long passes over the layers take turns with the running answers: every layer of a prefill begins with a pause.

Everything that runs a prompt through the reader (the policy's pass, the blending prefill, a chunk's own KV) calls
`project` once a layer. So an adapter that calls back there cuts all of them into layers, and none has to know.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from blendserve.models.adapter import Adapter, Projected


class PausingAdapter(Adapter):
    """The same reader; calls `pause` before each layer. What `pause` raises ends the pass."""

    def __init__(self, adapter: Adapter, pause: Callable[[], None]) -> None:
        self.__dict__.update(vars(adapter))
        self._pause = pause

    def project(self, l: int, hidden: Tensor) -> Projected:
        self._pause()
        return super().project(l, hidden)
