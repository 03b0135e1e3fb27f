"""The quality target: how closely answers over an index must match full prefill by the same model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from blendserve.quality.risk import p_value, p_value_of_share

ERROR = 0.1  # largest probability that a target is reported as kept and is missed
RATIOS = (0.0, 0.05, 0.15, 0.3, 0.5)  # that a target may choose; if none keeps it, answers are exact
LEVELS: tuple[float | None, ...] = (*RATIOS, None)  # None: exact answers
WORSE = 0.02  # largest share of prompts on which full reuse may be closer to full prefill
NO_WORSE = 0.01  # nats by which a KL may exceed full reuse's and still count as no worse
MIN_PROMPTS = 16  # from which on an unproven ratio may count as missing the target


class Loss(NamedTuple):
    """How far a method is from full prefill on one prompt, at the tokens of one answer."""

    # Share of the tokens that full prefill would have chosen; of sampled ones, the common probability.
    agreement: Annotated[float, Field(ge=0, le=1)]
    kl: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # mean KL(full || method), nats
    is_worse: bool = False  # whether full reuse is closer, by more than NO_WORSE


class Target(NamedTuple):
    """A limit of the mean share of tokens that differ from full prefill's.

    Also, full reuse may be closer to full prefill on at most a share WORSE of the prompts.
    """

    limit: float

    @property
    def min_agreement(self) -> float:
        return 1.0 - self.limit

    def p_value(self, losses: Sequence[Loss], weights: Sequence[float]) -> float:
        """Compute the p-value of the claim that the target is missed: the larger of those of its two bounds."""
        differ = [1.0 - loss.agreement for loss in losses]
        worse = [float(loss.is_worse) for loss in losses]
        return max(p_value(differ, self.limit, weights), p_value_of_share(worse, WORSE, weights))

    def seems_missed(self, losses: Sequence[Loss], weights: Sequence[float]) -> bool:
        """Return whether these losses are above a bound, without proof. A single worse prompt does not count."""
        n = sum(weights)
        differ = sum(weight * (1.0 - loss.agreement) for loss, weight in zip(losses, weights, strict=True))
        worse = sum(weight * loss.is_worse for loss, weight in zip(losses, weights, strict=True))
        return n >= MIN_PROMPTS and (differ > self.limit * n or worse > max(1.0, WORSE * n))

    def ratio(
        self, losses: Sequence[Sequence[Loss]], weights: Sequence[float], start: float | None
    ) -> float | None:
        """Return the smallest ratio that provably keeps the target; None: only exact answers keep it.

        losses: at each of RATIOS. start: without proof, the smallest ratio from here on that does not seem to miss it.
        Ratios are tested from the largest down to the first that fails, so all tests together err with probability
        ERROR (fixed sequence testing, as Learn then Test: Angelopoulos et al., arXiv 2110.01052, section 2).
        """
        proven: float | None = None
        for ratio, measured in zip(reversed(RATIOS), reversed(losses), strict=True):
            if self.p_value(measured, weights) > ERROR:
                break
            proven = ratio
        if proven is not None:
            return proven
        for ratio, measured in zip(RATIOS, losses, strict=True):
            if start is not None and ratio >= start and not self.seems_missed(measured, weights):
                return ratio
        return None

    def __str__(self) -> str:
        return f"agreement >= {self.min_agreement:g}, at most {WORSE:.0%} of prompts worse than full reuse"
