"""Where a policy's budget goes: in which quarter of the context, and on the passages that the answer needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

Line = Mapping[str, Any]
Bounds = tuple[float, float]

QUARTERS = 4


def spending(prompts: Sequence[Line], lines: Sequence[Line]) -> dict[str, Any] | None:
    """Shares of a method's recomputed tokens, all questions together; None when it recomputes none.

    Prompts and predictions of the same questions in the same order. `needed` is None where the data names no needed
    passages or chunks are no passages; `needed_of_context` is what an even spread would spend on them.
    """
    quarters, needed, spent, context, of_context, known = [0.0] * QUARTERS, 0.0, 0.0, 0.0, 0.0, 0.0
    for prompt, line in zip(prompts, lines, strict=True):
        chunks, ranges = _chunks(prompt), line["recomputed"]
        if not chunks:
            continue
        spent += _overlap(ranges, (chunks[0][0], chunks[-1][1]))
        for n, quarter in enumerate(_quarters(chunks[0][0], chunks[-1][1])):
            quarters[n] += _overlap(ranges, quarter)
        if prompt["needed"] and len(prompt["titles"]) == len(chunks):
            wanted = [
                c for c, title in zip(chunks, prompt["titles"], strict=True) if title in prompt["needed"]
            ]
            needed += sum(_overlap(ranges, chunk) for chunk in wanted)
            known += _overlap(ranges, (chunks[0][0], chunks[-1][1]))
            of_context += sum(stop - start for start, stop in wanted)
            context += chunks[-1][1] - chunks[0][0]
    if not spent:
        return None
    return {
        "quarters": [part / spent for part in quarters],
        "needed": needed / known if known else None,
        "needed_of_context": of_context / context if context else None,
    }


def _chunks(prompt: Line) -> list[tuple[int, int]]:
    """Where each chunk stands: the parts between prefix and suffix."""
    edges = list(accumulate(len(part) for part in prompt["parts"][:-1]))
    return list(pairwise(edges))


def _quarters(start: int, stop: int) -> list[Bounds]:
    step = (stop - start) / QUARTERS
    return [(start + n * step, start + (n + 1) * step) for n in range(QUARTERS)]


def _overlap(ranges: Sequence[Sequence[int]], bounds: Bounds) -> float:
    """Positions of the ranges within the bounds."""
    return sum(max(0.0, min(stop, bounds[1]) - max(start, bounds[0])) for start, stop in ranges)
