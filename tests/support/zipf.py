"""Queries for long runs: chunks drawn by popularity, in blocks that can be compared with each other.

Popularity is Zipf's: the n-th chunk is asked for in proportion to 1 / n ** s. Independent draws would make blocks differ
by chance, by more than what a run wants to see. So a chunk that is expected x times in a block stands in it floor(x) or
ceil(x) times (systematic resampling), and who is rounded up rotates from block to block: every block has the same mix,
and all together ask for the whole corpus.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from blendserve.errors import InputError

Query = tuple[
    int, ...
]  # distinct chunks by popularity, 0 first, in the order in which they stand in the prompt

GOLDEN = (5**0.5 - 1) / 2  # steps of it cover a circle evenly


def zipf_blocks(
    chunks: int, blocks: int, queries: int, per_query: int, seed: int = 0, s: float = 1.0
) -> list[list[Query]]:
    """`blocks` blocks of `queries` queries over so many chunks; all of one mix, no two queries alike.

    Raises InputError when a block is too short to hold its most popular chunk once a query.
    """
    dice, novel = random.Random(seed), set[Query]()
    start, made = dice.random(), []
    for n in range(blocks):
        counts = appearances(chunks, queries * per_query, (start + n * GOLDEN) % 1.0, s)
        if max(counts) > queries:
            raise InputError(
                f"a block of {queries} queries cannot hold its most popular chunk {max(counts)} times: "
                "use more chunks, fewer a query, or a smaller s"
            )
        made.append([_novel(hand, novel, dice) for hand in deal(counts, queries, dice)])
    return made


def appearances(chunks: int, draws: int, turn: float, s: float = 1.0) -> list[int]:
    """How often each chunk stands in a block of so many draws; `turn` in [0, 1) says who is rounded up."""
    weights = [(n + 1) ** -s for n in range(chunks)]
    scale, reached, counts = draws / math.fsum(weights), turn, []
    for weight in weights[:-1]:
        before, reached = math.floor(reached), reached + weight * scale
        counts.append(math.floor(reached) - before)
    return [*counts, draws - sum(counts)]


def deal(counts: Sequence[int], queries: int, dice: random.Random) -> list[list[int]]:
    """Spread chunks over queries, none twice in one, all queries of one length, in random order.

    The most frequent go first, each to the queries with the fewest so far: so nobody is ever ahead by more than one.
    """
    hands: list[list[int]] = [[] for _ in range(queries)]
    for chunk in sorted(range(len(counts)), key=lambda c: -counts[c]):
        if counts[chunk]:
            least = sorted(hands, key=lambda hand: (len(hand), dice.random()))
            for hand in least[: counts[chunk]]:
                hand.append(chunk)
    dice.shuffle(hands)
    return hands


def _novel(hand: list[int], novel: set[Query], dice: random.Random) -> Query:
    """An order in which these chunks were not asked for before."""
    dice.shuffle(hand)
    while tuple(hand) in novel:
        dice.shuffle(hand)
    novel.add(tuple(hand))
    return tuple(hand)
