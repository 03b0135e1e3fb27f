"""`python -m benchmarks embedding`: passages to vectors, against sentence-transformers in fp32, and the recall of both.

Each round embeds other passages with both; over a data set all rounds together embed its corpus once. Time holds
everything from text to vectors: windows, tokens, encoding. CPU time is that of all threads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import Field

from blendserve.bench.harness import Case, Column, Group, Metrics, Report, SampleLog, Table, ratio
from blendserve.bench.runner import Bench, BenchConfig
from blendserve.config import Positive, RetrieveConfig
from blendserve.core import Passage
from blendserve.errors import InputError
from blendserve.evaluate.datasets import load
from blendserve.evaluate.formats import Example
from blendserve.retrieve import Embedder, language_reference, split
from blendserve.threads import limit_torch

OURS, THEIRS = "blendserve", "sentence-transformers"
WARM_UP = 16  # passages
ALL = 10**7  # characters: all of the language reference
Vectors = tuple[list[np.ndarray], list[int]]  # by round, [windows, E]; and how many windows each passage has


class EmbeddingConfig(BenchConfig):
    """Passages to vectors."""

    embedder: str = Field(
        RetrieveConfig().embedder,
        description="Embedding model: a bundled name, a folder or a Hugging Face id.",
    )
    passages: Positive = Field(200, description="Number of passages per round if there is no data set.")
    passage_tokens: Positive = Field(
        120, description="Maximum length of these passages, in tokens of the model."
    )
    dataset: Path | None = Field(
        None, description="Data set whose corpus is embedded; recall is measured, too."
    )
    corpus: Path | None = Field(None, description="Corpus file of the data set.")
    top_k: Positive = Field(10, description="Number of retrieved passages that recall is measured over.")


def groups(config: EmbeddingConfig, log: SampleLog) -> Iterator[Group]:
    if log.done({}):
        return
    limit_torch(config.threads)
    embedders = {
        OURS: Embedder.load(config.embedder),
        THEIRS: Embedder.load(config.embedder, reference=True),
    }
    questions, passages = _texts(config, embedders[OURS])
    rounds = [passages[n :: config.repeats] for n in range(config.repeats)]
    vectors: dict[str, Vectors] = {name: ([], []) for name in embedders}
    for embedder in embedders.values():
        _embed(embedder, passages[:WARM_UP])

    def run(name: str) -> Metrics:
        part = rounds[len(vectors[name][0])]
        wall, cpu = time.perf_counter(), time.process_time()
        found, windows = _embed(embedders[name], part)
        elapsed, used = time.perf_counter() - wall, time.process_time() - cpu
        vectors[name][0].append(found)
        vectors[name][1].extend(windows)
        return {"passages_per_s": len(part) / elapsed, "passages_per_cpu_s": len(part) / used}

    def facts() -> dict[str, float | str]:
        ours, theirs = (np.concatenate(vectors[name][0]) for name in (OURS, THEIRS))
        found: dict[str, float | str] = {f"dtype, {name}": e.dtype for name, e in embedders.items()}
        found |= {
            "passages": len(passages),
            "windows": len(ours),
            "min_cosine": float((ours * theirs).sum(1).min()),
        }
        order = [passage.title for part in rounds for passage in part]
        for asked, stored in ((OURS, OURS), (THEIRS, THEIRS), (THEIRS, OURS)) if questions else ():
            queries = np.stack([embedders[asked].embed_question(q.question) for q in questions])
            nearest = _nearest(queries, vectors[stored], config.top_k)
            found[f"recall@{config.top_k}, questions by {asked}, passages by {stored}"] = recall(
                questions, nearest, order
            )
        return found

    yield Group({}, [Case({"library": name}, partial(run, name)) for name in embedders], facts, warm_up=False)


def _texts(config: EmbeddingConfig, embedder: Embedder) -> tuple[Sequence[Example], list[Passage]]:
    if config.dataset:
        data = load(config.dataset, corpus=config.corpus)
        return [e for e in data.examples if e.supporting], list(data.corpus)
    from pydoc_data.topics import topics  # half a megabyte

    room, wanted = config.passage_tokens, config.passages * config.repeats
    documents = language_reference(sorted(topics), ALL)
    encode = partial(embedder.encoder.tokenizer.encode, add_special_tokens=False)
    parts = (split(d, room, lambda p: len(encode(f"{p.title}\n{p.text}").ids)) for d in documents)
    passages = [passage for part in parts for passage in part]
    if len(passages) < wanted:
        raise InputError(
            f"the language reference has {len(passages):,} passages of {room} tokens, not {wanted:,}"
        )
    return (), passages[:wanted]


def _embed(embedder: Embedder, passages: Sequence[Passage]) -> tuple[np.ndarray, list[int]]:
    """Vectors [windows, E] of the passages, and the number of windows of each."""
    windows = embedder.cut(passages)
    return embedder.encode([w for of_passage in windows for w in of_passage]), list(map(len, windows))


def _nearest(questions: np.ndarray, vectors: Vectors, top_k: int) -> np.ndarray:
    """[questions, top_k] numbers of passages, each as near as its nearest window."""
    first = np.cumsum([0, *vectors[1][:-1]])
    scores = np.maximum.reduceat(questions @ np.concatenate(vectors[0]).T, first, axis=1)
    best: np.ndarray = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    return best


def recall(questions: Sequence[Example], nearest: np.ndarray, titles: Sequence[str]) -> float:
    """The share of the passages that a question needs among those found, mean over the questions."""
    needed = [set(question.supporting) for question in questions]
    found = [
        len(need & {titles[n] for n in row}) / len(need) for need, row in zip(needed, nearest, strict=True)
    ]
    return float(np.mean(found))


BENCH = Bench(
    EmbeddingConfig,
    groups,
    Report(
        (
            Table(
                "Embedding",
                (
                    Column("passages/s", "passages_per_s", digits=0),
                    ratio("x library", "passages_per_s", library=THEIRS),
                    Column("per CPU second", "passages_per_cpu_s", digits=0),
                    ratio("x library by CPU time", "passages_per_cpu_s", library=THEIRS),
                ),
            ),
        )
    ),
    tiny={"passages": 20, "repeats": 1},
)
