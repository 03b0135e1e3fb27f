"""The record formats of data sets. The first record of a file tells its format.

official    2WikiMultihopQA and HotpotQA: _id, type, question, answer, context [[title, [sentence]]], supporting_facts
longbench   LongBench: input, answers, dataset, and a context in the form of its task: "Passage 1:" before each passage,
            examples that begin with "Passage:" or "Dialogue:", or one long story
cacheblend  CacheBlend's inputs: question, answers, ctxs [{title, text}]; also MuSiQue, whose passages are `paragraphs`
            [{title, paragraph_text, is_supporting}]
squad       SQuAD: articles {title, paragraphs [{context, qas}]}; each question needs its paragraph
corpus      question, answers, and the titles it needs of a corpus file; with `counterfactual`, a fact to continue with
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
)

from blendserve.core import Passage
from blendserve.errors import CorpusError
from blendserve.evaluate.tasks import CONTINUATION, LONGBENCH, QUESTIONS

STORY_WORDS = 350  # of a piece of a story: about 500 tokens
EXAMPLES = {"triviaqa": "Passage:", "samsum": "Dialogue:"}  # tasks of examples -> how each example begins

_PASSAGE = re.compile(r"^Passage \d+:[^\S\n]*\n?", re.MULTILINE)
_EXAMPLE = re.compile(r"^(?=(?:Passage|Dialogue):)", re.MULTILINE)

Record = Mapping[str, Any]
Corpus = Mapping[str, Sequence[Passage]]  # passages by title


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
    permutation: int = 0  # which permutation of its passages; 0: the question itself (prompts.py)
    permutation_of: str = ""  # id of the question, for a permutation
    counterfactual: str = ""  # the answer before an edit; the prompt does not have it

    @property
    def is_continuation(self) -> bool:
        """Whether the question is a text to continue."""
        return self.task == CONTINUATION.name


class WrongField(Exception):
    """Arguments: name of the field, what is wrong."""


def _flat(value: Any) -> Any:
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list):
        return value
    return [answer for own in value for answer in (own if isinstance(own, list) else [own])]


def _golds(value: Any) -> Any:
    """Answers as texts: SQuAD's have their places, too."""
    is_placed = isinstance(value, list) and all(isinstance(gold, dict) for gold in value)
    return [gold.get("text") for gold in value] if is_placed else value


def _longbench_task(name: str) -> str:
    """The task of a `dataset`; LongBench-E's end in _e."""
    if (task := name.removesuffix("_e")) not in LONGBENCH:
        raise ValueError(f"use one of {', '.join(LONGBENCH)}")
    return task


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Maybe = Annotated[str, BeforeValidator(lambda value: value or ""), StringConstraints(strip_whitespace=True)]
Answers = Annotated[  # CacheBlend's are nested
    tuple[Text, ...],
    Field(min_length=1),
    BeforeValidator(_flat),
    AfterValidator(lambda a: tuple(dict.fromkeys(a))),
]


class Form(BaseModel):
    """A record; this one has what all formats share."""

    id: Maybe = Field("", validation_alias=AliasChoices("_id", "id"))
    question: Text
    answers: Answers
    type: Maybe = ""

    def example(self, id: str, corpus: Corpus) -> Example:
        """id: of a record that has none. Raises WrongField."""
        raise NotImplementedError

    def _with(self, id: str, field: str, passages: Iterable[Passage], **values: Any) -> Example:
        """Make an example with the passages of this field that have text (2WikiMultihopQA has some without)."""
        kept = [p for p in passages if p.text]
        id = self.id or id
        if not kept:
            raise WrongField(field, "passages with text are needed")
        contexts = tuple(Passage(p.text, p.title, f"{id}:{n}", f"{id}:{n}") for n, p in enumerate(kept))
        return Example(id, self.question, self.answers, contexts, self.type, **values)


class Official(Form):
    answers: Annotated[tuple[Text], BeforeValidator(lambda value: (value,))] = Field(alias="answer")
    context: list[tuple[str, list[str]]]
    supporting_facts: list[tuple[str, Any]] = []

    def example(self, id: str, corpus: Corpus) -> Example:
        passages = (
            Passage(" ".join(s.strip() for s in text).strip(), title.strip()) for title, text in self.context
        )
        supporting = tuple(dict.fromkeys(title.strip() for title, _ in self.supporting_facts))
        return self._with(id, "context", passages, supporting=supporting)


class CacheBlend(Form):
    class ContextPassage(BaseModel):
        title: Maybe = ""
        text: str = Field(validation_alias=AliasChoices("text", "paragraph_text"))
        supporting: bool = Field(False, validation_alias=AliasChoices("supporting", "is_supporting"))

    answers: Answers = Field(validation_alias=AliasChoices("answers", "answer"))
    ctxs: list[ContextPassage] = Field(validation_alias=AliasChoices("ctxs", "paragraphs"))

    def example(self, id: str, corpus: Corpus) -> Example:
        supporting = tuple(dict.fromkeys(c.title for c in self.ctxs if c.supporting))
        passages = (Passage(c.text.strip(), c.title) for c in self.ctxs)
        return self._with(id, "ctxs", passages, supporting=supporting)


class Article(BaseModel):
    """An article of SQuAD."""

    class Paragraph(BaseModel):
        class QuestionOfText(BaseModel):
            id: Maybe = ""
            question: Text
            answers: Annotated[list[Text], BeforeValidator(_golds)]

        context: Text
        qas: list[QuestionOfText]

    title: Text
    paragraphs: list[Paragraph]

    def records(self) -> Iterator[Record]:
        """A record in CacheBlend's form for each question that has an answer."""
        for paragraph in self.paragraphs:
            passage = {"title": self.title, "text": paragraph.context, "supporting": True}
            for asked in paragraph.qas:
                if asked.answers:
                    yield {**asked.model_dump(), "ctxs": [passage]}


class LongBench(Form):
    question: Maybe = Field("", alias="input")
    context: Text
    dataset: Annotated[Text, AfterValidator(_longbench_task)] | None = None

    def example(self, id: str, corpus: Corpus) -> Example:
        guesses = (task for task, begin in EXAMPLES.items() if self.context.startswith(begin))
        task = self.dataset or next(guesses, "2wikimqa" if self.question else "multi_news")
        if not self.question:
            if task != "multi_news":
                raise WrongField("input", "a question is needed")
            self.question = "What do these news say?"
        if task == "narrativeqa":
            pieces = split_words(self.context, STORY_WORDS)
            return self._with(id, "context", (Passage(piece.strip()) for piece in pieces), task=task)
        before, *parts = (_EXAMPLE if task in EXAMPLES else _PASSAGE).split(self.context)
        if before.strip() or not parts:
            begin = EXAMPLES.get(task, "Passage 1:")
            raise WrongField("context", f"with task {task} (`dataset`) it starts with `{begin}`")
        make = Passage if task in EXAMPLES else _titled
        return self._with(id, "context", (make(part.strip()) for part in parts), task=task)


class OfCorpus(Form):
    mentioned_titles: Annotated[list[Text], Field(min_length=1)]
    contexts: list[Text] = []
    counterfactual: Text | None = None

    def example(self, id: str, corpus: Corpus) -> Example:
        """Make an example. Without `contexts`, the titles of all passages in order, it has no passages yet."""
        for field in ("mentioned_titles", "contexts"):
            if missing := [title for title in getattr(self, field) if title not in corpus]:
                raise WrongField(field, f"the corpus has no passage with the title {missing[0]!r}")
        contexts = [passage for title in dict.fromkeys(self.contexts) for passage in corpus[title]]
        answers = self.answers
        task = QUESTIONS.name
        if self.counterfactual:  # the model continues the passages, title line included
            answers = tuple(f" {answer}" for answer in answers)
            task = CONTINUATION.name
            contexts = [Passage(f"{p.title}\n{p.text}\n\n", p.title, p.id, p.doc_id) for p in contexts]
        return Example(
            *(self.id or id, self.question, answers, tuple(contexts), self.type, task),
            supporting=tuple(dict.fromkeys(self.mentioned_titles)),
            counterfactual=self.counterfactual or "",
        )


class CorpusPassage(BaseModel):
    """A record of a corpus file."""

    title: Text
    text: Text


def form_of(record: Record) -> type[Form] | None:
    """The format of records like this one, by their fields; None for an unknown format."""
    if "ctxs" in record or {"question", "paragraphs"} <= record.keys():
        return CacheBlend
    if "input" in record or isinstance(record.get("context"), str):
        return LongBench
    if "context" in record:
        return Official
    return OfCorpus if "mentioned_titles" in record else None


@contextmanager
def errors_of(record: Record, path: Path, line: int) -> Iterator[None]:
    """Raise a CorpusError with file, line and field. line: of a file of lines, else the number in its array, from 1."""
    try:
        yield
        return
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        problem = error.errors()[0]["msg"]
    except WrongField as error:
        field, problem = error.args
    found = "missing" if field not in record else f"{record[field]!r:.60}"
    message = f"{path}, record {line}: field `{field}` is {found}: {problem}"
    raise CorpusError(message, setting=field, path=path, line=line)


def split_words(text: str, words: int) -> list[str]:
    """Pieces of a number of words, the last one shorter; each word keeps the white space before it."""
    found = re.findall(r"\s*\S+", text)
    return ["".join(found[at : at + words]) for at in range(0, len(found), words)]


def _titled(part: str) -> Passage:
    """A passage whose first line is its title."""
    title, _, text = part.partition("\n")
    return Passage(text.strip(), title) if text.strip() else Passage(title)
