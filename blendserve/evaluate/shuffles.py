"""The same question with its passages in another order: prompts that cost no data, to look for the ones that go wrong.

The n-th shuffle of question ID is called ID~n. Its order depends on the seed, the question and n alone, so more of them
may be asked for later; no two shuffles of a question, nor the question itself, have the same order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from blendserve.errors import CorpusError
from blendserve.evaluate.formats import Example

Item = TypeVar("Item")


def with_shuffles(examples: Sequence[Example], shuffles: int, passages: int | None = None) -> list[Example]:
    """Each question, and behind it its shuffles: fewer where its passages have no more orders.

    passages: how many will be retrieved for each, in place of those that come with it. Raises CorpusError where the
    data has a question that is called as a shuffle is.
    """
    made = []
    for example in examples:
        orders = math.factorial(min(20, len(example.contexts) if passages is None else passages))
        made += [
            example,
            *(
                replace(example, id=f"{example.id}~{n}", shuffle=n, shuffled=example.id)
                for n in range(1, min(shuffles + 1, orders))
            ),
        ]
    known = {e.id for e in examples}
    for example in made:
        if example.shuffle and example.id in known:
            raise CorpusError(
                f"the data has a question {example.id!r}, which is what a shuffle of {example.shuffled!r} is called: "
                "rename it, or ask for fewer shuffles",
                setting="evaluate.shuffles",
            )
    return made


def in_order(items: Sequence[Item], example: Example, seed: int) -> tuple[Item, ...]:
    """The items (passages) in the order that this shuffle has; as they are for a question that is none."""
    if not example.shuffle:
        return tuple(items)
    orders = _orders(len(items), f"{seed}:{example.shuffled}")
    order = next(order for n, order in enumerate(orders, 1) if n == example.shuffle)
    return tuple(items[n] for n in order)


def _orders(n: int, seed: str) -> Iterator[tuple[int, ...]]:
    """Orders of n items in a random sequence, each once, without the one that they stand in."""
    dice, order = random.Random(seed), list(range(n))
    seen = {tuple(order)}
    while len(seen) < math.factorial(n):
        dice.shuffle(order)
        if tuple(order) not in seen:
            seen.add(tuple(order))
            yield tuple(order)
