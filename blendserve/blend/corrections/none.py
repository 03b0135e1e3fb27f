"""Stored KV is used as it is."""

from __future__ import annotations

from torch import Tensor

from blendserve.blend.corrections.base import Correction
from blendserve.kernels.rows import Rows


class NoCorrection(Correction):
    """Changes nothing."""

    def apply(self, l: int, rows: Rows, keys: Tensor, values: Tensor) -> bool:
        return False
