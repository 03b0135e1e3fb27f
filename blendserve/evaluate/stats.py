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

Questions = Sequence[str] | None
"""The question of each value; None: every value has its own"""


@dataclass(frozen=True, slots=True)
class Interval:
    """A statistic and the interval that holds 95% of its bootstrap distribution."""

    mean: float
    low: float
    high: float
    n: int  # questions


def mean(values: ArrayLike, questions: Questions = None, seed: int = 0) -> Interval:
    """The mean of values [n]. Raises InputError for none."""
    found = ratio_of_means(values, np.ones(np.shape(values)), questions, seed)
    assert found is not None
    return found


def ratio_of_means(
    values: ArrayLike, unit: ArrayLike, questions: Questions = None, seed: int = 0
) -> Interval | None:
    """mean(values) / mean(unit) over the same prompts; None where the unit's mean is zero.

    Not a mean of ratios, which would divide by prompts on which nothing goes wrong. Raises InputError for no values, or
    for two numbers of values.
    """
    top, bottom = (np.nansum(columns, axis=1) for columns in _by_question(questions, values, unit))
    return _interval(lambda rows: (top[rows].sum(axis=-1), bottom[rows].sum(axis=-1)), len(top), seed)


def ratio_of_medians(
    values: ArrayLike, unit: ArrayLike, questions: Questions = None, seed: int = 0
) -> Interval | None:
    """median(values) / median(unit) over the same prompts; None where the unit's median is zero. Raises InputError."""
    columns = _by_question(questions, values, unit)

    def medians(rows: NDArray[np.int64]) -> Any:
        return [np.nanmedian(c[rows].reshape(*rows.shape[:-1], -1), axis=-1) for c in columns]

    return _interval(medians, len(columns[0]), seed)


def _interval(parts: Callable[[NDArray[np.int64]], Any], n: int, seed: int) -> Interval | None:
    """parts: questions [..., n] -> numerators and denominators [...]."""

    def statistic(rows: NDArray[Any], axis: int = -1) -> Any:
        top, bottom = parts(rows.astype(np.int64))
        return np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=np.asarray(bottom) > 0)

    value = float(statistic(np.arange(n)))
    if np.isnan(value):
        return None
    if n == 1:
        return Interval(value, value, value, n)
    rng = np.random.default_rng(seed)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DegenerateDataWarning
        )  # a resample in which the unit is zero has no ratio
        resampled = bootstrap((np.arange(n),), statistic, n_resamples=RESAMPLES, method="percentile", rng=rng)
    low, high = np.nanpercentile(resampled.bootstrap_distribution, PERCENTILES)
    return Interval(value, float(low), float(high), n)


def _by_question(questions: Questions, *columns: ArrayLike) -> list[NDArray[np.float64]]:
    """Columns [n] -> [questions, most prompts of any]; NaN where a question has fewer prompts."""
    arrays = [np.asarray(column, float) for column in columns]
    if not len(arrays[0]) or len({len(array) for array in arrays}) > 1:
        raise InputError(f"cannot compare {[len(a) for a in arrays]} values: evaluate the same questions")
    members: dict[str | int, list[int]] = {}
    for n in range(len(arrays[0])):
        members.setdefault(n if questions is None else questions[n], []).append(n)
    shape = len(members), max(map(len, members.values()))
    found = [np.full(shape, np.nan) for _ in arrays]
    for row, own in enumerate(members.values()):
        for target, array in zip(found, arrays, strict=True):
            target[row, : len(own)] = array[own]
    return found
