"""The same question with its passages in other orders: more prompts from the same data.

The n-th permutation of question ID has the id ID~n. Its order depends on the seed, the question and n alone, so that
more of them can be added later; no two permutations of a question have the same order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from blendserve.core import Passage
from blendserve.errors import CorpusError
from blendserve.evaluate.formats import Example


def with_permutations(
    examples: Sequence[Example], permutations: int, passages: int | None = None
) -> list[Example]:
    """Each question and its permutations; fewer where its passages have no more orders.

    passages: number of retrieved passages, if these replace the question's own. Raises CorpusError where a question has
    the id of a permutation.
    """
    made = list[Example]()
    for example in examples:
        orders = math.factorial(min(20, len(example.contexts) if passages is None else passages))
        numbers = range(1, min(permutations + 1, orders))
        made.append(example)
        made += (
            replace(example, id=f"{example.id}~{n}", permutation=n, permutation_of=example.id)
            for n in numbers
        )
    if taken := {e.id for e in examples} & {e.id for e in made if e.permutation}:
        problem = f"the data has the ids of permutations ({', '.join(taken)}): rename them, or lower evaluate.shuffles"
        raise CorpusError(problem, setting="evaluate.shuffles")
    return made


def permuted(passages: Sequence[Passage], example: Example, seed: int) -> tuple[Passage, ...]:
    """The passages in this permutation's order; as they are for the question itself."""
    rng, order = random.Random(f"{seed}:{example.permutation_of}"), list(range(len(passages)))
    seen = {tuple(order): None}
    while len(seen) <= example.permutation:  # until the n-th order that is another one than all before
        rng.shuffle(order)
        seen.setdefault(tuple(order))
    return tuple(passages[n] for n in list(seen)[example.permutation])
