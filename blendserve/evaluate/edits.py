"""What a store holds of a prompt's passages when they have been edited since: earlier revisions, made by a seed.

numbers names negations    one of them was another one in each passage
moved added removed        a sentence stood elsewhere, was not there yet, was still there
revised@0.05               this share of the passage's words, in stretches of 3 to 10, was other words
window                     the same text was cut into other chunks
answer                     what the question asks for was something else (data set facts): the rest is as it is

The prompt is the data set's own, so that golds hold and every kind of edit is answered by the same full prefill.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from blendserve.errors import ConfigError

if TYPE_CHECKING:  # it takes torch, and help and settings come from here
    from blendserve.core import Passage, TokenIds

WINDOW, ANSWER, REVISED = "window", "answer", "revised"
EDITS = (
    "numbers", "names", "negations", "moved", "added", "removed",
    *(f"{REVISED}@{share:g}" for share in (0.01, 0.05, 0.2)), WINDOW,
)  # fmt: skip
PHRASE = 3, 10  # words that are revised together
_SENTENCES = re.compile(r"(?<=[.!?]) +(?=[A-Z])")
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][\w-]+")
_VERB = re.compile(r"\b(is|was|are|were|has|had) (not )?")

Edit = Callable[[str, random.Random, Sequence[str]], str]
"""a passage's text, dice and the other passages' texts -> what the passage said before"""


class Fact(NamedTuple):
    """What one passage says now, and what it said before."""

    title: str
    now: str
    before: str


def is_edit(word: str) -> bool:
    """Whether this names a kind of edit."""
    name, _, share = word.partition("@")
    return word in (*_KINDS, WINDOW, ANSWER) or (name == REVISED and bool(re.fullmatch(r"0?\.\d+|1", share)))


def before(kind: str, passages: Sequence[Passage], seed: str, fact: Fact | None = None) -> list[Passage]:
    """The passages as they were; as they are where there is nothing to change, and for `window`.

    fact: what `answer` is about. Raises ConfigError where that is not known.
    """
    if kind == WINDOW:
        return list(passages)
    if kind == ANSWER:
        if fact is None:
            raise ConfigError(
                "edit 'answer' needs to know what else the answer could be: take data set facts"
            )
        return [
            replace(p, text=p.text.replace(fact.now, fact.before)) if p.title == fact.title else p
            for p in passages
        ]
    name, _, share = kind.partition("@")
    texts = [p.text for p in passages]
    edit = _revised(float(share)) if name == REVISED else _KINDS[name]
    made = []
    for n, passage in enumerate(passages):
        dice = random.Random(f"{seed}:{kind}:{n}")
        others = [text for text in texts if text != passage.text] or texts
        made.append(replace(passage, text=edit(passage.text, dice, others)))
    return made


def cut_elsewhere(chunks: Sequence[TokenIds]) -> list[TokenIds]:
    """The same tokens, cut in the middle of each chunk."""
    halves = [half for ids in chunks for half in (ids[: len(ids) // 2], ids[len(ids) // 2 :])]
    pairs = [(halves[n], halves[n + 1]) for n in range(1, len(halves) - 1, 2)]
    return [halves[0], *((*a, *b) for a, b in pairs), halves[-1]] if halves else []


def _numbers(text: str, dice: random.Random, others: Sequence[str]) -> str:
    found = list(re.finditer(r"\d+", text))
    if not found:
        return text
    one = dice.choice(found)
    digits = (
        [d for d in range(10 ** (len(one[0]) - 1), 10 ** len(one[0])) if str(d) != one[0]]
        if len(one[0]) < 6
        else [int(one[0]) + 1]
    )
    return text[: one.start()] + str(dice.choice(digits)) + text[one.end() :]


def _names(text: str, dice: random.Random, others: Sequence[str]) -> str:
    found = list(_NAME.finditer(text))
    pool = sorted({name for other in others for name in _NAME.findall(other)} - {m[0] for m in found})
    if not found or not pool:
        return text
    return text.replace(dice.choice(found)[0], dice.choice(pool))


def _negations(text: str, dice: random.Random, others: Sequence[str]) -> str:
    found = list(_VERB.finditer(text))
    if not found:
        return text
    one = dice.choice(found)
    return text[: one.start()] + (f"{one[1]} " if one[2] else f"{one[1]} not ") + text[one.end() :]


def _moved(text: str, dice: random.Random, others: Sequence[str]) -> str:
    sentences = _SENTENCES.split(text)
    if len(sentences) < 2:
        return text
    a, b = dice.sample(range(len(sentences)), 2)
    sentences.insert(b, sentences.pop(a))
    return " ".join(sentences)


def _added(text: str, dice: random.Random, others: Sequence[str]) -> str:
    sentences = _SENTENCES.split(text)
    if len(sentences) > 1:
        sentences.pop(dice.randrange(len(sentences)))
    return " ".join(sentences)


def _removed(text: str, dice: random.Random, others: Sequence[str]) -> str:
    sentences = _SENTENCES.split(text)
    sentences.insert(dice.randrange(len(sentences) + 1), dice.choice(_SENTENCES.split(dice.choice(others))))
    return " ".join(sentences)


def _revised(share: float) -> Edit:
    def edit(text: str, dice: random.Random, others: Sequence[str]) -> str:
        words, pool = text.split(" "), dice.choice(others).split(" ")
        left = max(1, round(share * len(words)))
        while left > 0:
            n = min(left, dice.randint(*PHRASE))
            at, source = dice.randrange(max(1, len(words) - n)), dice.randrange(max(1, len(pool) - n))
            words[at : at + n] = pool[source : source + n]
            left -= n
        return " ".join(words)

    return edit


_KINDS: dict[str, Edit] = {
    "numbers": _numbers,
    "names": _names,
    "negations": _negations,
    "moved": _moved,
    "added": _added,
    "removed": _removed,
}
