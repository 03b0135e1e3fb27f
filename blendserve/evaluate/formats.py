"""One record of each known format -> an Example. The first record of a file tells its format.

official    2WikiMultihopQA and HotpotQA: _id, type, question, answer, context [[title, [sentence]]], supporting_facts
longbench   LongBench: input, answers, dataset, and a context in the form of its task: "Passage 1:" before each passage,
            examples that begin with "Passage:" or "Dialogue:", or one long story
cacheblend  CacheBlend's inputs: question, answers, ctxs [{title, text}]
corpus      question, answers, and the titles it needs of a corpus file; with `counterfactual`, a fact to continue with
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, ValidationError

from blendserve.core import Passage
from blendserve.errors import CorpusError
from blendserve.evaluate.tasks import CONTINUATION, LONGBENCH, QUESTIONS

STORY_WORDS = 350  # of a piece of a story: about 500 tokens

_PASSAGE = re.compile(r"^Passage \d+:[^\S\n]*\n?", re.MULTILINE)
_EXAMPLE = re.compile(r"^(?=(?:Passage|Dialogue):)", re.MULTILINE)
_NEWS_QUESTION = "What do these news say?"

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Maybe = Annotated[str, BeforeValidator(lambda value: value or ""), StringConstraints(strip_whitespace=True)]
Answers = Annotated[list[Text | list[Text]], Field(min_length=1)]  # CacheBlend's are nested


@dataclass(frozen=True, slots=True)
class Example:
    """A question with its golds and passages."""

    id: str
    question: str
    answers: tuple[str, ...]  # any of them is right
    contexts: tuple[Passage, ...]  # in the order of the data
    type: str = ""  # of question, where the data has types
    task: str = QUESTIONS.name  # tasks.py
    supporting: tuple[str, ...] = ()  # titles of the passages that the answer needs, if known
    permutation: int = 0  # which permutation of its passages; 0: the question itself (permutations.py)
    permutation_of: str = ""  # id of the question, for a permutation
    counterfactual: str = ""  # the answer before an edit; the prompt does not have it

    @property
    def is_continuation(self) -> bool:
        """Whether the question is a text to continue."""
        return self.task == CONTINUATION.name


class Official(BaseModel):
    id: Maybe = Field("", alias="_id")
    question: Text
    answer: Text
    type: Maybe = ""
    context: list[tuple[str, list[str]]]
    supporting_facts: list[tuple[str, Any]] = []


class LongBench(BaseModel):
    id: Maybe = Field("", alias="_id")
    input: Maybe = ""
    answers: Answers
    type: Maybe = ""
    context: Text
    dataset: Text | None = None


class Asked(BaseModel):
    """What CacheBlend's records and those of a corpus share."""

    id: Maybe = ""
    question: Text
    answers: Answers
    type: Maybe = ""


class Context(BaseModel):
    title: Maybe = ""
    text: str


class CacheBlend(Asked):
    ctxs: list[Context]


class OfCorpus(Asked):
    mentioned_titles: Annotated[list[Text], Field(min_length=1)]
    contexts: list[Text] = []
    counterfactual: Text | None = None


class OfPassage(BaseModel):
    """A record of a corpus file."""

    title: Text
    text: Text


Format = TypeVar("Format", bound=BaseModel)
Corpus = Mapping[str, Sequence[Passage]]  # passages by title
Parser = Callable[["Record", str, Corpus], Example]  # record, an id if it has none, corpus


@dataclass(frozen=True, slots=True)
class Record:
    """A JSON object whose errors name file, line and field."""

    values: Mapping[str, Any]
    path: Path
    line: int  # of a file of lines, else the number in its array, from 1

    def parse(self, form: type[Format]) -> Format:
        """Raises CorpusError."""
        try:
            return form.model_validate(self.values)
        except ValidationError as error:
            first = error.errors()[0]
            raise self.wrong(str(first["loc"][0]), first["msg"]) from None

    def wrong(self, field: str, problem: str) -> CorpusError:
        found = "missing" if field not in self.values else f"{self.values[field]!r:.60}"
        message = f"{self.path}, record {self.line}: field `{field}` is {found}: {problem}"
        return CorpusError(message, setting=field, path=self.path, line=self.line)


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
        f"{record.path}, record {record.line}: the fields {', '.join(values) or '(none)'} are of no known format: bring "
        "`context` (2WikiMultihopQA or LongBench), `ctxs` (CacheBlend), or `mentioned_titles` and a corpus",
        path=record.path,
        line=record.line,
    )


def _official(record: Record, fallback_id: str, corpus: Corpus) -> Example:
    found = record.parse(Official)
    id, titled = found.id or fallback_id, [(title.strip(), text) for title, text in found.context]
    passages = (Passage(" ".join(s.strip() for s in text).strip(), title) for title, text in titled)
    contexts = _passages(record, "context", id, passages)
    supporting = tuple(dict.fromkeys(title.strip() for title, _ in found.supporting_facts))
    return Example(id, found.question, (found.answer,), contexts, found.type, supporting=supporting)


def _cacheblend(record: Record, fallback_id: str, corpus: Corpus) -> Example:
    found = record.parse(CacheBlend)
    id = found.id or fallback_id
    contexts = _passages(record, "ctxs", id, (Passage(c.text.strip(), c.title) for c in found.ctxs))
    return Example(id, found.question, _flat(found.answers), contexts, found.type)


def _longbench(record: Record, fallback_id: str, corpus: Corpus) -> Example:
    found = record.parse(LongBench)
    task, id = _longbench_task(record, found), found.id or fallback_id
    question = found.input or (_NEWS_QUESTION if task == "multi_news" else "")
    if not question:
        raise record.wrong("input", "a question is needed")
    if task == "narrativeqa":
        texts = [Passage(piece.strip()) for piece in split_words(found.context, STORY_WORDS)]
    else:
        is_examples = task in ("triviaqa", "samsum")
        before, *parts = (_EXAMPLE if is_examples else _PASSAGE).split(found.context)
        if before.strip() or not parts:
            start = "`Passage:` or `Dialogue:`" if is_examples else "`Passage 1:`"
            raise record.wrong("context", f"with task {task} (`dataset`) it starts with {start}")
        texts = [Passage(part.strip()) if is_examples else _titled(part.strip()) for part in parts]
    contexts = _passages(record, "context", id, texts)
    return Example(id, question, _flat(found.answers), contexts, found.type, task)


def _longbench_task(record: Record, found: LongBench) -> str:
    """The record's `dataset`, or a guess from its context."""
    if found.dataset is not None:
        task = found.dataset.removesuffix("_e")  # LongBench-E
        if task not in LONGBENCH:
            raise record.wrong("dataset", f"use one of {', '.join(LONGBENCH)}")
        return task
    for task, beginning in {"triviaqa": "Passage:", "samsum": "Dialogue:"}.items():
        if found.context.startswith(beginning):
            return task
    return "2wikimqa" if found.input else "multi_news"


def _titled(part: str) -> Passage:
    """A passage whose first line is its title."""
    title, _, text = part.partition("\n")
    return Passage(text.strip(), title) if text.strip() else Passage(title)


def split_words(text: str, words: int) -> list[str]:
    """Pieces of a number of words, the last one shorter; each word keeps the white space before it."""
    found = re.findall(r"\s*\S+", text)
    return ["".join(found[at : at + words]) for at in range(0, len(found), words)]


def from_corpus(record: Record, fallback_id: str, corpus: Corpus) -> Example:
    """Without `contexts`, the titles of all passages in order, the example has no passages yet."""
    found = record.parse(OfCorpus)
    for field, titles in (("mentioned_titles", found.mentioned_titles), ("contexts", found.contexts)):
        for title in titles:
            if title not in corpus:
                raise record.wrong(field, f"the corpus has no passage with the title {title!r}")
    answers, task, needed = _flat(found.answers), QUESTIONS.name, tuple(dict.fromkeys(found.mentioned_titles))
    contexts = [passage for title in dict.fromkeys(found.contexts) for passage in corpus[title]]
    if found.counterfactual:  # the model continues the passages, title line included
        task, answers = CONTINUATION.name, tuple(f" {answer}" for answer in answers)
        contexts = [Passage(f"{p.title}\n{p.text}\n\n", p.title, p.id, p.doc_id) for p in contexts]
    return Example(
        *(found.id or fallback_id, found.question, answers, tuple(contexts), found.type, task, needed),
        counterfactual=found.counterfactual or "",
    )


def _flat(answers: Iterable[str | list[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(a for own in answers for a in (own if isinstance(own, list) else [own])))


def _passages(record: Record, field: str, id: str, contexts: Iterable[Passage]) -> tuple[Passage, ...]:
    """With ids, without passages that have no text (2WikiMultihopQA has some). Raises CorpusError if none is left."""
    kept = [p for p in contexts if p.text]
    if not kept:
        raise record.wrong(field, "passages with text are needed")
    return tuple(Passage(p.text, p.title, f"{id}:{n}", f"{id}:{n}") for n, p in enumerate(kept))
