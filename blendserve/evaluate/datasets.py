"""Load questions by name, or from a file of any known format (formats.py).

load("generated")                 ships with the package, like "facts" (data/README.md)
load("reference")                 Python's language reference, to continue
load("ruler/multiquery/8k")       tasks of RULER over the language reference (ruler.py)
load("2wikimqa")                  LongBench's 200 questions, from the hub; also hotpotqa, samsum and others
load("my/2wikimqa.jsonl")         a JSON array or JSON lines
load("questions.json")            with corpus.json or corpus.jsonl beside it, or given as `corpus`
load("wiki.test.txt")             any text, to continue
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from blendserve.core import Passage
from blendserve.errors import CorpusError
from blendserve.evaluate import formats, ruler
from blendserve.evaluate.formats import Example, OfCorpus, Record, errors_of, split_words
from blendserve.evaluate.tasks import CONTINUATION, LONGBENCH, TASKS, Task

FORM = "write an array of objects, or one per line"
PASSAGES = 10  # of a question's closed context, as in 2WikiMultihopQA


@dataclass(frozen=True, slots=True)
class Dataset:
    """Examples, and the passages that the open setting searches."""

    name: str
    examples: tuple[Example, ...]
    corpus: tuple[Passage, ...]  # the corpus of the questions, else all contexts, each once

    @property
    def task(self) -> Task:
        """The task of all its questions."""
        return TASKS[self.examples[0].task]


DATA = Path(__file__).parent / "data"
BUNDLED = {name: DATA / f"{name}_questions.jsonl" for name in ("generated", "facts")}
# An excerpt of a text, in words: the chunks, a lead that is computed like a question, and the continuation.
PIECES = 6
PIECE_WORDS = 256
LEAD_WORDS = 24
CONTINUATION_WORDS = 64

LONGBENCH_FILE = "THUDM/LongBench", "data.zip"  # repository on the hub, and its archive


def load(
    source: str | Path, *, corpus: str | Path | None = None, limit: int | None = None, seed: int = 0
) -> Dataset:
    """The first `limit` examples of a data set.

    Where questions only name the passages they need, distractors drawn with `seed` complete their contexts
    (`with_distractors`). Raises CorpusError with file, line and field, or with the file to download.
    """
    name = str(source)
    passages: list[Passage] = []
    if name.startswith(ruler.PREFIX):
        examples = ruler.examples(name)[:limit]
        return Dataset(name, tuple(examples), tuple(p for e in examples for p in e.contexts))
    path, text = _read(name)
    if path.suffix == ".txt":
        examples = continuations(text, path.stem)[:limit]
    else:
        examples, passages = _parsed(path, text, Path(corpus) if corpus else None, limit)
        examples = [e if e.contexts else with_distractors(e, passages, seed=seed) for e in examples]
    repeated, n = Counter(e.id for e in examples).most_common(1)[0]
    tasks = {e.task for e in examples}
    if n > 1:
        problem = f"dataset {name}: two questions have the id {repeated!r}: give each its own"
        raise CorpusError(problem, setting="id", path=name)
    if len(tasks) > 1:
        problem = f"dataset {name} mixes several tasks ({', '.join(sorted(tasks))}): write a file for each"
        raise CorpusError(problem, setting="dataset", path=name)
    pool = passages or {(p.title, p.text): p for e in examples for p in e.contexts}.values()
    return Dataset(name, tuple(examples), tuple(pool))


def continuations(text: str, name: str) -> list[Example]:
    """Consecutive excerpts of a text, each with its continuation, for perplexity. Raises CorpusError for a short text.

    | piece | ... | piece | lead | continuation |
    """
    n_words = PIECES * PIECE_WORDS + LEAD_WORDS + CONTINUATION_WORDS
    found: list[Example] = []
    for n, excerpt in enumerate(split_words(text, n_words), 1):
        if len(excerpt.split()) == n_words:
            pieces = split_words(excerpt, PIECE_WORDS)
            lead, *answer = split_words("".join(pieces[PIECES:]), LEAD_WORDS)
            contexts = (Passage(piece, id=f"{name}-{n:03}:{m}") for m, piece in enumerate(pieces[:PIECES]))
            whole = lead, ("".join(answer),), tuple(contexts)
            found.append(Example(f"{name}-{n:03}", *whole, task=CONTINUATION.name))
    if not found:
        raise CorpusError(f"text {name} is too short: at least {n_words:,} words are needed", path=name)
    return found


def with_distractors(
    example: Example, corpus: Sequence[Passage], *, total: int = PASSAGES, seed: int = 0
) -> Example:
    """The example with the passages it needs and random ones, `total` together, shuffled by seed and example id."""
    rng = random.Random(f"{seed}:{example.id}")
    needed = [p for p in corpus if p.title in example.supporting]
    others = [p for p in rng.sample(corpus, len(corpus)) if p.title not in example.supporting]
    contexts = [*needed, *others[: max(0, total - len(needed))]]
    rng.shuffle(contexts)
    return replace(example, contexts=tuple(contexts))


def _parsed(
    path: Path, text: str, corpus: Path | None, limit: int | None
) -> tuple[list[Example], list[Passage]]:
    """Examples, and the passages of the corpus, which only the questions that name titles need."""
    records = _records(path, text)
    form = formats.form_of(records[0][1])
    if form is None:
        problem = (
            f"{path}, record 1: the fields {', '.join(records[0][1]) or '(none)'} are of no known format: use `context` "
            "(2WikiMultihopQA or LongBench), `ctxs` (CacheBlend), or `mentioned_titles` and a corpus"
        )
        raise CorpusError(problem, path=path, line=records[0][0])
    passages = _corpus(corpus or _corpus_beside(path)) if corpus or form is OfCorpus else []
    by_title: dict[str, list[Passage]] = {}
    for passage in passages:
        by_title.setdefault(passage.title, []).append(passage)
    examples = []
    for n, (line, record) in enumerate(records[:limit], 1):
        with errors_of(record, path, line):
            examples.append(form.model_validate(record).example(f"{path.stem}-{n}", by_title))
    return examples, passages


def _corpus(path: Path) -> list[Passage]:
    passages = []
    for n, (line, record) in enumerate(_records(path, _text(path))):
        with errors_of(record, path, line):
            found = formats.CorpusPassage.model_validate(record)
            id = f"{path.stem}:{n}"
            passages.append(Passage(found.text, found.title, id, id))
    return passages


def _corpus_beside(path: Path) -> Path:
    """The corpus in the folder of the questions. Raises CorpusError."""
    for name in (path.name.replace("questions", "corpus"), "corpus.json", "corpus.jsonl"):
        if name != path.name and (found := path.with_name(name)).is_file():
            return found
    problem = (
        f"dataset {path} names passages of a missing corpus: give --corpus, or put corpus.json beside it"
    )
    raise CorpusError(problem, setting="evaluate.corpus", path=path)


def _read(name: str) -> tuple[Path, str]:
    """The text of a file or of a named data set, and its path for messages and ids."""
    path = BUNDLED.get(name, Path(name))
    if path.is_file():
        return path, _text(path)
    if name == "reference":
        from blendserve.retrieve import language_reference  # start-up: the retriever

        return Path("reference.txt"), "\n\n".join(document.text for document in language_reference())
    if name in LONGBENCH:
        return Path(name), _download(name)
    known = ", ".join([*BUNDLED, "reference", *LONGBENCH, "ruler/TASK/LENGTH"])
    raise CorpusError(
        f"dataset {name!r} is neither a file nor a known name: {known}", setting="evaluate.dataset"
    )


def _download(task: str) -> str:
    """The task's file, from the hub's client, which reads its cache without a network."""
    from huggingface_hub import hf_hub_download

    repository, file = LONGBENCH_FILE
    member = f"data/{task}.jsonl"
    try:
        path = hf_hub_download(repository, file, repo_type="dataset")
    except Exception as error:  # the client's own errors differ by version
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CorpusError(
            f"dataset {task!r} cannot be downloaded ({reason}): get {member} from the hub's dataset {repository} "
            "elsewhere and give the file as --dataset; 'generated' needs nothing",
            setting="evaluate.dataset",
        ) from error
    with ZipFile(path) as archive:
        return archive.read(member).decode("utf-8-sig")


def _records(path: Path, text: str) -> list[tuple[int, Record]]:
    """(line, object) of a JSON array or of JSON lines. Raises CorpusError, also for none."""
    is_array = text.lstrip().startswith("[")
    values: list[tuple[int, Any]] = []
    for n, part in enumerate([text] if is_array else text.split("\n"), 1):
        try:
            values += [(n, json.loads(part))] if part.strip() else []
        except (ValueError, RecursionError) as error:
            where = path if is_array else f"{path}, line {n}"
            problem = f"{where}: not JSON ({error}): {FORM}"
            raise CorpusError(problem, path=path, line=None if is_array else n) from None
    values = [*enumerate(values[0][1], 1)] if is_array else values
    for n, value in values:
        if not isinstance(value, dict):
            raise CorpusError(
                f"{path}, record {n}: {value!r:.40} is not an object: {FORM}", path=path, line=n
            )
    values = [pair for n, value in values for pair in _of_articles(path, n, value)]
    if not values:
        raise CorpusError(f"{path} has no records: at least one is needed", path=path)
    return values


def _of_articles(path: Path, n: int, record: Record) -> list[tuple[int, Record]]:
    """A record, or one for each question of SQuAD's articles."""
    articles = record.get("data", [record] if {"title", "paragraphs"} == record.keys() else None)
    if not isinstance(articles, list):
        return [(n, record)]
    with errors_of(record, path, n):
        found = [formats.Article.model_validate(article) for article in articles]
    return [(n, record) for article in found for record in article.records()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        problem = f"cannot be read ({error.strerror}): check path and permissions"
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 (byte {error.start}): save it as UTF-8"
    raise CorpusError(f"{path} {problem}", path=path)
