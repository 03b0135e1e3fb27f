"""`python -m benchmarks index_size`: search, addition and deletion in indexes of many passages.

The passages are stretches of the sources of Python's standard library. A part of them is embedded; each other vector is
the sum of an embedded one and half of another, so that they cluster as embeddings do. Questions are the beginnings of
stretches that are not in the index. `search` is all of it but the embedding of the question: both rankings, their fusion,
and the texts. Its recall is that of the nearest vectors, against a comparison of all. A change is timed with the search
behind it, the first to see it.
"""

from __future__ import annotations

import random
import statistics
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from pydantic import Field

from blendserve.bench.fixture import scratch
from blendserve.bench.harness import Case, Column, Group, Metrics, SampleLog, ms, table
from blendserve.bench.runner import Bench, BenchConfig, open_model
from blendserve.config import Positive, PromptConfig, RetrieveConfig
from blendserve.core import Document, Passage, PassageFilter, run
from blendserve.engine.documents import token_counter
from blendserve.engine.prompt import PromptBuilder
from blendserve.retrieve import Embedder, TokenCounter, VectorIndex
from blendserve.retrieve.database import FILE
from blendserve.retrieve.index import ANY
from blendserve.retrieve.tables import EmbeddedDocument
from blendserve.timing import Clock

Filter = dict[str, object]

LINES = 16  # of a passage
ASKED = 200  # characters of a question
IN_DOCUMENT = 10  # passages
AT_ONCE = 500  # documents of a transaction
K = RetrieveConfig().top_k
SECOND = 0.5  # by which clusters are about as hard to search as those of as many embedded passages
SOME: Filter = {"tenth": 3}  # a filter that a tenth of the documents fulfil
MOST: Filter = {"tenth": [*range(9)]}


class IndexSizeConfig(BenchConfig):
    """Indexes of several sizes."""

    sizes: tuple[Positive, ...] = Field((10_000, 100_000), description="Numbers of passages.")
    embedded: Positive = Field(4000, description="Number of passages that are embedded.")
    questions: Positive = Field(50, description="Number of questions in a round.")
    changes: Positive = Field(10, description="Number of documents to add and delete in a round.")


class Remembering(Embedder):
    """Embeds each question once."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__(embedder.encoder, embedder.name, embedder.fingerprint)
        self._known: dict[str, np.ndarray] = {}

    def embed_question(self, question: str) -> np.ndarray:
        if question not in self._known:
            self._known[question] = super().embed_question(question)
        return self._known[question]


def groups(config: IndexSizeConfig, log: SampleLog) -> Iterator[Group]:
    model, embedder = open_model(config, log), Embedder.load()
    prompts = PromptBuilder(model.tokenizer, PromptConfig())
    tokens = token_counter(model.name, str(model.decoder.dtype), model.fingerprint, prompts)
    for size in config.sizes:
        texts = stretches(config.seed)
        questions = [text[:ASKED] for text in islice(texts, config.questions)]
        passages = [*islice(texts, size)]
        vectors = spread(embed(embedder, passages[: min(config.embedded, size)]), size, config.seed)
        with scratch(config.folder) as folder:
            index = make_index(folder, Remembering(embedder), tokens, passages, vectors)
            with closing(index):
                exact = [nearest(vectors, index.embedder.embed_question(question)) for question in questions]
                size_of = partial(file_size, folder / FILE)
                cases = [
                    Case({"of": "search"}, partial(search, index, questions, exact)),
                    Case({"of": "search, a tenth of all"}, partial(search, index, questions, (), SOME)),
                    Case({"of": "search, nine tenths"}, partial(search, index, questions, (), MOST)),
                    Case({"of": "embedding of a question"}, partial(embed_questions, embedder, questions)),
                    Case({"of": "change"}, partial(change, index, texts, questions, config.changes)),
                    Case({"of": "opening"}, partial(reopen, index)),
                ]
                yield Group({"passages": size}, cases, size_of)


def stretches(seed: int) -> Iterator[str]:
    """Distinct texts of LINES lines, in an order that the seed chooses."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files = [file for file in files if "site-packages" not in file.parts]
    random.Random(seed).shuffle(files)
    sources = [[line for line in _read(file).split("\n") if line.strip()] for file in files]
    known = set[str]()
    for first in range(LINES):
        for lines in sources:
            for at in range(first, len(lines), LINES):
                text = "\n".join(lines[at : at + LINES])
                if text not in known:
                    known.add(text)
                    yield text


def _read(file: Path) -> str:
    return file.read_text("utf-8", "replace").replace("\0", "")


def embed(embedder: Embedder, texts: Sequence[str]) -> np.ndarray:
    """Their unit vectors, of the first window of each."""
    windows = [windows[0] for windows in run(embedder.cut([Passage(text) for text in texts]))]
    return run(embedder.encode(windows))


def spread(known: np.ndarray, n: int, seed: int) -> np.ndarray:
    """The known vectors, and others each of one of them and half of another: n unit vectors."""
    rng = np.random.default_rng(seed)
    first, second = known[rng.integers(len(known), size=(2, n - len(known)))]
    made = np.concatenate([known, first + SECOND * second])
    unit: np.ndarray = made / np.linalg.norm(made, axis=1, keepdims=True)
    return unit


def make_index(
    folder: Path, embedder: Embedder, tokens: TokenCounter, passages: Sequence[str], vectors: np.ndarray
) -> VectorIndex:
    """An index of these passages; each has one vector."""
    index = VectorIndex.create(folder, embedder, tokens, chunk_tokens=RetrieveConfig().chunk_tokens)
    documents = list[EmbeddedDocument]()
    for n, start in enumerate(range(0, len(passages), IN_DOCUMENT)):
        texts = [("", text) for text in passages[start : start + IN_DOCUMENT]]
        own = [vector[None] for vector in vectors[start : start + IN_DOCUMENT]]
        documents.append(EmbeddedDocument(f"d{n}", "", "", texts, own, {"tenth": n % 10}))
    for start in range(0, len(documents), AT_ONCE):
        index.commit(documents[start : start + AT_ONCE])
    return index


def nearest(vectors: np.ndarray, query: np.ndarray) -> set[str]:
    """The ids of the K nearest passages."""
    best = np.argsort(-(vectors @ query), kind="stable")[:K].tolist()
    return {f"d{n // IN_DOCUMENT}:{n % IN_DOCUMENT}" for n in best}


def file_size(file: Path) -> dict[str, int]:
    return {"bytes": file.stat().st_size}


def search(
    index: VectorIndex,
    questions: Sequence[str],
    exact: Sequence[set[str]],
    filter: Filter | None = None,
) -> Metrics:
    """Median and largest time of a search. exact: the nearest passages of each question."""
    selection = PassageFilter(filter=filter) if filter else ANY
    times, found = list[float](), list[float]()
    for question in questions:
        clock = Clock()
        index.search(question, K, selection)
        times.append(clock.elapsed())
    for question, wanted in zip(questions, exact, strict=False):
        near = index.candidates(question, K, selection).near[:K]
        found.append(len(wanted & {passage.id for passage in near}) / K)
    recall = {"recall": statistics.mean(found)} if found else {}
    return {"time_s": statistics.median(times), "worst_s": max(times), **recall}


def embed_questions(embedder: Embedder, questions: Sequence[str]) -> Metrics:
    times = list[float]()
    for question in questions:
        clock = Clock()
        embedder.embed_question(question)
        times.append(clock.elapsed())
    return {"time_s": statistics.median(times), "worst_s": max(times)}


def change(index: VectorIndex, texts: Iterator[str], questions: Sequence[str], n: int) -> Metrics:
    """Add documents and delete them, each time with a search behind it."""
    times: dict[str, list[float]] = {}
    for question, text in zip(cycle(questions), islice(texts, n)):
        embedded, clock = run(index.embed_steps([Document(text, id="new")])), Clock()
        with clock.stage("add_s"):
            index.commit(embedded)
        with clock.stage("added_s"):
            index.search(question, K)
        with clock.stage("delete_s"):
            index.delete("new")
        with clock.stage("deleted_s"):
            index.search(question, K)
        for name, seconds in clock.seconds.items():
            times.setdefault(name, []).append(seconds)
    return {name: statistics.median(each) for name, each in times.items()}


def reopen(index: VectorIndex) -> Metrics:
    clock = Clock()
    with closing(VectorIndex.open(index.path, index.embedder, index.tokens)):
        return {"time_s": clock.elapsed()}


TABLE = table(
    "Indexes by their number of passages",
    ms("ms", "time_s"),
    ms("slowest", "worst_s", spread=False),
    Column("recall@6", "recall", 1.0, 3, spread=False),
    ms("add", "add_s"),
    ms("search after it", "added_s"),
    ms("delete", "delete_s"),
    ms("search after it ", "deleted_s"),
)
TINY = {"sizes": (40,), "embedded": 20, "questions": 3, "changes": 2}
BENCH = Bench(IndexSizeConfig, groups, (TABLE,), tiny=TINY)
