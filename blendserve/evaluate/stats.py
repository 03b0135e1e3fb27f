"""95% percentile bootstrap intervals (Efron, 1979) over questions.

There is one value per prompt. Prompts of one question (its permutations) are resampled together, a cluster bootstrap:
as independent values they would make an interval too narrow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import DegenerateDataWarning, bootstrap

RESAMPLES = 2_000
PERCENTILES = (2.5, 97.5)

Questions = Sequence[str] | None  # the question of each value; None: every value has its own


class Interval(TypedDict):
    """A statistic and the interval that holds 95% of its bootstrap distribution."""

    mean: float
    low: float
    high: float
    n: int  # questions


def mean(values: ArrayLike, questions: Questions = None) -> Interval:
    """The mean of values [n]."""
    found = ratio_of_means(values, np.ones(np.shape(values)), questions)
    assert found is not None
    return found


def ratio_of_means(values: ArrayLike, unit: ArrayLike, questions: Questions = None) -> Interval | None:
    """mean(values) / mean(unit) over the same prompts [n]; None where the unit's mean is zero.

    Not a mean of ratios, which would divide by prompts on which nothing goes wrong.
    """
    return _ratio(np.sum, values, unit, questions)


def ratio_of_medians(values: ArrayLike, unit: ArrayLike, questions: Questions = None) -> Interval | None:
    """median(values) / median(unit) [n] over questions, of their prompts' medians; None where the unit's is zero."""
    return _ratio(np.median, values, unit, questions)


def _ratio(
    reduce: Callable[..., Any], values: ArrayLike, unit: ArrayLike, questions: Questions
) -> Interval | None:
    columns = np.array([values, unit], float)
    if questions is not None:
        own = [np.array(questions) == i for i in dict.fromkeys(questions)]
        columns = np.array([reduce(columns[:, mask], axis=1) for mask in own]).T

    def statistic(top: Any, bottom: Any, axis: int = -1) -> Any:
        top = reduce(top, axis=axis)
        bottom = reduce(bottom, axis=axis)
        return np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=np.asarray(bottom) > 0)

    value = float(statistic(*columns))
    n = columns.shape[1]
    low = high = value
    if np.isnan(value):
        return None
    if n > 1:
        with warnings.catch_warnings():  # a resample in which the unit is zero has no ratio
            warnings.simplefilter("ignore", DegenerateDataWarning)
            options: dict[str, Any] = {"paired": True, "n_resamples": RESAMPLES, "method": "percentile"}
            resampled = bootstrap(tuple(columns), statistic, **options, rng=np.random.default_rng(0))
        low, high = map(float, np.nanpercentile(resampled.bootstrap_distribution, PERCENTILES))
    return Interval(mean=value, low=low, high=high, n=n)
