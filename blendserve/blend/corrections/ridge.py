"""`ridge` (ours): what `shift` observes, taken further. Per layer and kv head, a linear map from a token's stored key and
value to its deviation is fitted on the recomputed tokens of this very prompt, on top of each chunk's mean deviation, and
predicts the deviation of every other token. Nothing is calibrated beforehand. With few recomputed tokens the penalty
leaves little but the means, and they shrink towards zero themselves.
"""

from __future__ import annotations

from blendserve.blend.corrections.base import WEIGHT, FittedCorrection
from blendserve.kernels.types import CorrectionParams

ZERO_PRIOR = 40.0  # tokens' worth of trust in nothing having moved at all
PENALTY = 8.0  # per feature of unit size; few tokens must not explain themselves by many features


class Ridge(FittedCorrection):
    """See the module's docstring."""

    @classmethod
    def params(cls, features: int) -> CorrectionParams:
        return CorrectionParams(WEIGHT, ZERO_PRIOR, scale=1.0, penalty=PENALTY * features)
