"""One record of each known form -> an Example. Which form a file has is read from its first record.

official    2WikiMultihopQA and HotpotQA: _id, type, question, answer, context [[title, [sentence]]], supporting_facts
longbench   LongBench: input, answers, dataset, and a context that each task has its own form of: "Passage 1:" before each
            passage, examples that begin with "Passage:" or "Dialogue:", or one long story
cacheblend  CacheBlend's inputs: question, answers, ctxs [{title, text}]
corpus      question, answers and the titles it needs, of passages in a corpus file beside it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blendserve.core import Passage
from blendserve.errors import CorpusError
from blendserve.evaluate.tasks import CONTINUATION, LONGBENCH, QUESTIONS
from blendserve.evaluate.words import pieces


@dataclass(frozen=True, slots=True)
class Example:
    """A question with its golds and the passages that come with it. Filled by evaluate/datasets.py."""

    id: str
    question: str
    answers: tuple[str, ...]  # any of them is right
    contexts: tuple[Passage, ...]  # in the order of the data
    type: str = ""  # of 2WikiMultihopQA's four; "" where the data has none
    task: str = QUESTIONS.name  # tasks.py: how it is asked and scored
    supporting: tuple[str, ...] = ()  # titles of the passages that the answer needs, where the data says so
    shuffle: int = (
        0  # which of its question's shuffles this is, from 1 (shuffles.py); 0 = the question itself
    )
    shuffled: str = ""  # id of that question, for a shuffle
    rival: str = ""  # another answer, which the prompt does not have, where the data knows one


Corpus = Mapping[str, Sequence[Passage]]
"""Passages by title."""

Reader = Callable[["Record", str, Corpus], Example]
"""record, an id in case it has none, corpus -> example"""


@dataclass(frozen=True, slots=True)
class Record:
    """A JSON object that says which field of which line is wrong."""

    values: Mapping[str, Any]
    path: Path
    line: int  # of a file of lines, else the number of the record in its array, from 1
    where: str  # both, for messages

    def text(self, field: str, default: str | None = None) -> str:
        """A string with something in it; the default stands in for a missing, null or empty field."""
        value = self.values.get(field)
        if value in (None, "") and default is not None:
            return default
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(field, "a string with something in it")
        return value.strip()

    def texts(self, field: str) -> tuple[str, ...]:
        """A non-empty list of strings, perhaps nested (CacheBlend's 2WikiMQA has [[alias, ...], ...])."""
        value = self.values.get(field)
        flat = (
            [alias for item in value for alias in (item if isinstance(item, list) else [item])]
            if isinstance(value, list)
            else []
        )
        if not flat or not all(isinstance(item, str) and item.strip() for item in flat):
            raise self.wrong(field, "a list of at least one string")
        return tuple(dict.fromkeys(item.strip() for item in flat))

    def items(self, field: str) -> list[Any]:
        """A list, perhaps missing."""
        value = self.values.get(field, [])
        if not isinstance(value, list):
            raise self.wrong(field, "a list")
        return value

    def wrong(self, field: str, expected: str) -> CorpusError:
        found = "missing" if field not in self.values else f"{self.values[field]!r:.60}"
        problem = f"{self.where}: field `{field}` must be {expected}, but is {found}"
        return CorpusError(problem, setting=field, path=self.path, line=self.line)


def reader_for(record: Record) -> Reader:
    """How to read records like this one. Raises CorpusError when it is of no known form."""
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
        f"{record.where}: has the fields {', '.join(values) or '(none)'} and is of no known form: bring `context` "
        f"(2WikiMultihopQA or LongBench), `ctxs` (CacheBlend), or `mentioned_titles` and a corpus",
        path=record.path,
        line=record.line,
    )


def _official(record: Record, fallback_id: str, corpus: Corpus) -> Example:
    contexts = []
    for item in record.items("context"):
        match item:
            case [str(title), list(sentences)] if all(isinstance(s, str) for s in sentences):
                contexts.append(
                    Passage(text=" ".join(s.strip() for s in sentences).strip(), title=title.strip())
                )
            case _:
                raise record.wrong("context", "a list of [title, [sentence, ...]]")
    facts = record.items("supporting_facts")
    if not all(isinstance(fact, list) and fact and isinstance(fact[0], str) for fact in facts):
        raise record.wrong("supporting_facts", "a list of [title, sentence number]")
    return _example(
        record,
        id=record.text("_id", fallback_id),
        question=record.text("question"),
        answers=(record.text("answer"),),
        contexts=contexts,
        supporting=[fact[0].strip() for fact in facts],
        field="context",
    )


STORY_WORDS = 350  # of a piece of a story: about 500 tokens
_PASSAGE = re.compile(r"^Passage \d+:[^\S\n]*\n?", re.MULTILINE)
_EXAMPLE = re.compile(r"^(?=(?:Passage|Dialogue):)", re.MULTILINE)
_ASKED = {"multi_news": "What do these news say?"}  # where LongBench has no input


def _longbench(record: Record, fallback_id: str, corpus: Corpus) -> Example:
    context = record.text("context")
    task = _longbench_task(record, context)
    split = {"narrativeqa": _of_story, "triviaqa": _examples, "samsum": _examples}.get(task, _numbered)
    return _example(
        record,
        id=record.text("_id", fallback_id),
        question=record.text("input", _ASKED.get(task)),
        answers=record.texts("answers"),
        contexts=split(record, context),
        field="context",
        task=task,
    )


def _longbench_task(record: Record, context: str) -> str:
    """What the record says, or what its context looks like."""
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
        raise record.wrong(
            "context",
            "passages that start with `Passage 1:` (or name another task in `dataset`)",
        )
    titled = [part.strip().partition("\n") for part in parts]
    return [
        Passage(text=text.strip() or title, title=title if text.strip() else "") for title, _, text in titled
    ]


def _examples(record: Record, context: str) -> list[Passage]:
    """Each with what it asks and its answer."""
    before, *parts = _EXAMPLE.split(context)
    if before.strip() or not parts:
        raise record.wrong("context", "examples that start with `Passage:` or `Dialogue:`")
    return [Passage(part.strip()) for part in parts]


def _of_story(record: Record, context: str) -> list[Passage]:
    return [Passage(piece.strip()) for piece in pieces(context, STORY_WORDS)]


def _cacheblend(record: Record, fallback_id: str, corpus: Corpus) -> Example:
    contexts = []
    for item in record.items("ctxs"):
        text, title = (item.get("text"), item.get("title") or "") if isinstance(item, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(title, str):
            raise record.wrong("ctxs", 'a list of {"title": ..., "text": ...}')
        contexts.append(Passage(text=text.strip(), title=title.strip()))
    return _example(
        record,
        id=record.text("id", fallback_id),
        question=record.text("question"),
        answers=record.texts("answers"),
        contexts=contexts,
        field="ctxs",
    )


def from_corpus(record: Record, fallback_id: str, corpus: Corpus) -> Example:
    """Without `contexts`, the titles of all passages in their order, the example has none yet."""
    needed = record.texts("mentioned_titles")
    titles = record.texts("contexts") if "contexts" in record.values else ()
    for field, title in [*(("mentioned_titles", t) for t in needed), *(("contexts", t) for t in titles)]:
        if title not in corpus:
            raise record.wrong(field, f"titles of passages in the corpus ({title!r} is none)")
    example = Example(
        id=record.text("id", fallback_id),
        question=record.text("question"),
        answers=record.texts("answers"),
        contexts=tuple(passage for title in titles for passage in corpus[title]),
        type=record.text("type", ""),
        supporting=needed,
    )
    return _fact(example, record) if "counterfactual" in record.values else example


def _fact(example: Example, record: Record) -> Example:
    """A fact to continue a passage with, and the value that the passage stated before an edit."""
    return replace(
        example,
        answers=tuple(f" {answer}" for answer in example.answers),
        contexts=tuple(replace(p, text=f"{p.title}\n{p.text}\n\n") for p in example.contexts),
        task=CONTINUATION.name,
        rival=record.text("counterfactual"),
    )


def _example(
    record: Record,
    *,
    id: str,
    question: str,
    answers: Sequence[str],
    contexts: Sequence[Passage],
    field: str,
    supporting: Sequence[str] = (),
    task: str = QUESTIONS.name,
) -> Example:
    """Passages without text are left out (2WikiMultihopQA has some), unless nothing is left."""
    passages = [
        Passage(p.text, p.title, id=p.id or f"{id}:{n}", doc_id=p.doc_id or f"{id}:{n}")
        for n, p in enumerate(p for p in contexts if p.text)
    ]
    if not passages:
        raise record.wrong(field, "passages with text")
    return Example(
        id,
        question,
        tuple(answers),
        tuple(passages),
        record.text("type", ""),
        task,
        tuple(dict.fromkeys(supporting)),
    )
