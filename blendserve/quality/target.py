"""What is promised: of the answers to one index's questions, against full prefill by the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from blendserve.config import BlendConfig
from blendserve.quality.risk import p_value

RATIOS = (0.0, 0.02, 0.05, 0.15, 0.3)  # that a target may choose; above them answers are exact


class Loss(NamedTuple):
    """How one answer differs from full prefill, at the answer's own tokens."""

    # Share of the tokens that full prefill would have chosen; of sampled ones, the common probability.
    agreement: Annotated[float, Field(ge=0, le=1)]
    kl: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # mean KL(full || method), nats


class Target(NamedTuple):
    """`quality`: the least mean agreement. `max_kl` and `exceed`: the largest share of answers with a larger KL."""

    quality: float | None
    max_kl: float | None
    exceed: float
    confidence: float

    @classmethod
    def of(cls, blend: BlendConfig) -> Target | None:
        """The target of the settings, if they have one."""
        made = cls(blend.quality, blend.max_kl, blend.exceed, blend.confidence)
        return made if blend.has_target else None

    @property
    def limit(self) -> float:
        """The limit of the mean of `losses`."""
        return self.exceed if self.quality is None else 1.0 - self.quality

    def losses(self, of: Sequence[Loss]) -> list[float]:
        """The losses that the target limits, in [0, 1]."""
        if self.quality is not None:
            return [1.0 - loss.agreement for loss in of]
        return [float(loss.kl > (self.max_kl or 0.0)) for loss in of]

    def p_value(self, of: Sequence[Loss]) -> float:
        """The p-value of the claim that the target is missed."""
        return p_value(self.losses(of), self.limit)

    def ratio(self, losses: Mapping[float, Sequence[Loss]]) -> float | None:
        """The least ratio that keeps the target with this confidence; None: only exact answers do.

        Ratios are tested from the largest down to the first that fails, so all tests together err with probability
        1 - confidence (fixed sequence testing, as Learn then Test: Angelopoulos et al., arXiv 2110.01052, section 2).
        """
        chosen: float | None = None
        for ratio in sorted(losses, reverse=True):
            if self.p_value(losses[ratio]) > 1.0 - self.confidence:
                break
            chosen = ratio
        return chosen

    def __str__(self) -> str:
        if self.quality is not None:
            return f"agreement >= {self.quality:g}"
        return f"KL above {self.max_kl:g} in at most {self.exceed:.0%} of answers"
