"""An explanation as JSON: the prompt's tokens as text, their states and scores, and its parts with their reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from blendserve.core import Explanation

DIGITS = 4  # of a score: it is to be read and ranked
LONGEST = 8  # tokens of one character; a longer incomplete sequence is shown as it is


def explained(tokenizer: Any, ids: Sequence[int], explanation: Explanation) -> dict[str, Any]:
    """As `POST /v1/rag/query` tells it; docs/reference/http-api.md has the fields."""
    return {
        "tokens": list(token_texts(tokenizer, ids)),
        "states": explanation.runs,
        "scores": None if explanation.scores is None else _numbers(explanation.scores),
        "parts": [
            {
                "kind": part.kind,
                "passage": part.passage,
                "start": part.span.start,
                "stop": part.span.stop,
                "tier": part.tier or None,
                "reason": part.reason,
                "donors": [{"start": span.start, "stop": span.stop, "key": key} for span, key in part.donors],
            }
            for part in explanation.parts
        ],
    }


def token_texts(tokenizer: Any, ids: Sequence[int]) -> Iterator[str]:
    """The text of each token; of a character that several tokens make, the last one has it, and the others none."""
    held: list[int] = []
    for token in ids:
        held.append(token)
        text: str = tokenizer.decode(held, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(held) < LONGEST:
            yield ""
        else:
            yield text
            held.clear()


def _numbers(scores: Tensor) -> list[float | None]:
    """JSON has no NaN."""
    return [float(f"{x:.{DIGITS}g}") if x == x else None for x in scores.tolist()]
