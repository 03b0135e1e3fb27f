"""`ridge` (ours): what `shift` observes, taken further. Per layer and kv head, a linear map from a token's stored key and
value to its deviation is fitted on the recomputed tokens of this very prompt, on top of each chunk's mean deviation, and
predicts the deviation of every other token. Nothing is calibrated beforehand. With few recomputed tokens the penalty
leaves little but the means, and they shrink towards zero themselves.

Keys are moved by less than they are expected to move. A stored chunk draws more attention than it should; a key that is
moved to where it is expected draws less than one that is there, as a softmax takes exponentials, and the mean of those
is above the exponential of the mean. Too much attention costs little, too little of it loses what the token says:
full-sized moves made some answers worse than none.
"""

from __future__ import annotations

from blendserve.blend.corrections.base import WEIGHT, FittedCorrection
from blendserve.kernels.types import CorrectionParams

ZERO_PRIOR = 40.0  # tokens' worth of trust in nothing having moved at all
KEY_SCALE, VALUE_SCALE = 0.55, 0.7  # of the moves; chosen on first halves of questions (decisions.md)
PENALTY = 8.0  # per feature of unit size; few tokens must not explain themselves by many features


class Ridge(FittedCorrection):
    """See the module's docstring."""

    @classmethod
    def params(
        cls, features: int, depth: float = 0.0, knows: bool = False, recomputed: float = 1.0
    ) -> CorrectionParams:
        return CorrectionParams(WEIGHT, ZERO_PRIOR, KEY_SCALE, VALUE_SCALE, PENALTY * features)
