"""Finds the passages that support each sentence of an answer, by the words that they share.

A passage is cited if it has nearly all words of the sentence, and also words of the question or many of a long sentence.
Words count more the fewer passages of the prompt have them. On 70 questions of HotpotQA, attention to passages named
wrong ones more often (`python -m scripts.compare_citations`). So did lower limits: a wrong citation is worse than none.
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

SAID = 0.8  # least share of the sentence that a cited passage has, by weight of words
ASKED = 0.3  # and least share of the question,
MANY_WORDS = 6  # or least number of the sentence's words
MOST = 2  # citations of a sentence
UNKNOWN = 0.5  # passages that a word is taken to be in that none has


class Citer:
    """Finds the passages of one prompt that support a sentence."""

    def __init__(self, passages: Sequence[Passage], question: str) -> None:
        self._passages = passages
        self._words = [set(words_of(passage.chunk_text)) for passage in passages]
        self._counts = Counter(word for words in self._words for word in words)
        asked = _meaning(question)
        self._asked = [self._share(asked, words) for words in self._words]

    def cite(self, text: str) -> Iterator[Citation]:
        """Yield the citations of each sentence of a text, the best first."""
        for start, end in sentences(text):
            for citation in self.of_sentence(text[start:end]):
                yield replace(citation, start=start, end=end)

    def of_sentence(self, sentence: str) -> list[Citation]:
        """Return the citations of one sentence, the best first."""
        said = _meaning(sentence)
        found: list[tuple[float, int]] = []
        for n, words in enumerate(self._words):
            share = self._share(said, words)
            asked = self._asked[n]
            if share >= SAID and (asked >= ASKED or len(said & words) >= MANY_WORDS):
                found.append((-share - asked, n))
        return [self._citation(n, said, len(sentence)) for _, n in sorted(found)[:MOST]]

    def _citation(self, n: int, said: set[str], length: int) -> Citation:
        """Return the citation of a passage, with its sentence that shares most with the answer's."""
        text = self._passages[n].text
        spans = sentences(text) or [(0, len(text))]
        quote = max(spans, key=lambda span: self._weight(said & set(words_of(text[slice(*span)]))))
        return Citation(0, length, n, *quote, text[slice(*quote)])

    def _share(self, said: set[str], words: set[str]) -> float:
        """Return the share of these words that a passage has, by weight."""
        return self._weight(said & words) / max(self._weight(said), 1e-9)

    def _weight(self, words: Iterable[str]) -> float:
        n = len(self._passages) + 1
        return sum(math.log(n / self._counts.get(word, UNKNOWN)) for word in words)


def _meaning(text: str) -> set[str]:
    """Return the words of a text without function words and words of questions."""
    return {*words_of(text)} - ASKING
