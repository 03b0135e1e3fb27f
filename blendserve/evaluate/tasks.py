"""The prompt, answer length and metric of each kind of data set, and the scores of answers against golds.

Normalisation, exact match and F1 follow the official script of 2WikiMultihopQA (Ho et al., 2020, arXiv 2011.01060),
which has them from HotpotQA and SQuAD; over several golds the best counts. Rouge-L is the F-measure of the longest common
subsequence (Lin, 2004) of the same normalised tokens. LongBench's tasks (Bai et al., 2024, arXiv 2308.14508) are scored
by Rouge-L, or by its F1, which has no rule for yes and no. Where answers continue a list of examples (few-shot tasks),
only the first line counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blendserve.config import PromptConfig
from blendserve.evaluate.config import DECODE, PROMPT

Score = Callable[[str, Sequence[str]], float]  # answer, golds -> 0 to 1

PERPLEXITY = "perplexity"  # lower is better; a prompt's score is the mean negative log-likelihood of a token
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = frozenset({"yes", "no", "noanswer"})  # answers without a partial score


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
    said = normalise(prediction).split()
    expected = [normalise(gold).split() for gold in golds]
    return max((_harmonic(_lcs(said, e), len(said), len(e)) for e in expected), default=0.0)


def words_said(prediction: str, golds: Sequence[str]) -> float:
    """The share of a gold's words that an answer contains, as RULER scores (string_match_all)."""
    said = prediction.lower()
    return max(
        (sum(word in said for word in gold.lower().split()) / len(gold.split()) for gold in golds if gold),
        default=0.0,
    )


def _harmonic(shared: int, predicted: int, expected: int) -> float:
    """The harmonic mean of shared/predicted and shared/expected."""
    return 2 * shared / (predicted + expected) if shared else 0.0


def _lcs(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)  # of what is read of `a`, and the first j of `b`
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of data set."""

    name: str
    metric: str  # name of the score
    score: Score
    prompt: PromptConfig = PROMPT
    answer_tokens: int = DECODE.answer_tokens  # that its answers need


def _first_line(score: Score) -> Score:
    return lambda answer, golds: score(answer.lstrip("\n").partition("\n")[0], golds)


def _prompt(system: str, instruction: str) -> PromptConfig:
    return PromptConfig(system=system, instruction=instruction)


_STORY = _prompt(
    "You answer questions about stories.",
    "Read the story, then answer the question with a phrase, as short as can be. Give the answer only.",
)
_TRIVIA = _prompt(
    PROMPT.system,
    "Answer the question about the last passage with a name or a few words, as in the examples. Give the answer only.",
)
_SUMMARISE = "You summarise texts."
_DIALOGUES = _prompt(_SUMMARISE, "Summarise the last dialogue in a few short sentences, as in the examples.")
_NEWS = _prompt(_SUMMARISE, "Read the news passages, then write a summary of all of them, of one page.")

QUESTIONS = Task("questions", "F1", f1)
CONTINUATION = Task("continuation", PERPLEXITY, f1, _prompt("You go on with texts.", "Go on with this text."))

RULER = Task("ruler", "share of values said", words_said, answer_tokens=64)

_F1, _ROUGE_L = "LongBench's F1", "Rouge-L"
_LONGBENCH = (
    *(Task(name, _F1, longbench_f1) for name in ("2wikimqa", "hotpotqa", "musique")),
    Task("narrativeqa", _F1, longbench_f1, _STORY, 128),
    Task("triviaqa", _F1, _first_line(longbench_f1), _TRIVIA),
    Task("samsum", _ROUGE_L, _first_line(rouge_l), _DIALOGUES, 128),
    Task("multi_news", _ROUGE_L, rouge_l, _NEWS, 512),
)
LONGBENCH = {task.name: task for task in _LONGBENCH}
TASKS = {task.name: task for task in (QUESTIONS, CONTINUATION, RULER, *_LONGBENCH)}
