"""A question to its prompt: which passages, and how they are cut into chunks.

closed   the contexts that come with the question; so in the edited setting, which is about what is stored (edited.py)
open     the corpus is searched for them with the engine's own retriever

A chunk is a passage, or, with a window, N tokens of all passages joined, as CacheBlend's experiments have it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from blendserve import console
from blendserve.config import Config
from blendserve.core import Chunk, Document, Passage, Prompt, TokenIds
from blendserve.engine.engine import Engine
from blendserve.errors import IndexMismatch, IndexMissing
from blendserve.evaluate.config import EvaluateConfig
from blendserve.evaluate.datasets import Dataset
from blendserve.evaluate.edits import WINDOW, Fact, before, cut_elsewhere
from blendserve.evaluate.formats import Example
from blendserve.evaluate.permutations import permuted

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Context:
    """The passages of one question."""

    passages: tuple[Passage, ...]
    recall: float | None = None  # share of the needed titles among those retrieved; None when nothing was
    seconds: float = 0.0  # of retrieving


class Setting:
    """Makes the prompts of a run."""

    def __init__(self, engine: Engine, plan: EvaluateConfig) -> None:
        self._engine, self._plan = engine, plan

    def context(self, example: Example) -> Context:
        """The passages for a question, or for a permutation of one."""
        seed = self._plan.seed
        if self._plan.setting != "open":
            return Context(permuted(example.contexts, example, seed))
        assert self._engine.index is not None
        start = time.perf_counter()
        found = self._engine.index.search(example.question, self._plan.top_k)
        seconds = time.perf_counter() - start
        titles = {passage.title for passage in found}
        needed = set(example.supporting)
        recall = len(titles & needed) / len(needed) if needed else None
        return Context(permuted(found, example, seed), recall, seconds)

    def stored_before(self, kind: str, example: Example, context: Context) -> list[TokenIds]:
        """The chunks that were stored of these passages before an edit of this kind."""
        fact = (
            Fact(example.supporting[0], example.answers[0].strip(), example.counterfactual)
            if example.counterfactual
            else None
        )
        passages = tuple(before(kind, context.passages, f"{self._plan.seed}:{example.id}", fact))
        chunks = self.prompt(
            example.question, replace(context, passages=passages), example.is_continuation
        ).chunks
        ids = [chunk.ids for chunk in chunks if len(chunk)]
        return cut_elsewhere(ids) if kind == WINDOW else ids

    def prompt(self, question: str, context: Context, goes_on: bool = False) -> Prompt:
        """The prompt, tokenised anew every time, as a request would.

        goes_on: the question is how the passages, pieces of a text, go on; the last chunks are kept, not the first.
        """
        prompts = self._engine.prompts
        if goes_on:
            pieces = (Chunk(prompts.text_ids(passage.text), passage) for passage in context.passages)
            prompt = Prompt(prompts.prefix, tuple(pieces), prompts.text_ids(question))
        else:
            prompt = prompts.build(question, context.passages)
        chunks = prompt.chunks
        if (n := self._plan.window) is not None:
            ids = tuple(i for chunk in chunks for i in chunk.ids)
            chunks = tuple(Chunk(ids[at : at + n]) for at in range(0, len(ids), n))
        kept = slice(-(self._plan.chunks or 0), None) if goes_on else slice(self._plan.chunks)
        return Prompt(prompt.prefix, chunks[kept], prompt.suffix)


def open_engine(plan: EvaluateConfig, dataset: Dataset, settings: Config, work: Path, say: Say) -> Engine:
    """The engine for a run: with an index of the dataset's corpus, kept in `work`, if the setting is open.

    Raises ModelUnsupported for a reader that fails the gate: its full prefill, the reference, would be wrong too.
    """
    engine = (
        Engine.open(settings, say=say) if plan.setting != "open" else _indexed(dataset, settings, work, say)
    )
    engine.gate.require()
    return engine


def _indexed(dataset: Dataset, settings: Config, work: Path, say: Say) -> Engine:
    digest = xxhash.xxh3_64_hexdigest("\0".join(f"{p.title}\0{p.text}" for p in dataset.corpus).encode())
    folder = work / f"index-{digest}"
    try:
        return Engine.open(folder, settings, say)
    except (IndexMissing, IndexMismatch):
        say(f"Building an index of {len(dataset.corpus):,} passages in {folder}")
    documents = [Document(p.text, p.title, p.id) for p in dataset.corpus]
    with console.progress("Embedding", "windows") as update:
        return Engine.build(folder, documents, settings, say, update)
