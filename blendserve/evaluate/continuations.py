"""Texts to continue, as a data set without questions."""

from __future__ import annotations

import re

from blendserve.core import Passage
from blendserve.errors import CorpusError
from blendserve.evaluate.formats import Example, split_words
from blendserve.evaluate.tasks import CONTINUATION

# An excerpt of a text, in words: the chunks, a lead that is computed like a question, and the continuation.
PIECES = 6
PIECE_WORDS = 256
LEAD_WORDS = 24
CONTINUATION_WORDS = 64


def continuations(text: str, name: str) -> list[Example]:
    """Consecutive excerpts of a text, each with its continuation, for perplexity. Raises CorpusError for a short text.

    | piece | ... | piece | lead | continuation |
    """
    n_words, found = PIECES * PIECE_WORDS + LEAD_WORDS + CONTINUATION_WORDS, list[Example]()
    for n, excerpt in enumerate(split_words(text, n_words), 1):
        pieces = split_words(excerpt, PIECE_WORDS)
        rest = re.findall(r"\s*\S+", "".join(pieces[PIECES:]))
        if len(rest) == LEAD_WORDS + CONTINUATION_WORDS:
            contexts = (Passage(piece, id=f"{name}-{n:03}:{m}") for m, piece in enumerate(pieces[:PIECES]))
            lead, answer = "".join(rest[:LEAD_WORDS]), "".join(rest[LEAD_WORDS:])
            found.append(Example(f"{name}-{n:03}", lead, (answer,), tuple(contexts), task=CONTINUATION.name))
    if not found:
        raise CorpusError(f"text {name} is too short: at least {n_words:,} words are needed", path=name)
    return found
