"""`prior` (ours): what the corpus has shown of how its chunks move (blend/priors.py), and a ridge on what is left of it.

Per layer, kv head, and for keys and values apart, what is expected counts as far as the recomputed tokens bear it out:
the slope of what they moved on it, 0 to 1. What they moved beyond that is learnt as `ridge` does. With few recomputed
tokens the expectation is nearly all there is, with none it is all. Without priors in the store it is `ridge`.

Thousands of tokens of all kinds have shown the one, some hundred that were chosen as they draw most attention the other:
what those alone suggest is what made single answers worse than no correction does, and counts half as much. Upper layers
look for single tokens, so their keys move less. The fewer tokens are recomputed, the more a wrong move weighs, as less is
right beside it: all moves are smaller then. All chosen on first halves of questions (docs/research/decisions.md).
"""

from __future__ import annotations

from blendserve.blend.corrections.ridge import Ridge
from blendserve.kernels.types import CorrectionParams

TRUST = 20.0  # tokens' worth of trust in a prior as it is
FIRST_KEYS, LAST_KEYS, VALUES = 0.85, 0.5, 0.85  # of the moves that the corpus has shown
RESIDUAL_SCALE = 0.3, 0.5  # of those of keys and values that this prompt's recomputed tokens show beside
MIN_CONFIDENCE = 0.8  # of all of this where nothing is recomputed
FULL_CONFIDENCE_SHARE = 0.15  # recomputed share from which all of it counts


class PriorRidge(Ridge):
    """See the module's docstring."""

    uses_prior = True

    @classmethod
    def params(
        cls, features: int, depth: float = 0.0, knows: bool = False, recomputed: float = 1.0
    ) -> CorrectionParams:
        found = super().params(features)
        if not knows:
            return found
        confidence = MIN_CONFIDENCE + (1 - MIN_CONFIDENCE) * min(1.0, recomputed / FULL_CONFIDENCE_SHARE)
        residual_keys, residual_values = (confidence * scale for scale in RESIDUAL_SCALE)
        keys = confidence * (FIRST_KEYS + (LAST_KEYS - FIRST_KEYS) * depth)
        return CorrectionParams(
            *found[:2], residual_keys, residual_values, found.penalty, TRUST, keys, confidence * VALUES
        )
