"""Search among many vectors, which looks into some clusters, against a comparison of all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from blendserve.core import PassageFilter
from blendserve.retrieve import Embedder, TokenCounter, VectorIndex, index, tables, vectors
from blendserve.retrieve.index import ANY
from blendserve.retrieve.tables import EmbeddedDocument
from tests.retrieve.conftest import WordEncoder, words

CENTRES, WIDTH = 60, 0.7  # of clusters that overlap
N = 1500
K = 6


class Given(Embedder):
    """Questions are vectors, written as their numbers."""

    def __init__(self) -> None:
        super().__init__(WordEncoder(), "given", "given")

    def embed_question(self, question: str) -> np.ndarray:
        return np.array(question.split(), np.float32)


class Many:
    """An index of documents of one passage, and their vectors by id."""

    def __init__(self, folder: Path) -> None:
        self.rng = np.random.default_rng(0)
        self.centres = self.rng.normal(size=(CENTRES, WordEncoder.dimension))
        self.index = VectorIndex.create(
            folder, Given(), TokenCounter("tiny", "abcdefghij", words), chunk_tokens=20
        )
        self.held: dict[str, np.ndarray] = {}
        self.numbers = count()
        self.add(N)

    def vector(self) -> np.ndarray:
        """One of a cluster."""
        centre = self.centres[self.rng.integers(CENTRES)]
        made = centre + WIDTH * self.rng.normal(size=centre.shape)
        return np.asarray(made / np.linalg.norm(made), np.float32)

    def add(self, n: int) -> list[str]:
        """Add documents in one transaction."""
        made = {f"d{next(self.numbers)}": self.vector() for _ in range(n)}
        self.index.commit(
            [
                EmbeddedDocument(id, "", id, [("", f"text {id}")], [vector[None]], {"part": id[-1]})
                for id, vector in made.items()
            ]
        )
        self.held |= made
        return [*made]

    def delete(self, *ids: str) -> None:
        self.index.delete(*ids)
        for id in ids:
            del self.held[id]

    def found(self, query: np.ndarray, selection: PassageFilter = ANY) -> list[tuple[str, float]]:
        """The nearest ones that the index finds, with their scores."""
        near = self.index.candidates(" ".join(map(repr, query.tolist())), K, selection).near
        return [(passage.doc_id, passage.score or 0.0) for passage in near[:K]]

    def recall(self, part: str = "") -> float:
        """Of the nearest among the documents whose ids end so, the share that is found; all scores are right."""
        selection = PassageFilter(filter={"part": part}) if part else ANY
        ids = [id for id in self.held if id.endswith(part)]
        matrix, n_found = np.array([self.held[id] for id in ids]), 0
        queries = [self.vector() for _ in range(40)]
        for query in queries:
            wanted = {ids[at] for at in np.argsort(-(matrix @ query))[:K]}
            found = self.found(query, selection)
            assert len(found) == K
            for id, score in found:
                assert id.endswith(part)
                assert score == pytest.approx(float(self.held[id] @ query), abs=1e-5)
            n_found += len(wanted & {id for id, _ in found})
        return n_found / K / len(queries)


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Many]:
    monkeypatch.setattr(vectors, "CLUSTERED", N // 2)
    made = Many(tmp_path / "index")
    with closing(made.index):
        yield made


def test_most_of_the_nearest_are_found_and_no_deleted_one(many: Many) -> None:
    assert many.recall() > 0.9
    for _ in range(40):
        added = many.add(5)
        for id in added:
            assert many.found(many.held[id])[0][0] == id, "the nearest to itself"
        nearest = [id for id, _ in many.found(many.vector())]
        many.delete(*nearest, *(id for id in added[:2] if id not in nearest))
        assert many.recall() > 0.9  # checks that all that is found is held
    assert many.recall() > 0.9


def test_a_filter_is_a_search_among_what_it_allows(many: Many, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fewer passages are allowed, the more clusters are searched."""
    assert many.recall("3") > 0.9
    monkeypatch.setattr(index, "DEPTH", K)
    monkeypatch.setattr(vectors, "PROBED", 0.1)
    assert many.recall("3") == 1, "a tenth of the passages, in ten times the clusters"
    many.delete(*[id for id in many.held if id.endswith("3")][:-K])
    assert many.recall("3") == 1


def test_another_process_that_was_away_for_long_sees_all_changes(
    many: Many, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "KEPT_CHANGES", 10)
    first, other = many.index, VectorIndex.open(many.index.path, many.index.embedder, many.index.tokens)
    for n_changes in (1, 3, 30):
        for _ in range(n_changes):
            many.add(1)
            many.delete(next(iter(many.held)))
        many.index = other
        assert many.recall() > 0.9
        many.index = first
    other.close()


def test_searches_beside_changes_find_what_is_there(many: Many, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector that is added or deleted meanwhile changes no other's place. FAISS is used by one thread at a time."""
    is_used = threading.Lock()

    def alone(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            assert is_used.acquire(blocking=False)
            try:
                return call(*args, **options)
            finally:
                is_used.release()

        return run

    for name in ("add", "search", "reconstruct_batch"):
        monkeypatch.setattr(faiss.IndexIVFFlat, name, alone(getattr(faiss.IndexIVFFlat, name)))
    stays, is_over = {id: many.held[id] for id in [*many.held][:20]}, threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            for id, vector in stays.items():
                assert many.found(vector)[0][0] == id

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            for _ in range(30):
                many.delete(*many.add(10)[:5])
        finally:
            is_over.set()
        for each in asking:
            each.result()
