"""What is promised of the answers to one index's questions, against full prefill by the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from blendserve.config import QualityConfig
from blendserve.quality.risk import p_value

ERROR = 0.1  # probability that what a calibration promises does not hold
RATIOS = (0.0, 0.02, 0.05, 0.15, 0.3)  # that a target may choose; above them answers are exact


class Loss(NamedTuple):
    """How one answer differs from full prefill, at the answer's own tokens."""

    # Share of the tokens that full prefill would have chosen; of sampled ones, the common probability.
    agreement: Annotated[float, Field(ge=0, le=1)]
    kl: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # mean KL(full || method), nats


class Target(NamedTuple):
    """A limit of the mean loss of answers, with the loss in [0, 1]."""

    limit: float
    max_kl: (
        float | None
    )  # the loss is 1 for an answer with a larger KL and 0 for others; None: it is 1 - agreement

    @classmethod
    def of(cls, settings: QualityConfig) -> Target | None:
        """Return the target of the settings, if they have one."""
        if settings.min_agreement is not None:
            return cls(1.0 - settings.min_agreement, None)
        return None if settings.max_kl is None else cls(settings.violation_rate, settings.max_kl)

    def losses(self, of: Sequence[Loss]) -> list[float]:
        """Return the losses that the target limits, in [0, 1]."""
        if self.max_kl is None:
            return [1.0 - loss.agreement for loss in of]
        return [float(loss.kl > self.max_kl) for loss in of]

    def p_value(self, of: Sequence[Loss]) -> float:
        """Compute the p-value of the claim that the target is missed."""
        return p_value(self.losses(of), self.limit)

    def ratio(self, losses: Mapping[float, Sequence[Loss]]) -> float | None:
        """Return the least ratio that provably keeps the target; None: only exact answers do.

        Ratios are tested from the largest down to the first that fails, so all tests together err with probability
        ERROR (fixed sequence testing, as Learn then Test: Angelopoulos et al., arXiv 2110.01052, section 2).
        """
        chosen: float | None = None
        for ratio in sorted(losses, reverse=True):
            if self.p_value(losses[ratio]) > ERROR:
                break
            chosen = ratio
        return chosen

    def __str__(self) -> str:
        if self.max_kl is None:
            return f"agreement >= {1.0 - self.limit:g}"
        return f"KL above {self.max_kl:g} in at most {self.limit:.0%} of answers"
