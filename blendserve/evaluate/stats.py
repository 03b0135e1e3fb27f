"""95% percentile bootstrap intervals (Efron, 1979) over questions.

There is one value a prompt. Prompts of one question (its permutations) are resampled together, a cluster bootstrap: as
independent values they would make an interval too narrow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import DegenerateDataWarning, bootstrap

from blendserve.errors import InputError

RESAMPLES = 2_000
PERCENTILES = (2.5, 97.5)

Reduce = Callable[..., Any]  # numpy's sum or median
Questions = Sequence[str] | None  # the question of each value; None: every value has its own


@dataclass(frozen=True, slots=True)
class Interval:
    """A statistic and the interval that holds 95% of its bootstrap distribution."""

    mean: float
    low: float
    high: float
    n: int  # questions


def mean(values: ArrayLike, questions: Questions = None) -> Interval:
    """The mean of values [n]. Raises InputError for none."""
    found = ratio_of_means(values, np.ones(np.shape(values)), questions)
    assert found is not None
    return found


def ratio_of_means(values: ArrayLike, unit: ArrayLike, questions: Questions = None) -> Interval | None:
    """mean(values) / mean(unit) over the same prompts [n]; None where the unit's mean is zero.

    Not a mean of ratios, which would divide by prompts on which nothing goes wrong. Raises InputError for no values, or
    for two numbers of values.
    """
    return _ratio(np.sum, values, unit, questions)


def ratio_of_medians(values: ArrayLike, unit: ArrayLike, questions: Questions = None) -> Interval | None:
    """median(values) / median(unit) [n] over questions; a question's value is the median of its prompts.

    None where the unit's median is zero. Raises InputError like `ratio_of_means`.
    """
    return _ratio(np.median, values, unit, questions)


def _ratio(reduce: Reduce, values: ArrayLike, unit: ArrayLike, questions: Questions) -> Interval | None:
    own, units = _by_question(reduce, questions, values, unit)

    def statistic(top: NDArray[Any], bottom: NDArray[Any], axis: int = -1) -> Any:
        top, bottom = reduce(top, axis=axis), reduce(bottom, axis=axis)
        return np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=np.asarray(bottom) > 0)

    value, n = float(statistic(own, units)), len(own)
    if np.isnan(value):
        return None
    if n == 1:
        return Interval(value, value, value, n)
    options: dict[str, Any] = {"paired": True, "n_resamples": RESAMPLES, "method": "percentile"}
    with warnings.catch_warnings():  # a resample in which the unit is zero has no ratio
        warnings.simplefilter("ignore", DegenerateDataWarning)
        resampled = bootstrap((own, units), statistic, **options, rng=np.random.default_rng(0))
    low, high = np.nanpercentile(resampled.bootstrap_distribution, PERCENTILES)
    return Interval(value, float(low), float(high), n)


def _by_question(reduce: Reduce, questions: Questions, *columns: ArrayLike) -> list[NDArray[np.float64]]:
    """Columns [n] -> [questions]."""
    arrays = [np.asarray(column, float) for column in columns]
    if not len(arrays[0]) or len({len(array) for array in arrays}) > 1:
        raise InputError(f"cannot compare {[len(a) for a in arrays]} values: evaluate the same questions")
    if questions is None:
        return arrays
    ids = np.asarray(questions)
    return [np.array([reduce(array[ids == i]) for i in dict.fromkeys(questions)]) for array in arrays]
