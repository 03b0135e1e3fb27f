"""The vectors of an index in memory, and the search in them.

They are made of rows of the index's file. After a change, new ones are made of the old ones and the rows that are new;
nothing is changed in place, so threads may search the old ones meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from blendserve.paths import read_sealed, write_sealed
from blendserve.retrieve.tables import Manifest, Rows, read_vectors

HNSW_LINKS = 32  # per node, the default of FAISS
HNSW_BUILD, HNSW_SEARCH = 200, 64  # candidates while building, minimum of candidates while searching
GRAPH = "graph-"  # name of a saved graph, before the index's stamp
SAVED_VECTORS = 1000  # a saved graph lacks at most that many, which are inserted in a second,
SAVED_SHARE = 0.1  # or this share of all
SCORE_DIGITS = 6  # the rest depends on the order of float32 sums: such scores are equal


@dataclass(frozen=True, slots=True)
class Flat:
    """Vectors that are all compared with a question's. owner: [n] passage numbers, ascending. rows: [n, dimension]."""

    owner: np.ndarray
    rows: np.ndarray

    @classmethod
    def empty(cls, dimension: int) -> Flat:
        return cls(np.zeros(0, np.int64), np.zeros((0, dimension), np.float32))

    def changed(self, numbers: np.ndarray, owner: np.ndarray, rows: np.ndarray) -> Flat:
        """The vectors of passages that are among `numbers`, and new ones."""
        is_kept = np.isin(self.owner, numbers)
        return Flat(np.concatenate([self.owner[is_kept], owner]), np.concatenate([self.rows[is_kept], rows]))

    def scores(self, query: np.ndarray) -> np.ndarray:
        """The scores of all vectors: inner products, which are cosines, as the vectors have length 1."""
        scores: np.ndarray = self.rows @ query
        return scores

    def nearest(self, query: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Falling scores and positions of the n nearest vectors."""
        scores, found = faiss.knn(query[None], self.rows, n, metric=faiss.METRIC_INNER_PRODUCT)
        return scores[0], found[0]


@dataclass(frozen=True, slots=True)
class Graph:
    """An HNSW graph of vectors. It cannot delete any: it keeps those of passages that are gone until they are the most.

    owner: [n] passage numbers, ascending. file: where the graph is saved, with its first `n_saved` vectors.
    """

    owner: np.ndarray
    graph: Any
    file: Path
    n_saved: int = 0

    @classmethod
    def empty(cls, dimension: int, file: Path) -> Graph:
        graph = faiss.IndexHNSWFlat(dimension, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        graph.hnsw.efConstruction = HNSW_BUILD
        return cls(np.zeros(0, np.int64), graph, file)

    @classmethod
    def read(cls, file: Path) -> Graph:
        """The saved graph. Raises OSError or ValueError if there is none, or it is damaged."""
        content = read_sealed(file)
        n = int(np.frombuffer(content, np.int64, 1)[0])
        owner = np.frombuffer(content, np.int64, n, 8)
        graph = faiss.deserialize_index(np.frombuffer(content, np.uint8, -1, 8 * (1 + n)))
        return cls(owner, graph, file, n)

    def changed(self, numbers: np.ndarray, owner: np.ndarray, rows: np.ndarray) -> Graph:
        """The graph with new vectors. It is saved when it would take long to build from the saved one."""
        graph = self.graph
        if len(rows):
            graph = faiss.clone_index(graph)
            graph.add(rows)
        made = replace(self, owner=np.concatenate([self.owner, owner]), graph=graph)
        n = len(made.owner)
        return made._saved() if n - made.n_saved > max(SAVED_VECTORS, SAVED_SHARE * n) else made

    def _saved(self) -> Graph:
        """The same graph, saved in place of others; not saved if the folder cannot be written."""
        head = np.array([len(self.owner)], np.int64).tobytes() + self.owner.tobytes()
        with suppress(OSError):
            write_sealed(self.file, head + faiss.serialize_index(self.graph).tobytes())
            for other in set(self.file.parent.glob(f"{GRAPH}*")) - {self.file}:
                other.unlink(missing_ok=True)
        return replace(self, n_saved=len(self.owner))

    def is_outdated(self, numbers: np.ndarray) -> bool:
        """Whether most vectors are of passages that are gone."""
        return 2 * int(np.isin(self.owner, numbers).sum()) < len(self.owner)

    def scores(self, query: np.ndarray) -> np.ndarray:
        """The scores of all vectors, compared exactly."""
        scores: np.ndarray = self.graph.reconstruct_n(0, self.graph.ntotal) @ query
        return scores

    def nearest(self, query: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Falling scores and positions of about the n nearest vectors, perhaps of fewer."""
        options: Any = faiss.SearchParametersHNSW(efSearch=max(HNSW_SEARCH, n))  # type: ignore[attr-defined]  # not in its stubs
        scores, found = self.graph.search(query[None], n, params=options)
        is_found = found[0] >= 0
        return scores[0][is_found], found[0][is_found]


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of all passages of an index in one state."""

    state: tuple[str, int]  # stamp of the index and its revision
    numbers: np.ndarray  # [passages] int64, ascending
    texts: np.ndarray  # [passages] int64: hashes of their texts
    found: Flat | Graph

    @classmethod
    def load(
        cls, rows: Rows, manifest: Manifest, state: tuple[str, int], before: Vectors | None, folder: Path
    ) -> Vectors:
        """The vectors of the index in this state. before: those of an earlier state. folder: of the index."""
        table = rows.execute("SELECT number, hash FROM passages ORDER BY number").fetchall()
        numbers, texts = np.array(table, np.int64).reshape(-1, 2).T.copy()
        known: Flat | Graph = Flat.empty(manifest.dimension)
        if before is not None and before.state[0] == state[0]:
            known = before.found
        elif manifest.kind == "hnsw":
            file = folder / f"{GRAPH}{state[0]}"
            known = Graph.empty(manifest.dimension, file)
            with suppress(OSError, ValueError):
                known = Graph.read(file)
        if isinstance(known, Graph) and known.is_outdated(numbers):
            known = Graph.empty(manifest.dimension, known.file)
        last = int(known.owner[-1]) if len(known.owner) else 0
        return cls(
            state, numbers, texts, known.changed(numbers, *read_vectors(rows, last, manifest.dimension))
        )

    def best(self, query: np.ndarray, k: int) -> dict[int, float]:
        """Passage number -> best score: the k best different passages, their equals in score, perhaps some more."""
        fetch = 2 * k + 8
        while True:
            best: dict[int, float] = {}
            texts: dict[int, float] = {}
            for score, number, text in self._nearest(query, fetch):  # best first
                last = best.setdefault(number, round(score, SCORE_DIGITS))
                texts.setdefault(text, last)
            complete = len(texts) > k and list(texts.values())[k - 1] > list(best.values())[-1]
            if complete or fetch >= len(self.found.owner):
                return best
            fetch *= 4

    def _nearest(self, query: np.ndarray, fetch: int) -> Iterator[tuple[float, int, int]]:
        """Score, passage number and text hash of about the `fetch` nearest vectors; of all, compared exactly."""
        if fetch >= len(self.found.owner):
            scores = self.found.scores(query)
            order = np.argsort(-scores, kind="stable")
            scores = scores[order]
        else:
            scores, order = self.found.nearest(query, fetch)
        owner = self.found.owner[order]
        at = np.minimum(np.searchsorted(self.numbers, owner), len(self.numbers) - 1)
        is_left = self.numbers[at] == owner
        return zip(
            scores[is_left].tolist(), owner[is_left].tolist(), self.texts[at][is_left].tolist(), strict=True
        )
