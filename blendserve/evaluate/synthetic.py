"""Data sets without a file: line retrieval, and texts to continue."""

from __future__ import annotations

import random
import re

from blendserve.core import Passage
from blendserve.errors import CorpusError
from blendserve.evaluate.formats import Example, split_words
from blendserve.evaluate.tasks import CONTINUATION, LINES

RECORDS = 100  # questions of the line retrieval
CHUNKS = 10
LINES_PER_CHUNK = 10
MAX_NUMBER = 50_000
ADJECTIVES = """
able bitter calm daring eager faint gentle hollow icy jolly keen lucid mellow narrow odd placid quick rapid shy
torrid urgent vivid wary young zealous brisk crisp dusty early fierce grand humble idle jagged kind loyal misty
noble ornate proud quiet rusty silent tidy upbeat vast weary bold clever dim
"""
NOUNS = """
anchor basket candle dagger engine falcon garden hammer island jacket kettle lantern mirror needle orchard pencil
quarry ribbon saddle tunnel umbrella valley window yard zebra bridge castle donkey ember fiddle glacier harbor
insect jungle kid ladder meadow nephew oyster pigeon quilt river shovel teapot uncle violin walnut acorn barrel
cradle
"""

# An excerpt of a text, in words: the chunks, a lead that is computed like a question, and the continuation.
PIECES = 6
PIECE_WORDS = 256
LEAD_WORDS = 24
CONTINUATION_WORDS = 64


def line_retrieval(seed: int = 0) -> list[Example]:
    """LongChat's line retrieval (Li et al., 2023): many lines with a name and a random number, one is asked for.

    line torrid-kid: REGISTER_CONTENT is <24169>

    Deterministic in the seed; a name occurs once in its record.
    """
    return [_record(f"lines-{n:03}", random.Random(f"{seed}:{n}")) for n in range(1, RECORDS + 1)]


def _record(id: str, rng: random.Random) -> Example:
    every = [f"{a}-{n}" for a in ADJECTIVES.split() for n in NOUNS.split()]
    numbers = {name: rng.randint(1, MAX_NUMBER) for name in rng.sample(every, CHUNKS * LINES_PER_CHUNK)}
    lines = [f"line {name}: REGISTER_CONTENT is <{number}>" for name, number in numbers.items()]
    asked = rng.choice(list(numbers))
    chunks = ["\n".join(lines[at : at + LINES_PER_CHUNK]) for at in range(0, len(lines), LINES_PER_CHUNK)]
    return Example(
        id=id,
        question=f"What is the REGISTER_CONTENT in line {asked}? Give the number.",
        answers=(str(numbers[asked]),),
        contexts=tuple(Passage(chunk, id=f"{id}:{n}") for n, chunk in enumerate(chunks)),
        task=LINES.name,
    )


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
        raise CorpusError(f"text {name} is too short: bring at least {n_words:,} words", path=name)
    return found
