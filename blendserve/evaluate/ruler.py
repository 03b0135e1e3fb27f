"""Three tasks of RULER (Hsieh et al., 2024, arXiv 2404.06654, section 3), made from the language reference.

multivalue   one key has four values, and all of them are asked for
multiquery   four keys have a value each, and all of them are asked for
variables    a chain of five variables, each assigned the one before: all that have the first one's value are asked for

Three other keys or one other chain are hidden beside what is asked for. RULER's haystack is essays, and its keys come
from a list of words; here both are the reference's. The score is RULER's: the share of the expected words that the answer
contains.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable
from itertools import pairwise

from blendserve.core import Passage
from blendserve.errors import CorpusError
from blendserve.evaluate.formats import Example, split_words
from blendserve.evaluate.tasks import RULER
from blendserve.retrieve import language_reference

PREFIX = "ruler/"
QUESTIONS = 20
LENGTHS = {"4k": 4_096, "8k": 8_192, "16k": 16_384}  # of a prompt, in tokens
TOKENS_PER_WORD = 1.7  # of the reference, roughly
PASSAGE_WORDS = 300
NEEDLES = 4
CHAIN = 5  # variables

Needles = tuple[list[str], str, list[str]]  # sentences to hide, the question, the words of its answer


def examples(name: str) -> list[Example]:
    """The questions of `ruler/TASK/LENGTH`, always the same ones. Raises CorpusError for another name."""
    task, _, length = name.removeprefix(PREFIX).partition("/")
    if task not in MAKERS or length not in LENGTHS:
        known = f"{PREFIX}TASK/LENGTH with {', '.join(MAKERS)} and {', '.join(LENGTHS)}"
        raise CorpusError(f"dataset {name!r}: RULER's tasks are {known}", setting="evaluate.dataset")
    text = "\n\n".join(document.text for document in language_reference())
    n_words = round(LENGTHS[length] / TOKENS_PER_WORD)
    names = sorted(set(re.findall(r"\b[a-z]{6,12}\b", text)))
    haystacks = split_words(text, n_words)
    return [_example(f"{task}-{length}-{n}", haystacks, names, MAKERS[task]) for n in range(1, QUESTIONS + 1)]


def _example(id: str, haystacks: list[str], names: list[str], make: Callable[..., Needles]) -> Example:
    rng = random.Random(id)
    sentences, question, answer = make(rng, names)
    words = re.findall(r"\s*\S+", rng.choice(haystacks[:-1]))
    places = rng.sample([n for n, word in enumerate(words) if word.endswith(".")], len(sentences))
    for place, sentence in zip(sorted(places), sentences, strict=True):
        words[place] += f" {sentence}"
    pieces = split_words("".join(words), PASSAGE_WORDS)
    contexts = tuple(Passage(piece.strip(), id=f"{id}:{n}") for n, piece in enumerate(pieces))
    return Example(id, question, (" ".join(answer),), contexts, task=RULER.name)


def _numbers(rng: random.Random, n: int) -> list[str]:
    return [str(number) for number in rng.sample(range(1_000_000, 10_000_000), n)]


def _multivalue(rng: random.Random, names: list[str]) -> Needles:
    keys = rng.sample(names, NEEDLES)
    values = _numbers(rng, 2 * NEEDLES - 1)
    asked = [(keys[0], value) for value in values[:NEEDLES]]
    others = list(zip(keys[1:], values[NEEDLES:], strict=True))
    return _hidden(rng, [*asked, *others], f"What are all the special magic numbers for {keys[0]}?", asked)


def _multiquery(rng: random.Random, names: list[str]) -> Needles:
    pairs = list(zip(rng.sample(names, 2 * NEEDLES - 1), _numbers(rng, 2 * NEEDLES - 1), strict=True))
    asked = pairs[:NEEDLES]
    *most, last = (key for key, _ in asked)
    return _hidden(
        rng, pairs, f"What are all the special magic numbers for {', '.join(most)} and {last}?", asked
    )


def _hidden(
    rng: random.Random, pairs: list[tuple[str, str]], question: str, asked: list[tuple[str, str]]
) -> Needles:
    sentences = [f"One of the special magic numbers for {key} is: {value}." for key, value in pairs]
    rng.shuffle(sentences)
    return sentences, question, [value for _, value in asked]


def _variables(rng: random.Random, names: list[str]) -> Needles:
    variables = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(2 * CHAIN)]
    chains = variables[:CHAIN], variables[CHAIN:]
    values = _numbers(rng, 2)
    links = [
        [
            f"VAR {chain[0]} = {value}.",
            *(f"VAR {b} = VAR {a}." for a, b in pairwise(chain)),
        ]
        for chain, value in zip(chains, values, strict=True)
    ]
    order = rng.sample([0] * CHAIN + [1] * CHAIN, 2 * CHAIN)  # a chain stays in its order
    sentences = [links[which].pop(0) for which in order]
    question = f"Which variables are assigned the value {values[0]}, directly or by another variable?"
    return sentences, question, chains[0]


MAKERS = {"multivalue": _multivalue, "multiquery": _multiquery, "variables": _variables}
