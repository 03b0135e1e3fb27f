"""What a correction is: a formula that adjusts reused KV of one request. It reads KV, and runs no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from blendserve.blend.layout import LayerKV
from blendserve.core import Span
from blendserve.kernels.rotary import Rotary
from blendserve.kernels.rows import Rows
from blendserve.kernels.types import Prior, Ropes


class Correction:
    """Adjusts the reused KV of one request, before the fresh rows are written over it."""

    uses_prior: ClassVar[bool] = False  # whether the prior changes anything

    def __init__(
        self,
        rotary: Rotary,
        ropes: Ropes,
        spans: Sequence[Span],
        prior: Callable[[int], Prior] | None = None,
    ) -> None:
        """ropes: of all positions of the prompt, for each layer. spans: of the reused segments, at least one.

        prior: of a layer >= 1, how the corpus's stored tokens are expected to deviate (blend/priors.py).
        """
        self.rotary, self.ropes, self.spans = rotary, ropes, spans
        self.prior = prior if self.uses_prior else None

    def apply(self, l: int, stored: LayerKV, rows: Rows, fresh: LayerKV) -> bool:
        """Adjust the stored KV of layer l in place -> whether anything was changed.

        stored [K, T, D]: of the whole prompt. rows: ascending. fresh [K, S, D]: what was computed at these rows.
        """
        return False


class NoCorrection(Correction):
    """Stored KV is used as it is."""
