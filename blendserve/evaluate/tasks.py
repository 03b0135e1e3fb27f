"""The prompt, answer length and metric of each kind of data set.

LongBench's tasks (Bai et al., 2024, arXiv 2308.14508) are scored as its own script does (metrics.py). Where answers
continue a list of examples (few-shot tasks), only the first line counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blendserve.config import PromptConfig
from blendserve.evaluate.config import DECODE, PROMPT
from blendserve.evaluate.metrics import f1, longbench_f1, longbench_rouge_l

Score = Callable[[str, Sequence[str]], float]  # answer, golds -> 0 to 1

PERPLEXITY = "perplexity"  # lower is better; a prompt's score is the mean negative log-likelihood of a token


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of data set."""

    name: str
    metric: str  # name of the score
    score: Score
    prompt: PromptConfig = PROMPT
    answer_tokens: int = DECODE.max_new_tokens  # that its answers need


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
_DIALOGUES = _prompt(
    "You summarise texts.", "Summarise the last dialogue in a few short sentences, as in the examples."
)
_NEWS = _prompt(
    "You summarise texts.", "Read the news passages, then write a summary of all of them, of one page."
)

QUESTIONS = Task("questions", "F1", f1)
CONTINUATION = Task("continuation", PERPLEXITY, f1, _prompt("You go on with texts.", "Go on with this text."))

_F1, _ROUGE_L = "LongBench's F1", "LongBench's Rouge-L"
_LONGBENCH = (
    *(Task(name, _F1, longbench_f1) for name in ("2wikimqa", "hotpotqa", "musique")),
    Task("narrativeqa", _F1, longbench_f1, _STORY, 128),
    Task("triviaqa", _F1, _first_line(longbench_f1), _TRIVIA),
    Task("samsum", _ROUGE_L, _first_line(longbench_rouge_l), _DIALOGUES, 128),
    Task("multi_news", _ROUGE_L, longbench_rouge_l, _NEWS, 512),
)
LONGBENCH = {task.name: task for task in _LONGBENCH}
TASKS = {task.name: task for task in (QUESTIONS, CONTINUATION, *_LONGBENCH)}
