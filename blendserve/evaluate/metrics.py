"""Scores of answers against golds.

Normalisation, exact match and F1 follow the official script of 2WikiMultihopQA (Ho et al., 2020, arXiv 2011.01060),
which has them from HotpotQA and SQuAD; over several golds the best counts. Rouge-L is the F-measure of the longest common
subsequence (Lin, 2004) of the same normalised tokens. LongBench's scores (Bai et al., 2024, arXiv 2308.14508) differ:
`longbench_f1` has no rule for yes and no, `longbench_rouge_l` is that of the package `rouge`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = frozenset({"yes", "no", "noanswer"})  # answers without a partial score
_EPSILON = 1e-8  # in the denominator of the package `rouge`


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, articles and extra white space, in this order."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """1.0 if the prediction equals a gold after normalisation, else 0.0."""
    return float(any(normalise(prediction) == normalise(gold) for gold in golds))


def f1(prediction: str, golds: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over bags of tokens.

    Where either side is "yes", "no" or "noanswer", only the same answer scores. An empty side scores 0, as in the
    official script.
    """
    said = normalise(prediction)
    return longbench_f1(
        prediction, [g for g in golds if said == normalise(g) or _CLOSED.isdisjoint((said, normalise(g)))]
    )


def longbench_f1(prediction: str, golds: Sequence[str]) -> float:
    """F1 over bags of tokens without the rule for yes and no."""
    said = Counter(normalise(prediction).split())
    bags = [Counter(normalise(gold).split()) for gold in golds]
    return max((_harmonic((said & bag).total(), said.total(), bag.total()) for bag in bags), default=0.0)


def agreement(answer: str, reference: str) -> float:
    """F1 of an answer with full prefill's as its gold; two equal answers agree, even on nothing."""
    return 1.0 if answer == reference else f1(answer, [reference])


def rouge_l(prediction: str, golds: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the longest common subsequence."""
    said, expected = normalise(prediction).split(), [normalise(gold).split() for gold in golds]
    return max((_harmonic(_lcs(said, e)[-1][-1], len(said), len(e)) for e in expected), default=0.0)


def longbench_rouge_l(prediction: str, golds: Sequence[str]) -> float:
    """Rouge-L of the package `rouge`, over words as they are written; it is not Lin's.

    Every sentence of the gold is aligned with every sentence of the prediction. The *set* of words in any of these
    longest common subsequences counts, against the sets of words of both sides. The package fails on a very long
    sentence, which LongBench counts as 0; this does not.
    """
    return max((_package_rouge_l(prediction, gold) for gold in golds), default=0.0)


def _harmonic(shared: int, predicted: int, expected: int) -> float:
    """Of shared/predicted and shared/expected."""
    return 2 * shared / (predicted + expected) if shared else 0.0


def _package_rouge_l(prediction: str, gold: str) -> float:
    ours, theirs = _sentences(prediction), _sentences(gold)
    if not ours or not theirs:
        return 0.0
    common = set[str]().union(*(_common(expected, said) for expected in theirs for said in ours))
    precision = len(common) / len({word for words in ours for word in words})
    recall = len(common) / len({word for words in theirs for word in words})
    return 2 * precision * recall / (precision + recall + _EPSILON)


def _sentences(text: str) -> list[list[str]]:
    """The words of each sentence; white space alone is one empty word, as in the package."""
    return [sentence.split() or [""] for sentence in text.split(".") if sentence]


def _common(a: Sequence[str], b: Sequence[str]) -> set[str]:
    """Words of a longest common subsequence; of several, the one that follows the end of `a` longest."""
    lengths = _lcs(a, b)
    found, i, j = set[str](), len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            found.add(a[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def _lcs(a: Sequence[str], b: Sequence[str]) -> list[list[int]]:
    """[i][j]: length of the longest common subsequence of the first i and the first j words."""
    lengths = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a, 1):
        for j, y in enumerate(b, 1):
            same = lengths[i - 1][j - 1] + 1
            lengths[i][j] = same if x == y else max(lengths[i - 1][j], lengths[i][j - 1])
    return lengths
