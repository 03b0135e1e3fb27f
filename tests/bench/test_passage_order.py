"""The orders of `benchmarks passage_order`, against all orders that there are."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import permutations

import pytest

from benchmarks.passage_order import Kept

SIZES = [3, 8, 5, 2, 7, 4, 6]  # tokens of each passage


def n_tokens(numbers: Iterable[int]) -> int:
    return sum(SIZES[n] for n in numbers)


@pytest.mark.parametrize("fixed", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_cached_has_the_most_exact_tokens_of_all_orders_and_the_bound_no_fewer(seed: int, fixed: int) -> None:
    drawn = random.Random(seed)
    kept = Kept(40, n_tokens)
    for _ in range(30):
        asked = drawn.sample(range(len(SIZES)), 4)
        free, best = asked[:-fixed], asked[-fixed:]
        every = [kept.by_score((*order, *best), fixed) for order in permutations(free)]
        most = max(n_tokens(sent.exact) for sent in every)
        cached = kept.by_kept(asked, fixed)
        order = (*cached.exact, *cached.others)
        assert sorted(order) == sorted(asked)
        assert list(order[-fixed:]) == best
        assert n_tokens(cached.exact) == most <= n_tokens(kept.by_any(asked, fixed).exact)
        kept.add(order)


def test_a_beginning_stays_while_a_later_prompt_uses_it() -> None:
    kept = Kept(17, n_tokens)
    for order in ((0, 1), (2, 3), (0, 4)):  # 11, 7 and 7 more tokens: (0, 1) goes, (0,) stays
        kept.add(order)
    assert [[*kept.by_score(order, 1).exact] for order in ((0, 4), (0, 1), (2, 3))] == [[0, 4], [0], [2, 3]]
