"""One decoding step of several requests: their rows share the matmuls, each attends to its own slot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from blendserve.engine.slots import Slots
from blendserve.models.forward import append_each
from blendserve.models.model import DecoderModel
from blendserve.models.native import Row
from blendserve.models.replay import WORTH, ReplayedSteps, is_worthwhile


class BatchDecoder:
    """The decoding steps of a server's slots: launched row by row, or on a GPU out of one graph."""

    def __init__(self, adapter: DecoderModel, slots: Slots) -> None:
        self._adapter, self._slots = adapter, slots
        fits = is_worthwhile(adapter, WORTH, slots.n)
        self._replayed = ReplayedSteps(adapter, slots.keys, slots.values) if fits else None

    def step(self, rows: Sequence[Row]) -> Tensor:
        """Run each row's token at its position, append its KV -> logits [B, V]; the rows' caches are slots."""
        plain = partial(append_each, self._adapter, rows)
        if self._replayed is None:
            return plain()
        return self._replayed([(self._slots.number(row.cache), row.at, row.token) for row in rows], plain)
