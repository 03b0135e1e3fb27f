"""One record of each known format -> an Example. The first record of a file tells its format.

official    2WikiMultihopQA and HotpotQA: _id, type, question, answer, context [[title, [sentence]]], supporting_facts
longbench   LongBench: input, answers, dataset, and a context in the form of its task: "Passage 1:" before each passage,
            examples that begin with "Passage:" or "Dialogue:", or one long story
cacheblend  CacheBlend's inputs: question, answers, ctxs [{title, text}]
corpus      question, answers, and the titles it needs of a corpus file; with `counterfactual`, a fact to continue with
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendserve.core import Passage
from blendserve.errors import CorpusError
from blendserve.evaluate.tasks import CONTINUATION, LONGBENCH, QUESTIONS

STORY_WORDS = 350  # of a piece of a story: about 500 tokens

_PASSAGE = re.compile(r"^Passage \d+:[^\S\n]*\n?", re.MULTILINE)
_EXAMPLE = re.compile(r"^(?=(?:Passage|Dialogue):)", re.MULTILINE)
_DEFAULT_INPUT = {"multi_news": "What do these news say?"}


@dataclass(frozen=True, slots=True)
class Example:
    """A question with its golds and passages."""

    id: str
    question: str
    answers: tuple[str, ...]  # any of them is right
    contexts: tuple[Passage, ...]  # in the order of the data
    type: str = ""  # of question, where the data has types
    task: str = QUESTIONS.name  # tasks.py
    supporting: tuple[
        str, ...
    ] = ()  # titles of the passages that the answer needs, where the data names them
    permutation: int = (
        0  # which permutation of its passages this is; 0: the question itself (permutations.py)
    )
    permutation_of: str = ""  # id of the question, for a permutation
    counterfactual: str = ""  # the answer before an edit; the prompt does not have it

    @property
    def is_continuation(self) -> bool:
        """Whether the question is a text to continue."""
        return self.task == CONTINUATION.name


Corpus = Mapping[str, Sequence[Passage]]
"""Passages by title"""

Parser = Callable[["Record", str, Corpus], Example]
"""record, an id if it has none, corpus -> example"""


@dataclass(frozen=True, slots=True)
class Record:
    """A JSON object whose errors name file, line and field."""

    values: Mapping[str, Any]
    path: Path
    line: int  # of a file of lines, else the number in its array, from 1
    where: str

    def text(self, field: str, default: str | None = None) -> str:
        """A non-empty string; the default replaces a missing, null or empty field."""
        value = self.values.get(field)
        if value in (None, "") and default is not None:
            return default
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(field, "a string with something in it")
        return value.strip()

    def texts(self, field: str) -> tuple[str, ...]:
        """A non-empty list of strings, perhaps nested (CacheBlend's 2WikiMQA has [[alias, ...], ...])."""
        items = [i for item in self.items(field) for i in (item if isinstance(item, list) else [item])]
        if not items or not all(isinstance(item, str) and item.strip() for item in items):
            raise self.wrong(field, "a list of at least one string")
        return tuple(dict.fromkeys(item.strip() for item in items))

    def items(self, field: str) -> list[Any]:
        """A list; empty for a missing field."""
        value = self.values.get(field, [])
        if not isinstance(value, list):
            raise self.wrong(field, "a list")
        return value

    def wrong(self, field: str, expected: str) -> CorpusError:
        found = "missing" if field not in self.values else f"{self.values[field]!r:.60}"
        problem = f"{self.where}: field `{field}` must be {expected}, but is {found}"
        return CorpusError(problem, setting=field, path=self.path, line=self.line)


def parser_for(record: Record) -> Parser:
    """The parser of records like this one. Raises CorpusError for an unknown format."""
    values = record.values
    if "ctxs" in values:
        return _cacheblend
    if "input" in values or isinstance(values.get("context"), str):
        return _longbench
    if "context" in values:
        return _official
    if "mentioned_titles" in values:
        return from_corpus
    raise CorpusError(
        f"{record.where}: the fields {', '.join(values) or '(none)'} are of no known format: bring `context` "
        f"(2WikiMultihopQA or LongBench), `ctxs` (CacheBlend), or `mentioned_titles` and a corpus",
        path=record.path,
        line=record.line,
    )


def _official(record: Record, fallback_id: str, corpus: Corpus) -> Example:
    contexts = []
    for item in record.items("context"):
        match item:
            case [str(title), list(sentences)] if all(isinstance(s, str) for s in sentences):
                contexts.append(Passage(" ".join(s.strip() for s in sentences).strip(), title.strip()))
            case _:
                raise record.wrong("context", "a list of [title, [sentence, ...]]")
    facts = record.items("supporting_facts")
    if not all(isinstance(fact, list) and fact and isinstance(fact[0], str) for fact in facts):
        raise record.wrong("supporting_facts", "a list of [title, sentence number]")
    return Example(
        id=(id := record.text("_id", fallback_id)),
        question=record.text("question"),
        answers=(record.text("answer"),),
        contexts=_passages(record, "context", id, contexts),
        type=record.text("type", ""),
        supporting=tuple(dict.fromkeys(fact[0].strip() for fact in facts)),
    )


def _longbench(record: Record, fallback_id: str, corpus: Corpus) -> Example:
    context = record.text("context")
    task = _longbench_task(record, context)
    split = {"narrativeqa": _story, "triviaqa": _examples, "samsum": _examples}.get(task, _numbered)
    return Example(
        id=(id := record.text("_id", fallback_id)),
        question=record.text("input", _DEFAULT_INPUT.get(task)),
        answers=record.texts("answers"),
        contexts=_passages(record, "context", id, split(record, context)),
        type=record.text("type", ""),
        task=task,
    )


def _longbench_task(record: Record, context: str) -> str:
    """The record's `dataset`, or a guess from its context."""
    if "dataset" in record.values:
        task = record.text("dataset").removesuffix("_e")  # LongBench-E
        if task not in LONGBENCH:
            raise record.wrong("dataset", f"one of {', '.join(LONGBENCH)}")
        return task
    for task, beginning in {"triviaqa": "Passage:", "samsum": "Dialogue:"}.items():
        if context.startswith(beginning):
            return task
    return "2wikimqa" if str(record.values.get("input", "")).strip() else "multi_news"


def _numbered(record: Record, context: str) -> list[Passage]:
    before, *parts = _PASSAGE.split(context)
    if before.strip() or not parts:
        expected = "passages that start with `Passage 1:` (or name another task in `dataset`)"
        raise record.wrong("context", expected)
    titled = [part.strip().partition("\n") for part in parts]
    return [Passage(text.strip() or title, title if text.strip() else "") for title, _, text in titled]


def _examples(record: Record, context: str) -> list[Passage]:
    before, *parts = _EXAMPLE.split(context)
    if before.strip() or not parts:
        raise record.wrong("context", "examples that start with `Passage:` or `Dialogue:`")
    return [Passage(part.strip()) for part in parts]


def _story(record: Record, context: str) -> list[Passage]:
    return [Passage(piece.strip()) for piece in split_words(context, STORY_WORDS)]


def split_words(text: str, words: int) -> list[str]:
    """Pieces of a number of words, the last one shorter; each word keeps the white space before it."""
    found = re.findall(r"\s*\S+", text)
    return ["".join(found[at : at + words]) for at in range(0, len(found), words)]


def _cacheblend(record: Record, fallback_id: str, corpus: Corpus) -> Example:
    contexts = []
    for item in record.items("ctxs"):
        text, title = (item.get("text"), item.get("title") or "") if isinstance(item, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(title, str):
            raise record.wrong("ctxs", 'a list of {"title": ..., "text": ...}')
        contexts.append(Passage(text.strip(), title.strip()))
    return Example(
        id=(id := record.text("id", fallback_id)),
        question=record.text("question"),
        answers=record.texts("answers"),
        contexts=_passages(record, "ctxs", id, contexts),
        type=record.text("type", ""),
    )


def from_corpus(record: Record, fallback_id: str, corpus: Corpus) -> Example:
    """Without `contexts`, the titles of all passages in order, the example has no passages yet."""
    needed = record.texts("mentioned_titles")
    titles = record.texts("contexts") if "contexts" in record.values else ()
    for field, title in [*(("mentioned_titles", t) for t in needed), *(("contexts", t) for t in titles)]:
        if title not in corpus:
            raise record.wrong(field, f"titles of passages in the corpus ({title!r} is none)")
    contexts, answers = [passage for title in titles for passage in corpus[title]], record.texts("answers")
    about: dict[str, Any] = {}
    if "counterfactual" in record.values:  # the model continues the passages, title line included
        about = {"task": CONTINUATION.name, "counterfactual": record.text("counterfactual")}
        contexts = [Passage(f"{p.title}\n{p.text}\n\n", p.title, p.id, p.doc_id) for p in contexts]
        answers = tuple(f" {answer}" for answer in answers)
    return Example(
        id=record.text("id", fallback_id),
        question=record.text("question"),
        answers=answers,
        contexts=tuple(contexts),
        type=record.text("type", ""),
        supporting=needed,
        **about,
    )


def _passages(record: Record, field: str, id: str, contexts: Sequence[Passage]) -> tuple[Passage, ...]:
    """With ids, without passages that have no text (2WikiMultihopQA has some). Raises CorpusError if none is left."""
    kept = [p for p in contexts if p.text]
    if not kept:
        raise record.wrong(field, "passages with text")
    return tuple(Passage(p.text, p.title, f"{id}:{n}", f"{id}:{n}") for n, p in enumerate(kept))
