"""Edits of passages: the store holds earlier revisions, made by a seed, and the prompt has the current passages.

numbers names negations    the earlier revision of each passage has another one
moved                      a sentence is in another place
added removed              a sentence is missing, or there is one more: the edit has added or removed it
revised@0.05               this share of the words, in runs of 3 to 10, is different
window                     the same text is cut into other chunks
answer                     only the value that the question asks for is different (data set facts)

Golds are those of the current passages, and full prefill answers every kind of edit alike.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from blendserve.errors import ConfigError

if TYPE_CHECKING:  # imports torch; --help imports this module
    from blendserve.core import Passage, TokenIds

WINDOW, ANSWER, REVISED = "window", "answer", "revised"
SHARES = (0.01, 0.05, 0.2)
PHRASE = 3, 10  # words that are revised together
_SENTENCES = re.compile(r"(?<=[.!?]) +(?=[A-Z])")
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][\w-]+")
_VERB = re.compile(r"\b(is|was|are|were|has|had) (not )?")
_REVISED = re.compile(rf"{REVISED}@(0?\.\d+|1)")

Edit = Callable[[str, random.Random, Sequence[str]], str]
"""a passage's text, rng and the other passages' texts -> the earlier text"""


class Fact(NamedTuple):
    """A value in one passage, and its earlier value."""

    title: str
    now: str
    before: str


def is_edit(word: str) -> bool:
    """Whether this names a kind of edit."""
    return word in (*_KINDS, WINDOW, ANSWER) or bool(_REVISED.fullmatch(word))


def before(kind: str, passages: Sequence[Passage], seed: str, fact: Fact | None = None) -> list[Passage]:
    """The earlier revision of passages; unchanged where a text has nothing to change, and for `window`.

    fact: the value that `answer` changes. Raises ConfigError without it.
    """
    if kind == WINDOW:
        return list(passages)
    if kind == ANSWER:
        if fact is None:
            raise ConfigError("edit 'answer' needs a counterfactual answer: use data set facts")
        return [
            replace(p, text=p.text.replace(fact.now, fact.before)) if p.title == fact.title else p
            for p in passages
        ]
    name, _, share = kind.partition("@")
    edit = partial(_revised, float(share)) if name == REVISED else _KINDS[name]
    texts = [p.text for p in passages]
    made = []
    for n, passage in enumerate(passages):
        others = [text for text in texts if text != passage.text] or texts
        made.append(replace(passage, text=edit(passage.text, random.Random(f"{seed}:{kind}:{n}"), others)))
    return made


def cut_elsewhere(chunks: Sequence[TokenIds]) -> list[TokenIds]:
    """The same tokens, cut in the middle of each chunk."""
    halves = [half for ids in chunks for half in (ids[: len(ids) // 2], ids[len(ids) // 2 :])]
    ends = zip(halves[1:-1:2], halves[2:-1:2], strict=True)
    return [halves[0], *((*a, *b) for a, b in ends), halves[-1]] if halves else []


def _numbers(text: str, rng: random.Random, others: Sequence[str]) -> str:
    """Another number of as many digits."""
    if not (found := list(re.finditer(r"\d+", text))):
        return text
    one = rng.choice(found)
    low = 10 ** (len(one[0]) - 1)
    pool = [n for n in range(low, 10 * low) if str(n) != one[0]] if low < 10**5 else [int(one[0]) + 1]
    return f"{text[: one.start()]}{rng.choice(pool)}{text[one.end() :]}"


def _names(text: str, rng: random.Random, others: Sequence[str]) -> str:
    """A name of another passage, everywhere."""
    found = _NAME.findall(text)
    pool = sorted({name for other in others for name in _NAME.findall(other)} - {*found})
    return text.replace(rng.choice(found), rng.choice(pool)) if found and pool else text


def _negations(text: str, rng: random.Random, others: Sequence[str]) -> str:
    if not (found := list(_VERB.finditer(text))):
        return text
    one = rng.choice(found)
    return f"{text[: one.start()]}{one[1]} {'' if one[2] else 'not '}{text[one.end() :]}"


def _sentences(kind: str, text: str, rng: random.Random, others: Sequence[str]) -> str:
    sentences = _SENTENCES.split(text)
    if kind == "removed":  # since then
        at = rng.randrange(len(sentences) + 1)
        other = _SENTENCES.split(rng.choice(others))
        sentences.insert(at, rng.choice(other))
    elif kind == "moved" and len(sentences) > 1:
        a, b = rng.sample(range(len(sentences)), 2)
        sentences.insert(b, sentences.pop(a))
    elif len(sentences) > 1:
        sentences.pop(rng.randrange(len(sentences)))
    return " ".join(sentences)


def _revised(share: float, text: str, rng: random.Random, others: Sequence[str]) -> str:
    words = text.split(" ")
    pool = rng.choice(others).split(" ")
    left = max(1, round(share * len(words)))
    while left > 0:
        n = min(left, rng.randint(*PHRASE))
        at = rng.randrange(max(1, len(words) - n))
        source = rng.randrange(max(1, len(pool) - n))
        words[at : at + n] = pool[source : source + n]
        left -= n
    return " ".join(words)


_KINDS: dict[str, Edit] = {
    "numbers": _numbers,
    "names": _names,
    "negations": _negations,
    **{kind: partial(_sentences, kind) for kind in ("moved", "added", "removed")},
}
EDITS = (*_KINDS, *(f"{REVISED}@{share:g}" for share in SHARES), WINDOW)
