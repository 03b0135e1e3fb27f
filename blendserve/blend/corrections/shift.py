"""`shift` (ours; akin to AgentKVShift, arXiv 2607.21604): the recomputed tokens of a chunk show how this prompt moves its
keys and values away from the stored ones. Per layer and chunk, the mean of (fresh - stored) over the recomputed tokens,
shrunk towards the mean over all chunks, is added at half its size to the chunk's other tokens. Keys are compared and
moved before RoPE.
"""

from __future__ import annotations

from blendserve.blend.corrections.base import WEIGHT, FittedCorrection
from blendserve.kernels.types import CorrectionParams

SCALE = 0.5  # a recomputed token moves more than the others: that is why it was chosen


class Shift(FittedCorrection):
    """See the module's docstring."""

    @classmethod
    def params(
        cls, features: int, depth: float = 0.0, knows: bool = False, recomputed: float = 1.0
    ) -> CorrectionParams:
        return CorrectionParams(WEIGHT, 0.0, SCALE, SCALE, penalty=None)
