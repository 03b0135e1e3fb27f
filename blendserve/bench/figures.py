"""Seconds to figures: medians with their spread, and ratios taken round by round.

A machine that slows down for a second slows both sides of one round; the median of per-round ratios hardly sees it, a
ratio of medians does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Figures = dict[str, Any]
Calls = Mapping[str, Callable[[], T]]
Update = Callable[[int, int], None]


def spread(values: Sequence[float]) -> Figures:
    """Median, least and most of one figure over the rounds, and the values themselves."""
    return {
        "median": statistics.median(values),
        "least": min(values),
        "most": max(values),
        "rounds": list(values),
    }


def ratios(over: Sequence[float], under: Sequence[float]) -> Figures:
    """The spread of over / under, round by round."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def interleaved(
    calls: Calls[T], repeats: int, update: Update = lambda done, total: None
) -> dict[str, list[T]]:
    """Run every call once for warmth, then `repeats` rounds of all of them -> what each returned, round by round.

    Each round begins with another call, and every other one goes backwards from there: a machine whose cores have rested
    while a call waited is quicker for the next one, so none is always to follow the same. `update(rounds done, in all)`.
    """
    names = list(calls)
    for name in names:
        calls[name]()
    update(1, repeats + 1)
    results: dict[str, list[T]] = {name: [] for name in names}
    for done in range(repeats):
        first = done % len(names)
        begin, *others = names[first:] + names[:first]
        for name in (begin, *(reversed(others) if done % 2 else others)):
            results[name].append(calls[name]())
        update(done + 2, repeats + 1)
    return results
