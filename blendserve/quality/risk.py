"""Statistics of losses in [0, 1]: may a mean loss be above a limit, and has it risen? Valid however often computed.

A bettor who doubts "the mean is `limit` or more" stakes a share of the capital on each loss, chosen from earlier losses
alone. If the claim holds, the capital ever reaches 1/p with probability at most p (Ville). So 1 / largest capital is a
p-value, and the means that cannot be refuted are an interval (Waudby-Smith & Ramdas, arXiv 2010.09686, section 4; stakes
by their aGRAPA). Neither assumes a distribution.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

GRID = np.linspace(0.0025, 0.9975, 200)  # means that are tried for an interval
# Shares of aGRAPA's stake of two bettors: the whole stake is too much where most losses are 0 and some are 1.
SHARES = (0.5, 1.0)
MAX_STAKE = 0.9  # of the stake that could lose the whole capital
# Bettors on rare events: the share of the limit that each bets on, and its capital at the start.
RARER = ((0.0, 0.6), (0.25, 0.2), (0.5, 0.2))
FACTORS = (1.5, 2.0, 3.0, 5.0)  # times the limit: rises that the detector looks for
FALSE_ALARM = 0.002  # largest rate of alarms per check while the mean is at its limit

Floats = NDArray[np.float64]


def capital(losses: ArrayLike, limits: ArrayLike, weights: ArrayLike = 1.0) -> Floats:
    """Return the capital after each loss [n] of bets that the mean is below each of `limits` [g] -> [n, g].

    weights: in [0, 1], of each loss [n]: shares of its stake.
    """
    x = np.asarray(losses, float)[:, None]
    limit = np.atleast_1d(np.asarray(limits, float))
    n = np.arange(1, len(x) + 1)[:, None]
    mean = (0.5 + np.cumsum(x, axis=0)) / (n + 1)
    variance = (0.25 + np.cumsum((x - mean) ** 2, axis=0)) / (n + 1)
    mean, variance = (np.vstack([[[start]], of[:-1]]) for start, of in ((0.5, mean), (0.25, variance)))
    gap = limit - mean  # by the earlier losses
    stakes = (np.clip(share * gap / (variance + gap**2), 0.0, MAX_STAKE / (1.0 - limit)) for share in SHARES)
    weight = np.broadcast_to(np.asarray(weights, float), len(x))[:, None]
    bettors = [np.cumprod(1.0 + weight * stake * (limit - x), axis=0) for stake in stakes]
    return np.asarray(np.mean(bettors, axis=0), float)


def p_value(losses: ArrayLike, limit: float, weights: ArrayLike = 1.0) -> float:
    """Return the p-value of the claim that the mean of these losses is `limit` or more; 1 without losses."""
    most = float(capital(losses, limit, weights).max()) if np.size(losses) else 1.0
    return 1.0 / max(1.0, most)


def p_value_of_share(cases: ArrayLike, limit: float, weights: ArrayLike = 1.0) -> float:
    """Return the p-value of the claim that the share of ones among `cases` is `limit` or more, for a small limit.

    128 zeros prove a limit of 2% with p = 0.1. The bettors stake on fixed probabilities, so their capital is a likelihood
    ratio (Wald's test).
    """
    if not np.size(cases):
        return 1.0
    x = np.asarray(cases, float)
    weight = np.broadcast_to(np.asarray(weights, float), len(x))
    total = np.zeros(len(x))
    for factor, start in RARER:
        gain = np.where(x > 0, factor, (1.0 - factor * limit) / (1.0 - limit))
        total += start * np.cumprod(1.0 + weight * (gain - 1.0))
    return 1.0 / max(1.0, float(total.max()))


def interval(losses: ArrayLike, error: float, weights: ArrayLike = 1.0) -> tuple[float, float]:
    """Return an interval of the mean. The true mean is outside, at any time, with probability at most `error`."""
    if not np.size(losses):
        return 0.0, 1.0
    x = np.asarray(losses, float)
    most = 2.0 / error
    below = capital(x, GRID, weights).max(axis=0) < most  # not refuted from above
    above = capital(1.0 - x, 1.0 - GRID, weights).max(axis=0) < most
    left = GRID[below & above]
    low, high = (left[0], left[-1]) if len(left) else (x.mean(), x.mean())
    return (0.0 if low == GRID[0] else float(low)), (1.0 if high == GRID[-1] else float(high))


class Detector:
    """Detects that a mean loss has risen above its limit (an e-detector: Shin et al., arXiv 2203.03532)."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        risen = np.minimum(0.95, limit * np.asarray(FACTORS))
        self._stakes = (risen / limit - 1.0) / (1.0 - limit)
        self._capital = np.zeros(len(FACTORS))

    def add(self, loss: float) -> bool:
        """Bet that the mean has risen -> whether this loss sets off the alarm.

        A new bettor joins with a capital of 1 at each loss, as the mean may have risen just now.
        """
        self._capital = (self._capital + 1.0) * (1.0 + self._stakes * (loss - self._limit))
        return bool(self._capital.mean() >= 1.0 / FALSE_ALARM)
