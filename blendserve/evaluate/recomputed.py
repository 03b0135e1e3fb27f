"""Where a method's recomputed tokens are: by quarter of the context, and on the passages that the answer needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

Record = Mapping[str, Any]

QUARTERS = 4


def recompute_distribution(prompts: Sequence[Record], records: Sequence[Record]) -> dict[str, Any] | None:
    """Shares of a method's recomputed tokens by quarter of the context, and on needed passages; None without any.

    Prompts and predictions in the same order. `needed` is None where the data names no needed passages, or chunks are
    no passages; `needed_of_context` is the share of an even spread.
    """
    quarters, needed, total, context, of_context, known = [0.0] * QUARTERS, 0.0, 0.0, 0.0, 0.0, 0.0
    for prompt, record in zip(prompts, records, strict=True):
        chunks = list(pairwise(accumulate(len(part) for part in prompt["parts"][:-1])))
        if not chunks:
            continue
        start, stop = chunks[0][0], chunks[-1][1]
        own = _overlap(record["recomputed"], start, stop)
        total += own
        edges = [start + n * (stop - start) / QUARTERS for n in range(QUARTERS + 1)]
        quarters = [
            q + _overlap(record["recomputed"], *e) for q, e in zip(quarters, pairwise(edges), strict=True)
        ]
        if prompt["needed"] and len(prompt["titles"]) == len(chunks):
            wanted = [
                c for c, title in zip(chunks, prompt["titles"], strict=True) if title in prompt["needed"]
            ]
            needed += sum(_overlap(record["recomputed"], *chunk) for chunk in wanted)
            known += own
            of_context += sum(b - a for a, b in wanted)
            context += stop - start
    if not total:
        return None
    return {
        "quarters": [part / total for part in quarters],
        "needed": needed / known if known else None,
        "needed_of_context": of_context / context if context else None,
    }


def _overlap(ranges: Sequence[Sequence[int]], start: float, stop: float) -> float:
    return sum(max(0.0, min(end, stop) - max(begin, start)) for begin, end in ranges)
