"""What a correction is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from blendserve.core import Span
from blendserve.kernels.rows import Rows
from blendserve.kernels.types import Prior, Ropes
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.registry import CORRECTIONS


class LayerPriors(Protocol):
    """How a corpus's stored tokens are expected to move (blend/priors.py)."""

    def layer(self, l: int) -> Prior:
        """Of layer l >= 1."""


class Correction(ABC):
    """Adjusts stored KV in one request's cache, before the fresh rows are written over it."""

    uses_prior: ClassVar[bool] = False  # whether priors change anything

    def __init__(
        self,
        adapter: DecoderModel,
        cache: KVCache,
        ropes: Ropes,
        spans: Sequence[Span],
        priors: LayerPriors | None = None,
    ) -> None:
        """ropes: of all positions of the prompt. spans: of the reused segments, at least one."""
        return

    @abstractmethod
    def apply(self, l: int, rows: Rows, keys: Tensor, values: Tensor) -> bool:
        """Adjust layer l -> whether anything was changed.

        rows: ascending; keys (after RoPE) and values [K, S, D], fresh at these rows.
        """


class NoCorrection(Correction):
    """Stored KV is used as it is."""

    def apply(self, l: int, rows: Rows, keys: Tensor, values: Tensor) -> bool:
        return False


def make_correction(
    name: str,
    adapter: DecoderModel,
    cache: KVCache,
    ropes: Ropes,
    spans: Sequence[Span],
    priors: LayerPriors | None = None,
) -> Correction | None:
    """The correction of this name for one request; None if nothing is reused."""
    return CORRECTIONS.load(name)(adapter, cache, ropes, spans, priors) if spans else None
