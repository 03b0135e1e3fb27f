"""Questions to prompts: the passages, and how they are cut into chunks.

closed   the passages of the data set
edited   the same; the store holds their previous revisions (stores.py)
open     passages that the engine's retriever finds in the corpus

The n-th permutation of question ID has the id ID~n, and the question's passages in another order. It depends on the
seed, the question and n alone, so that more of them can be added later; no two permutations have the same order.

A chunk is a passage, or with a window N tokens of all passages joined, as in CacheBlend's experiments.

In a client's layout (layouts.py) each chunk's text is a passage of a plain prompt, and is stored as `POST /v1/cache/warm`
stores it. No prefix is cached between prompts.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import xxhash

from blendserve import console
from blendserve.config import Config
from blendserve.core import Chunk, Document, Passage, Prompt, TokenIds
from blendserve.engine.engine import Engine
from blendserve.errors import CorpusError, IndexMismatch, IndexMissing
from blendserve.evaluate import edits
from blendserve.evaluate.config import OWN, EvaluateConfig
from blendserve.evaluate.datasets import Dataset
from blendserve.evaluate.formats import Example
from blendserve.evaluate.layouts import client_chat
from blendserve.retrieve.index import ANY
from blendserve.retrieve.reranker import reranked
from blendserve.timing import Clock

log = logging.getLogger(__name__)


class PromptSource:
    """Makes the prompts of a run."""

    def __init__(self, engine: Engine, config: EvaluateConfig) -> None:
        self._engine = engine
        self._config = config

    def with_passages(self, example: Example) -> tuple[Example, float | None, float]:
        """The question with the passages of its prompt in its permutation's order, recall, and seconds of retrieval.

        recall: of the needed titles; None if nothing was retrieved, or they are unknown.
        """
        found = example.contexts
        recall = None
        seconds = 0.0
        if self._config.setting == "open":
            assert self._engine.index is not None
            clock = Clock()
            needed = set(example.supporting)
            search = reranked(self._engine.index.search, self._engine.reranker)
            found = tuple(search(example.question, self._config.top_k, ANY))
            seconds = clock.elapsed()
            recall = len({p.title for p in found} & needed) / len(needed) if needed else None
            found = found[::-1] if self._engine.config.prompt.order == "best_last" else found
        example = replace(example, contexts=permuted(found, example, self._config.seed))
        return self._pasted(example) if self.is_plain else example, recall, seconds

    @property
    def is_plain(self) -> bool:
        """Whether prompts are laid out as a client does."""
        return self._config.layout != OWN

    def build(self, example: Example) -> Prompt:
        """The prompt of a question over its passages, tokenised each time, as for a request.

        Of a text to continue, the question is the lead, and `chunks` keeps the last chunks, not the first.
        """
        if not self.is_plain:
            return self._own_layout(example)
        texts = [passage.text for passage in example.contexts]
        words = self._engine.config.prompt
        return self._engine.prompts.plain(client_chat(self._config.layout, example.question, texts, words))

    def stored_chunks(self, example: Example) -> list[TokenIds]:
        """The chunks that are stored for a question's prompt."""
        if self.is_plain:
            return self._engine.prompts.chunk_ids(example.contexts)
        return [chunk.ids for chunk in self._own_layout(example).chunks]

    def _pasted(self, example: Example) -> Example:
        """The question with the texts of its chunks as passages without titles."""
        decode = self._engine.model.tokenizer.decode
        texts = [p.chunk_text for p in example.contexts]
        if self._config.window is not None:
            chunks = self._own_layout(example).chunks
            texts = [decode(chunk.ids, skip_special_tokens=True).strip() for chunk in chunks]
        passages = [Passage(text) for text in texts if text]
        return replace(example, contexts=tuple(passages[: self._config.chunks]))

    def _own_layout(self, example: Example) -> Prompt:
        prompts = self._engine.prompts
        config = self._config
        if example.is_continuation:
            pieces = tuple(Chunk(prompts.text_ids(passage.text), passage) for passage in example.contexts)
            prompt = Prompt(prompts.prefix, pieces, prompts.text_ids(example.question))
        else:
            prompt = prompts.build(example.question, example.contexts)
        chunks = prompt.chunks
        if (n := config.window) is not None:
            ids = tuple(i for chunk in chunks for i in chunk.ids)
            chunks = tuple(Chunk(ids[at : at + n]) for at in range(0, len(ids), n))
        kept = slice(-(config.chunks or 0), None) if example.is_continuation else slice(config.chunks)
        return Prompt(prompt.prefix, chunks[kept], prompt.suffix)

    def previous_chunks(self, example: Example, edit: str) -> list[TokenIds]:
        """The chunks of the passages before an edit of this kind."""
        fact = None
        if example.counterfactual:
            fact = edits.Fact(example.supporting[0], example.answers[0].strip(), example.counterfactual)
        passages = edits.before(edit, example.contexts, f"{self._config.seed}:{example.id}", fact)
        prompt = self.build(replace(example, contexts=tuple(passages)))
        ids = [chunk.ids for chunk in prompt.chunks if len(chunk)]
        return edits.cut_elsewhere(ids) if edit == edits.WINDOW else ids

    def prior_chunks(self, dataset: Dataset) -> list[TokenIds]:
        """The chunks to fit priors on, without questions or answers: of the corpus in the open setting, else of prompts.

        If half of the questions are asked, those of the other half.
        """
        if self._config.setting == "open":
            return self._engine.prompts.chunk_ids(dataset.corpus)
        other = {"both": "both", "first": "second", "second": "first"}[self._config.half]
        examples = dataset.examples[self._config.with_values(half=other).subset]
        return [ids for e in examples for ids in self.stored_chunks(self.with_passages(e)[0])]


def with_permutations(
    examples: Sequence[Example], permutations: int, passages: int | None = None
) -> list[Example]:
    """Each question and its permutations; fewer where its passages have no more orders.

    passages: number of retrieved passages, if these replace the question's own. Raises CorpusError where a question has
    the id of a permutation.
    """
    made = list[Example]()
    for example in examples:
        orders = math.factorial(min(20, len(example.contexts) if passages is None else passages))
        numbers = range(1, min(permutations + 1, orders))
        of = example.id
        made.append(example)
        made += (replace(example, id=f"{of}~{n}", permutation=n, permutation_of=of) for n in numbers)
    if taken := {e.id for e in examples} & {e.id for e in made if e.permutation}:
        problem = f"the data has the ids of permutations ({', '.join(taken)}): rename them, or lower evaluate.shuffles"
        raise CorpusError(problem, setting="evaluate.shuffles")
    return made


def permuted(passages: Sequence[Passage], example: Example, seed: int) -> tuple[Passage, ...]:
    """The passages in this permutation's order; as they are for the question itself."""
    rng = random.Random(f"{seed}:{example.permutation_of}")
    order = list(range(len(passages)))
    seen = {tuple(order): None}
    while len(seen) <= example.permutation:  # until the n-th order that is another one than all before
        rng.shuffle(order)
        seen.setdefault(tuple(order))
    return tuple(passages[n] for n in list(seen)[example.permutation])


def open_engine(config: EvaluateConfig, dataset: Dataset, settings: Config, work: Path) -> Engine:
    """The engine of a run; in the open setting with an index of the data set's corpus, kept in `work`.

    Raises ModelUnsupported for a model that fails the gate: its full prefill, the reference, would be wrong.
    """
    is_open = config.setting == "open"
    engine = _indexed(dataset, settings, work) if is_open else Engine.open(settings)
    engine.gate.require()
    return engine


def _indexed(dataset: Dataset, settings: Config, work: Path) -> Engine:
    digest = xxhash.xxh3_64_hexdigest("\0".join(f"{p.title}\0{p.text}" for p in dataset.corpus).encode())
    folder = work / f"index-{digest}"
    try:
        return Engine.open(folder, settings)
    except (IndexMissing, IndexMismatch):
        log.info(f"Building an index of {len(dataset.corpus):,} passages in {folder}")
    documents = [Document(p.text, p.title, p.id) for p in dataset.corpus]
    with console.progress("Embedding", "characters") as update:
        return Engine.build(folder, documents, settings, update)
