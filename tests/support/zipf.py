"""Queries for long runs: chunks drawn by popularity, in blocks that can be compared with each other.

The n-th chunk is asked for in proportion to 1 / n (Zipf). Independent draws would make blocks differ by chance. So a
chunk that is expected x times in a block is in it floor(x) or ceil(x) times (systematic resampling). What is rounded up
changes from block to block, so that all blocks together ask for every chunk.
"""

from __future__ import annotations

import random

import numpy as np

Query = tuple[int, ...]  # distinct chunks by popularity, 0 first, in their order in the prompt
GOLDEN = (5**0.5 - 1) / 2  # steps of it cover a circle evenly


def zipf_blocks(chunks: int, blocks: int, queries: int, per_query: int, seed: int = 0) -> list[list[Query]]:
    """`blocks` blocks of `queries` queries, no two of them alike. A block has no chunk more often than queries."""
    dice, novel = random.Random(seed), set[Query]()
    start, made = dice.random(), list[list[Query]]()
    popularity = np.cumsum(1 / np.arange(1, chunks + 1))
    expected = popularity / popularity[-1] * queries * per_query  # of the chunks up to each
    for n in range(blocks):
        counts = np.diff(np.floor(expected + (start + n * GOLDEN) % 1.0), prepend=0.0).astype(int)
        draws = [chunk for chunk in dice.sample(range(chunks), chunks) for _ in range(counts[chunk])]
        hands = [draws[query::queries] for query in range(queries)]  # equal draws go to neighbours
        dice.shuffle(hands)
        made.append([_novel(hand, novel, dice) for hand in hands])
    return made


def _novel(hand: list[int], novel: set[Query], dice: random.Random) -> Query:
    """An order in which these chunks were not asked for before."""
    dice.shuffle(hand)
    while tuple(hand) in novel:
        dice.shuffle(hand)
    novel.add(tuple(hand))
    return tuple(hand)
