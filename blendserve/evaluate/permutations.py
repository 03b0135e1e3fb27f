"""The same question with its passages in other orders: more prompts from the same data.

The n-th permutation of question ID has the id ID~n. Its order depends on the seed, the question and n alone, so that
more of them can be added later; no two permutations of a question have the same order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from blendserve.errors import CorpusError
from blendserve.evaluate.formats import Example

Item = TypeVar("Item")


def with_permutations(
    examples: Sequence[Example], permutations: int, passages: int | None = None
) -> list[Example]:
    """Each question and its permutations; fewer where its passages have no more orders.

    passages: number of retrieved passages, if these replace the question's own. Raises CorpusError where a question has
    the id of a permutation.
    """
    made, ids = list[Example](), {example.id for example in examples}
    for example in examples:
        made.append(example)
        orders = math.factorial(min(20, len(example.contexts) if passages is None else passages))
        for n in range(1, min(permutations + 1, orders)):
            if (id := f"{example.id}~{n}") in ids:
                raise CorpusError(
                    f"the data has a question {id!r}, the id of a permutation of {example.id!r}: rename it, or set "
                    "evaluate.shuffles lower",
                    setting="evaluate.shuffles",
                )
            made.append(replace(example, id=id, permutation=n, permutation_of=example.id))
    return made


def permuted(items: Sequence[Item], example: Example, seed: int) -> tuple[Item, ...]:
    """The items (passages) in this permutation's order; as they are for the question itself."""
    rng, order = random.Random(f"{seed}:{example.permutation_of}"), list(range(len(items)))
    seen = {tuple(order): None}
    while len(seen) <= example.permutation:  # until the n-th order that is another one than all before
        rng.shuffle(order)
        seen.setdefault(tuple(order))
    return tuple(items[n] for n in list(seen)[example.permutation])
