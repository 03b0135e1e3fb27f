"""Which passages the sentences of an answer rest on, by the words that they share.

A passage is cited for a sentence that says little else, if it also has words of the question, or of a long sentence. Rare
words count more: those that few passages of the prompt have, and most those that none has. On 70 questions of HotpotQA,
attention to passages named wrong ones more often (`python -m scripts.compare_citations`). So did lower limits: a wrong
citation is worse than none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from blendserve.answer import Citation
from blendserve.core import Passage
from blendserve.retrieve.structure import sentences
from blendserve.retrieve.terms import words_of
from blendserve.retrieve.words import ASKING

SAID = 0.8  # share of a sentence that its passage must have, by weight of words
ASKED = 0.3  # share of the question that it must have,
MANY_WORDS = 6  # or number of words of the sentence
MOST = 2  # passages of a sentence
UNKNOWN = 0.5  # passages that have a word which none has


class Citer:
    """Finds the passages of one prompt that sentences rest on."""

    def __init__(self, passages: Sequence[Passage], question: str) -> None:
        self._passages = passages
        self._words = [set(words_of(passage.chunk_text)) for passage in passages]
        self._counts = Counter(word for words in self._words for word in words)
        asked = _meaning(question)
        self._asked = [self._share(asked, words) for words in self._words]

    def cite(self, text: str) -> Iterator[Citation]:
        """The citations of each sentence of a text, the best first."""
        for start, end in sentences(text):
            for citation in self.of_sentence(text[start:end]):
                yield replace(citation, start=start, end=end)

    def of_sentence(self, sentence: str) -> list[Citation]:
        """The citations of one sentence, the best first."""
        said = _meaning(sentence)
        found: list[tuple[float, int]] = []
        for n, words in enumerate(self._words):
            share = self._share(said, words)
            asked = self._asked[n]
            if share >= SAID and (asked >= ASKED or len(said & words) >= MANY_WORDS):
                found.append((-share - asked, n))
        return [self._citation(n, said, len(sentence)) for _, n in sorted(found)[:MOST]]

    def _citation(self, n: int, said: set[str], length: int) -> Citation:
        """The citation of a passage, with its sentence that has most of what is said."""
        text = self._passages[n].text
        spans = sentences(text) or [(0, len(text))]
        quote = max(spans, key=lambda span: self._weight(said & set(words_of(text[slice(*span)]))))
        return Citation(0, length, n, *quote, text[slice(*quote)])

    def _share(self, said: set[str], words: set[str]) -> float:
        """The share of what is said that a passage has."""
        return self._weight(said & words) / max(self._weight(said), 1e-9)

    def _weight(self, words: Iterable[str]) -> float:
        n = len(self._passages) + 1
        return sum(math.log(n / self._counts.get(word, UNKNOWN)) for word in words)


def _meaning(text: str) -> set[str]:
    """The words of a text that tell something."""
    return {*words_of(text)} - ASKING
