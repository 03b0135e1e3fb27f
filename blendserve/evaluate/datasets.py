"""Questions with golds and passages: from a file of any known form (formats.py), or by name.

load("generated")                 ships with the package, see data/README.md; so does "facts"
load("lines")                     line retrieval, made with the seed (lines.py)
load("reference")                 Python's language reference, to go on with (words.py)
load("2wikimqa")                  LongBench's 200 questions, from the hub; so are hotpotqa, samsum and others
load("2wikimultihopqa")           the official dev split, from the hub
load("my/2wikimqa.jsonl")         any form, JSON array or JSON lines
load("questions.json")            with corpus.json or corpus.jsonl beside it, or given as `corpus`
load("wiki.test.txt")             any text, to go on with
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from blendserve.core import Passage
from blendserve.errors import CorpusError
from blendserve.evaluate import lines
from blendserve.evaluate.formats import Example, Record, from_corpus, reader_for
from blendserve.evaluate.tasks import CONTINUATION, LONGBENCH, TASKS, Task
from blendserve.evaluate.words import excerpts
from blendserve.paths import cache_folder

PASSAGES = 10  # a question's closed context, as in 2WikiMultihopQA

Nearest = Callable[[str, int], Sequence[Passage]]
"""`nearest(question, n)`: passages in falling likeness, an index's `search`, say"""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Examples, and all the passages that an open setting searches."""

    name: str
    examples: tuple[Example, ...]
    corpus: tuple[Passage, ...]  # the corpus that came with the questions, else all contexts, each once

    @property
    def task(self) -> Task:
        """What all its questions are."""
        return TASKS[self.examples[0].task]


@dataclass(frozen=True, slots=True)
class Hosted:
    """A file of a dataset repository on the hub."""

    repository: str
    file: str
    member: str = ""  # of a zip archive
    revision: str = "main"


MADE = ("lines", "reference")
BUNDLED = {
    name: Path(__file__).parent / "data" / f"{name}_questions.jsonl" for name in ("generated", "facts")
}
HOSTED = {
    **{name: Hosted("THUDM/LongBench", "data.zip", f"data/{name}.jsonl") for name in LONGBENCH},
    "2wikimultihopqa": Hosted(
        "kamelliao/2wikimultihopqa", "data/dev.json", revision="f4f0d7e4ae275d9281e90c46c93e66d6cdda3674"
    ),
}


def load(
    source: str | Path, *, corpus: str | Path | None = None, limit: int | None = None, seed: int = 0
) -> Dataset:
    """The first `limit` examples of a file, or of a dataset by name.

    Where questions only name the passages they need, distractors drawn with `seed` fill their contexts up
    (`with_distractors`; call it again to have them retrieved). Raises CorpusError, which names the record and
    the field, or says which file to put where.
    """
    if (made := _made(source, seed)) is not None:
        return _dataset(source, made[:limit])
    path = _resolve(source)
    records = _records(path)
    if not records:
        raise CorpusError(f"dataset {path} holds no questions: bring one with at least one record", path=path)
    read = reader_for(records[0])
    passages = _corpus(path, Path(corpus) if corpus else None, needed=read is from_corpus)
    by_title: dict[str, list[Passage]] = {}
    for passage in passages:
        by_title.setdefault(passage.title, []).append(passage)
    read_all = [read(record, f"{path.stem}-{n}", by_title) for n, record in enumerate(records[:limit], 1)]
    _check_ids(read_all, path)
    examples = [e if e.contexts else with_distractors(e, passages, seed=seed) for e in read_all]
    return _dataset(source, examples, passages)


def _dataset(source: str | Path, examples: Sequence[Example], corpus: Sequence[Passage] = ()) -> Dataset:
    tasks = sorted({e.task for e in examples})
    if len(tasks) > 1:
        raise CorpusError(
            f"dataset {source} has questions of several tasks ({', '.join(tasks)}), which are asked and scored apart: "
            "bring a file for each",
            setting="dataset",
            path=source,
        )
    pool = corpus or {(p.title, p.text): p for e in examples for p in e.contexts}.values()
    return Dataset(str(source), tuple(examples), tuple(pool))


def _made(source: str | Path, seed: int) -> list[Example] | None:
    """Questions that no file has: made with a seed, or of a text; None where the source is something else."""
    if str(source) == "lines":
        return lines.make(seed)
    if str(source) == "reference":
        from blendserve.retrieve import language_reference  # start-up: the retriever

        return continuations("\n\n".join(document.text for document in language_reference()), "reference")
    if Path(source).suffix == ".txt" and Path(source).is_file():
        return continuations(_text(Path(source)), Path(source).stem)
    return None


def continuations(text: str, name: str) -> list[Example]:
    """A text in excerpts, each with how it goes on. Raises CorpusError for one that is too short."""
    found = [
        Example(
            id=f"{name}-{n:03}",
            question=lead,
            answers=(continuation,),
            contexts=tuple(Passage(piece, id=f"{name}-{n:03}:{m}") for m, piece in enumerate(parts)),
            task=CONTINUATION.name,
        )
        for n, (parts, lead, continuation) in enumerate(excerpts(text), 1)
    ]
    if not found:
        raise CorpusError(f"text {name} is too short: bring at least 1,700 words", path=name)
    return found


def with_distractors(
    example: Example,
    corpus: Sequence[Passage],
    *,
    total: int = PASSAGES,
    seed: int = 0,
    nearest: Nearest | None = None,
) -> Example:
    """The example with the passages it needs among others of the corpus, `total` together, in a shuffled order.

    The others are the `nearest` ones to the question, which are hard to tell apart, or drawn at random. Both
    they and the order depend on seed and example id alone, not on the other examples.
    """
    rng = random.Random(f"{seed}:{example.id}")
    needed = [p for p in corpus if p.title in example.supporting]
    found = nearest(example.question, total + len(needed)) if nearest else rng.sample(corpus, len(corpus))
    others = [p for p in found if p.title not in example.supporting]
    contexts = [*needed, *others[: max(0, total - len(needed))]]
    rng.shuffle(contexts)
    return replace(example, contexts=tuple(contexts))


def _resolve(source: str | Path) -> Path:
    name = str(source)
    if name in BUNDLED:
        return BUNDLED[name]
    if Path(source).is_file():
        return Path(source)
    if name in HOSTED:
        return _hosted(name, HOSTED[name])
    raise CorpusError(
        f"dataset {name!r} is no file and none of the known names: {', '.join([*BUNDLED, *MADE, *HOSTED])}",
        setting="evaluate.dataset",
    )


def cached(name: str) -> Path:
    """Where the file of a dataset of the hub is once it was fetched, or put there by hand."""
    hosted = HOSTED[name]
    return (cache_folder() / "datasets" / name).with_suffix(Path(hosted.member or hosted.file).suffix)


def _hosted(name: str, hosted: Hosted) -> Path:
    """The file in the cache folder, fetched from the hub if it is not there yet."""
    target = cached(name)
    if target.is_file():
        return target
    from huggingface_hub import HfApi, hf_hub_download

    try:
        HfApi().dataset_info(
            hosted.repository, timeout=10
        )  # fails at once when offline, a download only after retries
        fetched = hf_hub_download(
            hosted.repository, hosted.file, repo_type="dataset", revision=hosted.revision
        )
    except Exception as error:  # the client's own errors differ by version
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"{hosted.member} out of its {hosted.file}" if hosted.member else hosted.file
        raise CorpusError(
            f"dataset {name!r} cannot be fetched ({reason}): get {what} from the hub's dataset {hosted.repository} "
            f"elsewhere and put it here as {target}; or use 'generated', which needs nothing",
            path=target,
        ) from error
    _place(Path(fetched), hosted.member, target)
    return target


def _place(fetched: Path, member: str, target: Path) -> None:
    """Copy the file, or the member of the archive that it is, to `target`; whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}")
    if member:
        with ZipFile(fetched) as archive, archive.open(member) as source, part.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    else:
        shutil.copyfile(fetched, part)
    os.replace(part, target)


def _corpus(path: Path, given: Path | None, needed: bool) -> list[Passage]:
    """The passages of the corpus given, or of the one beside questions that need one."""
    if given is None and not needed:
        return []
    names = [path.name.replace("questions", "corpus"), "corpus.json", "corpus.jsonl"]
    beside = [p for name in names if (p := path.with_name(name)) != path and p.is_file()]
    if given is None and not beside:
        raise CorpusError(
            f"dataset {path} names passages of a corpus that is not there: give it, or put it beside as corpus.json",
            setting="evaluate.corpus",
            path=path,
        )
    found = given or beside[0]
    return [
        Passage(r.text("text"), r.text("title"), id=f"{found.stem}:{n}", doc_id=f"{found.stem}:{n}")
        for n, r in enumerate(_records(found))
    ]


def _check_ids(examples: Sequence[Example], path: Path) -> None:
    seen: set[str] = set()
    for example in examples:
        if example.id in seen:
            raise CorpusError(
                f"dataset {path}: two questions have the id {example.id!r}: give each its own",
                setting="id",
                path=path,
            )
        seen.add(example.id)


def _records(path: Path) -> list[Record]:
    """The objects of a JSON array or of JSON lines."""
    text = _text(path)
    if text.lstrip().startswith("["):
        unit, values = "record", list(enumerate(_parsed(text, path), 1))
    else:
        lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        unit, values = "line", [(n, _parsed(line, path, n)) for n, line in lines]
    for n, value in values:
        if not isinstance(value, dict):
            raise CorpusError(
                f"{path}, {unit} {n}: is no object but {value!r:.40}: bring an array of objects, or one a line",
                path=path,
                line=n,
            )
    return [Record(value, path, n, f"{path}, {unit} {n}") for n, value in values]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise CorpusError(
            f"{path} cannot be read ({error.strerror}): check path and permissions", path=path
        ) from None
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8", path=path) from None


def _parsed(text: str, path: Path, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        where = path if line is None else f"{path}, line {line}"
        raise CorpusError(
            f"{where}: not JSON ({error}): bring an array of objects, or one a line", path=path, line=line
        ) from None
