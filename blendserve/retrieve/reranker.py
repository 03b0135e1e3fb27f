"""A cross-encoder of sentence-transformers: scores how well a text answers a question, reading both together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from blendserve.core import Passage, PassageFilter
from blendserve.errors import ModelError
from blendserve.extras import install_hint
from blendserve.forks import begin_computing
from blendserve.models.checkpoint import first_line
from blendserve.models.sources import quiet

CANDIDATES = 30  # passages that are retrieved for reranking, unless more are asked for

Search = Callable[[str, int, PassageFilter], list[Passage]]


class Reranker:
    """Scores texts by how well they answer a question. Make one with `load`."""

    def __init__(self, model: Any, name: str) -> None:
        """model: a CrossEncoder."""
        self._model = model
        self.name = name

    @classmethod
    def load(cls, name: str) -> Reranker:
        """Load a cross-encoder from a local folder or the hub. Raises ModelError."""
        begin_computing()
        try:
            from sentence_transformers import CrossEncoder  # start-up: seconds
        except ModuleNotFoundError as error:
            raise ModelError(
                f"a reranker needs the package sentence-transformers: {install_hint('embedders')} ({error})"
            ) from None
        try:
            with quiet():
                return cls(CrossEncoder(name, device="cpu"), name)
        except Exception as error:  # the library raises whatever its parts raise
            raise ModelError(
                f"reranker {name!r} cannot be loaded ({first_line(error)}): name a folder or a Hugging Face id of a "
                "cross-encoder in retrieve.reranker"
            ) from error

    def scores(self, question: str, texts: Sequence[str]) -> list[float]:
        """Return a score for each text, between 0 and 1 for most models. Texts are cut at the model's context."""
        pairs = [(question, text) for text in texts]
        found: list[float] = self._model.predict(pairs, show_progress_bar=False).tolist() if pairs else []
        return found

    def n_tokens(self, question: str, texts: Sequence[str]) -> int:
        """Return the number of tokens of all pairs, before long texts are cut."""
        return sum(map(len, self._model.tokenizer([question] * len(texts), list(texts))["input_ids"]))


@lru_cache(maxsize=1)
def reranker_of(name: str | None) -> Reranker | None:
    """Return the reranker of this name, loaded once; None without a name. Raises ModelError."""
    return None if name is None else Reranker.load(name)


def reranked(search: Search, reranker: Reranker | None) -> Search:
    """Return a search whose passages the reranker orders; the search itself without a reranker."""
    if reranker is None:
        return search

    def best(question: str, top_k: int, selection: PassageFilter) -> list[Passage]:
        found = search(question, max(CANDIDATES, top_k), selection)
        scores = reranker.scores(question, [passage.chunk_text for passage in found])
        order = sorted(range(len(found)), key=lambda n: -scores[n])
        return [found[n] for n in order[:top_k]]

    return best
