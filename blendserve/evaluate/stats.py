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
    """median(values) / median(unit) [n] over questions; None where the unit's median is zero.

    A question's value is the median of its prompts.
    """
    return _ratio(np.median, values, unit, questions)


def _ratio(
    reduce: Callable[..., Any], values: ArrayLike, unit: ArrayLike, questions: Questions
) -> Interval | None:
    columns = [np.asarray(column, float) for column in (values, unit)]
    if questions is not None:
        ids = np.asarray(questions)
        columns = [np.array([reduce(c[ids == i]) for i in dict.fromkeys(questions)]) for c in columns]

    def statistic(top: Any, bottom: Any, axis: int = -1) -> Any:
        top, bottom = reduce(top, axis=axis), reduce(bottom, axis=axis)
        return np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=np.asarray(bottom) > 0)

    value, n = float(statistic(columns[0], columns[1])), len(columns[0])
    if np.isnan(value):
        return None
    if n == 1:
        return Interval(mean=value, low=value, high=value, n=n)
    options: dict[str, Any] = {"paired": True, "n_resamples": RESAMPLES, "method": "percentile"}
    with warnings.catch_warnings():  # a resample in which the unit is zero has no ratio
        warnings.simplefilter("ignore", DegenerateDataWarning)
        resampled = bootstrap(columns, statistic, **options, rng=np.random.default_rng(0))
    low, high = np.nanpercentile(resampled.bootstrap_distribution, PERCENTILES)
    return Interval(mean=value, low=float(low), high=float(high), n=n)
