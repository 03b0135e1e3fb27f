"""`python -m benchmarks embedding`: passages to vectors, against sentence-transformers in fp32.

Each round embeds other passages of the Python language reference with both. Time holds everything from text to vectors:
windows, tokens, encoding. CPU time is that of all threads. The smallest cosine of two vectors of one passage is a fact.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from pydantic import Field

from blendserve.bench.harness import Case, Column, Group, Metrics, SampleLog, ratio, table
from blendserve.bench.runner import Bench, BenchConfig
from blendserve.config import Positive, RetrieveConfig
from blendserve.core import Passage, run
from blendserve.errors import InputError
from blendserve.retrieve import Embedder, language_reference, split
from blendserve.retrieve.embedder import model_folder
from blendserve.retrieve.encoder import SentenceTransformersEncoder
from blendserve.threads import limit_torch

OURS, THEIRS = "blendserve", "sentence-transformers"
EMBEDDER = RetrieveConfig().embedder
PASSAGE_TOKENS = 120  # at most
WARM_UP = 16  # passages
ALL = 10**7  # characters: all of the language reference


class EmbeddingConfig(BenchConfig):
    """Passages to vectors."""

    passages: Positive = Field(200, description="Number of passages per round.")


def groups(config: EmbeddingConfig, log: SampleLog) -> Iterator[Group]:
    limit_torch(config.threads)
    embedders = {
        OURS: Embedder.load(EMBEDDER),
        THEIRS: Embedder(SentenceTransformersEncoder(model_folder(EMBEDDER)), THEIRS, fingerprint=""),
    }
    passages = _passages(config, embedders[OURS])
    vectors: dict[str, list[np.ndarray]] = {name: [] for name in embedders}
    for embedder in embedders.values():
        _embed(embedder, passages[:WARM_UP])

    def embed_part(name: str) -> Metrics:
        part = passages[len(vectors[name]) :: config.repeats]
        wall, cpu = time.perf_counter(), time.process_time()
        vectors[name].append(_embed(embedders[name], part))
        elapsed, used = time.perf_counter() - wall, time.process_time() - cpu
        return {"passages_per_s": len(part) / elapsed, "passages_per_cpu_s": len(part) / used}

    def facts() -> dict[str, float | str]:
        ours, theirs = (np.concatenate(vectors[name]) for name in (OURS, THEIRS))
        dtypes = {f"dtype, {name}": embedder.dtype for name, embedder in embedders.items()}
        return {**dtypes, "windows": len(ours), "min_cosine": float((ours * theirs).sum(1).min())}

    yield Group(
        {}, [Case({"library": name}, partial(embed_part, name)) for name in embedders], facts, warm_up=False
    )


def _passages(config: EmbeddingConfig, embedder: Embedder) -> list[Passage]:
    from pydoc_data.topics import topics  # half a megabyte

    wanted = config.passages * config.repeats
    documents = language_reference(sorted(topics), ALL)
    encode = partial(embedder.encoder.tokenizer.encode, add_special_tokens=False)
    parts = (split(d, PASSAGE_TOKENS, lambda p: len(encode(f"{p.title}\n{p.text}").ids)) for d in documents)
    passages = [passage for part in parts for passage in part]
    if len(passages) < wanted:
        problem = f"{len(passages):,} passages of {PASSAGE_TOKENS} tokens, not {wanted:,}"
        raise InputError(f"the language reference has {problem}")
    return passages[:wanted]


def _embed(embedder: Embedder, passages: Sequence[Passage]) -> np.ndarray:
    """Vectors [windows, E] of the passages."""
    return run(embedder.encode([window for own in run(embedder.cut(passages)) for window in own]))


TABLE = table(
    "Embedding",
    Column("passages/s", "passages_per_s", digits=0),
    ratio("x library", "passages_per_s", library=THEIRS),
    Column("per CPU second", "passages_per_cpu_s", digits=0),
    ratio("x library by CPU time", "passages_per_cpu_s", library=THEIRS),
)
BENCH = Bench(EmbeddingConfig, groups, (TABLE,), tiny={"passages": 20, "repeats": 1})
