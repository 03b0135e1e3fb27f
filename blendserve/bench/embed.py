"""`blendserve bench embed`: passages to vectors, against sentence-transformers in fp32, and what recall that costs.

Each round embeds other passages, with both, in turns; over a data set all rounds together embed its corpus once. Seconds
hold everything from text to vectors: cutting into windows, tokenising, encoding. CPU seconds are of all threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from blendserve.bench.config import EmbedConfig
from blendserve.bench.figures import Figures, Update, ratios, spread
from blendserve.bench.machine import where
from blendserve.bench.tables import Table, plain
from blendserve.core import Passage
from blendserve.errors import InputError
from blendserve.evaluate.datasets import load
from blendserve.evaluate.formats import Example
from blendserve.retrieve import Embedder, language_reference, split
from blendserve.threads import limit_torch

OURS, THEIRS, MIXED = "blendserve", "sentence-transformers", "blendserve, questions by sentence-transformers"
WARM_UP = 16  # passages
EVERYTHING = 10**7  # characters: all of the language reference

Vectors = tuple[list[np.ndarray], list[int]]  # by round, [windows, E]; and how many windows each passage has
Embedded = dict[str, Vectors]  # by whom


def measure(
    config: EmbedConfig,
    say: Callable[[str], None] = lambda _: None,
    update: Update = lambda done, total: None,
) -> Figures:
    """Everything that the bench prints. Raises CorpusError, InputError, ModelError."""
    limit_torch(config.threads)
    embedders = {
        OURS: Embedder.load(config.embedder),
        THEIRS: Embedder.load(config.embedder, reference=True),
    }
    questions, passages = _texts(config, embedders[OURS])
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in embedders}
    found: Embedded = {name: ([], []) for name in embedders}
    for embedder in embedders.values():
        embedder.embed_passages(passages[:WARM_UP])
    rounds = [passages[n :: config.repeats] for n in range(config.repeats)]
    for done, part in enumerate(rounds):
        for name in list(embedders)[:: -1 if done % 2 else 1]:
            seconds[name].append(_timed(embedders[name], part, found[name]))
        update(done + 1, config.repeats)
    figures = {"bench": "embed", **where(config), **_speed(seconds, [len(part) for part in rounds])}
    figures |= {"dtype": {name: embedder.dtype for name, embedder in embedders.items()}}
    figures |= {"windows": sum(found[OURS][1]), "least_cosine": _least_cosine(found)}
    if questions:
        say("Searching")
        order = [passage for part in rounds for passage in part]
        figures["recall"] = _recalls(questions, order, embedders, found, config.top_k)
    return figures


def tables(figures: Figures) -> list[Table]:
    rows = [
        (
            name,
            figures["dtype"][name],
            plain(rate, "{:,.0f}"),
            plain(figures["passages_per_cpu_second"][name], "{:,.0f}"),
            "" if name == THEIRS else plain(figures["faster"]),
            "" if name == THEIRS else plain(figures["faster_by_cpu_time"]),
        )
        for name, rate in figures["passages_per_second"].items()
    ]
    columns = ("", "dtype", "passages/s", "a CPU second", "faster", "by CPU time")
    count, threads = figures["passages"], figures["machine"]["threads"]
    found: list[Table] = [
        (f"{count:,} passages, {figures['windows']:,} windows, {threads} threads", columns, rows)
    ]
    if "recall" in figures:
        recall, top_k = figures["recall"], figures["settings"]["top_k"]
        shown = [(name, f"{value:.4f}") for name, value in recall.items()]
        found.append(
            ("What questions need among the nearest passages", ("vectors by", f"recall@{top_k}"), shown)
        )
    return found


def _texts(config: EmbedConfig, embedder: Embedder) -> tuple[Sequence[Example], list[Passage]]:
    if config.dataset:
        data = load(config.dataset, corpus=config.corpus)
        return [e for e in data.examples if e.supporting], list(data.corpus)
    documents = language_reference(_topics(), EVERYTHING)
    room = config.passage_tokens
    cut = (split(d, room, lambda p: embedder.count_tokens(f"{p.title}\n{p.text}")) for d in documents)
    passages = [passage for part in cut for passage in part]
    wanted = config.passages * config.repeats
    if len(passages) < wanted:
        raise InputError(
            f"the language reference has {len(passages):,} passages of {room} tokens, not {wanted:,}: ask for fewer "
            "passages or rounds, or give a data set"
        )
    return (), passages[:wanted]


def _topics() -> list[str]:
    from pydoc_data.topics import topics  # start-up: half a megabyte

    return sorted(topics)


def _timed(embedder: Embedder, passages: Sequence[Passage], found: Vectors) -> tuple[float, float]:
    """Embed -> seconds, and of CPU; what came of it is appended."""
    wall, cpu = time.perf_counter(), time.process_time()
    vectors, windows = embedder.embed_passages(passages)
    took = time.perf_counter() - wall, time.process_time() - cpu
    found[0].append(vectors)
    found[1].extend(windows)
    return took


def _speed(seconds: dict[str, list[tuple[float, float]]], counts: Sequence[int]) -> Figures:
    def rates(name: str, clock: int) -> list[float]:
        return [n / took[clock] for n, took in zip(counts, seconds[name], strict=True)]

    return {
        "passages": sum(counts),
        "passages_per_second": {name: spread(rates(name, 0)) for name in seconds},
        "passages_per_cpu_second": {name: spread(rates(name, 1)) for name in seconds},
        "faster": ratios(rates(OURS, 0), rates(THEIRS, 0)),
        "faster_by_cpu_time": ratios(rates(OURS, 1), rates(THEIRS, 1)),
    }


def _least_cosine(found: Embedded) -> float:
    ours, theirs = (np.concatenate(found[name][0]) for name in (OURS, THEIRS))
    return float((ours * theirs).sum(1).min())


def _recalls(
    questions: Sequence[Example],
    passages: Sequence[Passage],
    embedders: dict[str, Embedder],
    found: Embedded,
    top_k: int,
) -> dict[str, float]:
    asked = {
        name: np.stack([e.embed_question(q.question) for q in questions]) for name, e in embedders.items()
    }
    pairs = {OURS: (OURS, OURS), THEIRS: (THEIRS, THEIRS), MIXED: (THEIRS, OURS)}
    titles = [passage.title for passage in passages]
    return {
        name: recall(questions, _nearest(asked[who], found[whose], top_k), titles)
        for name, (who, whose) in pairs.items()
    }


def _nearest(questions: np.ndarray, found: Vectors, top_k: int) -> np.ndarray:
    """[questions, top_k] numbers of passages, each as near as its nearest window."""
    first = np.cumsum([0, *found[1][:-1]])
    scores = np.maximum.reduceat(questions @ np.concatenate(found[0]).T, first, axis=1)
    best: np.ndarray = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    return best


def recall(questions: Sequence[Example], nearest: np.ndarray, titles: Sequence[str]) -> float:
    """The share of the passages that a question needs among those found, mean over the questions."""
    shares = []
    for question, rows in zip(questions, nearest, strict=True):
        needed = set(question.supporting)
        shares.append(len(needed & {titles[n] for n in rows}) / len(needed))
    return float(np.mean(shares))
