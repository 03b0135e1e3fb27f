"""Load questions by name, or from a file of any known format (formats.py).

load("generated")                 ships with the package, like "facts" (data/README.md)
load("lines")                     line retrieval, made with the seed (synthetic.py)
load("reference")                 Python's language reference, to continue
load("2wikimqa")                  LongBench's 200 questions, from the hub; also hotpotqa, samsum and others
load("2wikimultihopqa")           the official dev split, from the hub
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
from blendserve.evaluate.formats import Example, OfPassage, Record, from_corpus, parser_for
from blendserve.evaluate.synthetic import continuations, line_retrieval
from blendserve.evaluate.tasks import LONGBENCH, TASKS, Task

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


@dataclass(frozen=True, slots=True)
class Hosted:
    """A file of a dataset repository on the hub."""

    repository: str
    file: str
    member: str = ""  # of a zip archive
    revision: str = "main"


BUNDLED = {
    name: Path(__file__).parent / "data" / f"{name}_questions.jsonl" for name in ("generated", "facts")
}
SYNTHETIC = ("lines", "reference")
HOSTED = {
    **{name: Hosted("THUDM/LongBench", "data.zip", f"data/{name}.jsonl") for name in LONGBENCH},
    "2wikimultihopqa": Hosted(
        "kamelliao/2wikimultihopqa", "data/dev.json", revision="f4f0d7e4ae275d9281e90c46c93e66d6cdda3674"
    ),
}


def load(
    source: str | Path, *, corpus: str | Path | None = None, limit: int | None = None, seed: int = 0
) -> Dataset:
    """The first `limit` examples of a data set.

    Where questions only name the passages they need, distractors drawn with `seed` complete their contexts
    (`with_distractors`). Raises CorpusError with file, line and field, or with the file to download.
    """
    passages: list[Passage] = []
    if (made := _synthetic(source, seed)) is not None:
        examples = made[:limit]
    else:
        path, text = _read(source)
        records = _records(path, text)
        parse = parser_for(records[0])
        if corpus is not None or parse is from_corpus:
            passages = _corpus(Path(corpus) if corpus else _corpus_beside(path))
        by_title: dict[str, list[Passage]] = {}
        for passage in passages:
            by_title.setdefault(passage.title, []).append(passage)
        examples = [
            parse(record, f"{path.stem}-{n}", by_title) for n, record in enumerate(records[:limit], 1)
        ]
        examples = [e if e.contexts else with_distractors(e, passages, seed=seed) for e in examples]
    (repeated, n), tasks = Counter(e.id for e in examples).most_common(1)[0], {e.task for e in examples}
    if n > 1:
        raise CorpusError(
            f"dataset {source}: two questions have the id {repeated!r}: give each its own",
            setting="id",
            path=source,
        )
    if len(tasks) > 1:
        raise CorpusError(
            f"dataset {source} mixes several tasks ({', '.join(sorted(tasks))}), which have their own prompts and "
            "metrics: bring a file for each",
            setting="dataset",
            path=source,
        )
    pool = passages or {(p.title, p.text): p for e in examples for p in e.contexts}.values()
    return Dataset(str(source), tuple(examples), tuple(pool))


def _synthetic(source: str | Path, seed: int) -> list[Example] | None:
    """Questions without a file, or of a text; None for other sources."""
    if str(source) == "lines":
        return line_retrieval(seed)
    if str(source) == "reference":
        from blendserve.retrieve import language_reference  # start-up: the retriever

        return continuations("\n\n".join(document.text for document in language_reference()), "reference")
    if Path(source).suffix == ".txt" and Path(source).is_file():
        return continuations(_text(Path(source)), Path(source).stem)
    return None


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


def _read(source: str | Path) -> tuple[Path, str]:
    """The text of a file or of a named data set, and its path for messages and ids."""
    name = str(source)
    path = BUNDLED.get(name, Path(source))
    if path.is_file():
        return path, _text(path)
    if name in HOSTED:
        return Path(name), _download(name, HOSTED[name])
    raise CorpusError(
        f"dataset {name!r} is no file and no known name: {', '.join([*BUNDLED, *SYNTHETIC, *HOSTED])}",
        setting="evaluate.dataset",
    )


def _download(name: str, hosted: Hosted) -> str:
    """The file's text, from the hub's client and its cache."""
    from huggingface_hub import hf_hub_download

    where: dict[str, Any] = {"repo_type": "dataset", "revision": hosted.revision}
    try:
        try:
            path = hf_hub_download(hosted.repository, hosted.file, local_files_only=True, **where)
        except Exception:  # not in the cache
            path = hf_hub_download(hosted.repository, hosted.file, **where)
    except Exception as error:  # the client's own errors differ by version
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CorpusError(
            f"dataset {name!r} cannot be downloaded ({reason}): get {hosted.member or hosted.file} from the hub's "
            f"dataset {hosted.repository} elsewhere and give the file as --dataset; 'generated' needs nothing",
            setting="evaluate.dataset",
        ) from error
    if not hosted.member:
        return _text(Path(path))
    with ZipFile(path) as archive:
        return archive.read(hosted.member).decode("utf-8-sig")


def _corpus(path: Path) -> list[Passage]:
    parsed = [record.parse(OfPassage) for record in _records(path, _text(path))]
    ids = [f"{path.stem}:{n}" for n in range(len(parsed))]
    return [Passage(p.text, p.title, id, id) for id, p in zip(ids, parsed, strict=True)]


def _corpus_beside(path: Path) -> Path:
    """The corpus in the folder of the questions. Raises CorpusError."""
    names = (path.name.replace("questions", "corpus"), "corpus.json", "corpus.jsonl")
    found = [p for name in names if (p := path.with_name(name)) != path and p.is_file()]
    if not found:
        raise CorpusError(
            f"dataset {path} names passages of a missing corpus: give --corpus, or put corpus.json beside it",
            setting="evaluate.corpus",
            path=path,
        )
    return found[0]


def _records(path: Path, text: str) -> list[Record]:
    """The objects of a JSON array or of JSON lines. Raises CorpusError, also for none."""
    if text.lstrip().startswith("["):
        values = list(enumerate(_parsed(text, path), 1))
    else:
        lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        values = [(n, _parsed(line, path, n)) for n, line in lines]
    for n, value in values:
        if not isinstance(value, dict):
            problem = f"{value!r:.40} is no object: bring an array of objects, or one per line"
            raise CorpusError(f"{path}, record {n}: {problem}", path=path, line=n)
    if not values:
        raise CorpusError(f"{path} holds no records: bring a file with at least one", path=path)
    return [Record(value, path, n) for n, value in values]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        problem = f"cannot be read ({error.strerror}): check path and permissions"
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 (byte {error.start}): save it as UTF-8"
    raise CorpusError(f"{path} {problem}", path=path)


def _parsed(text: str, path: Path, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        where = path if line is None else f"{path}, line {line}"
        problem = f"{where}: not JSON ({error}): bring an array of objects, or one a line"
        raise CorpusError(problem, path=path, line=line) from None
