"""The vectors of an index in memory, and the search in them.

They are made of rows of the index's file; after a change, of the old ones and of the rows that are new. Nothing is
changed in place: threads may search the old ones meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from blendserve.paths import read_sealed, write_sealed
from blendserve.retrieve.tables import Manifest, Rows, read_vectors, state

HNSW_LINKS = 32  # per node, the default of FAISS
HNSW_BUILD, HNSW_SEARCH = 200, 64  # candidates while building, minimum of candidates while searching
GRAPH = "graph-"  # name of a saved HNSW graph, before the index's stamp
SAVED_VECTORS = 1000  # a saved graph lacks at most that many, which are inserted in a second,
SAVED_SHARE = 0.1  # or this share of all
GONE_SHARE = 0.25  # of vectors whose passages are gone; above it, all are loaded anew
SCORE_DIGITS = 6  # the rest depends on the order of float32 sums: such scores are equal


Ranked = Iterable[tuple[float, int, int]]
"""Score, passage number and text hash of vectors, the best first."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of all passages of an index in one state.

    FAISS deletes slowly, or not at all: vectors of passages that are gone stay for a while, and searches skip them.
    """

    state: tuple[str, int]  # stamp of the index and its revision
    numbers: np.ndarray  # [passages] int64, ascending
    texts: np.ndarray  # [passages] int64: hashes of their texts
    owner: np.ndarray  # [vectors] int64, ascending: number of the passage
    found: Any  # a FAISS index by inner product, which is the cosine, as vectors have length 1
    n_saved: int = 0  # vectors of the saved graph

    @classmethod
    def load(cls, rows: Rows, manifest: Manifest, before: Vectors | None, folder: Path) -> Vectors:
        """The vectors in the state of this transaction. before: those of an earlier state. folder: of the index."""
        stamp, _ = now = state(rows)
        file = folder / f"{GRAPH}{stamp}"
        if before is None or before.state[0] != stamp:
            before = cls._saved(manifest, file)
        last = int(before.numbers[-1]) if len(before.numbers) else 0
        pairs = rows.execute(
            "SELECT number, hash FROM passages WHERE number > ? ORDER BY number", (last,)
        ).fetchall()
        numbers, texts = np.concatenate(
            [[before.numbers, before.texts], np.array(pairs, np.int64).reshape(-1, 2).T], 1
        )
        if rows.execute("SELECT count(*) FROM passages").fetchone() != (len(numbers),):
            pairs = rows.execute(
                "SELECT number, hash FROM passages"
            ).fetchall()  # without order: from an index
            numbers, texts = np.array(sorted(pairs), np.int64).reshape(-1, 2).T.copy()
        if np.isin(before.owner, numbers).sum() < (1 - GONE_SHARE) * len(before.owner):
            before = cls._none(manifest)
        last = int(before.owner[-1]) if len(before.owner) else 0
        owner, new = read_vectors(rows, last, manifest.dimension)
        found = before.found
        if len(new):
            found = faiss.clone_index(found)
            found.add(new)
        owner = np.concatenate([before.owner, owner])
        made = cls(now, numbers, texts, owner, found, before.n_saved)
        is_saved = len(owner) - made.n_saved <= max(SAVED_VECTORS, SAVED_SHARE * len(owner))
        return made if is_saved or manifest.kind == "flat" else made._save(file)

    @classmethod
    def _none(cls, manifest: Manifest) -> Vectors:
        """No vectors of this kind."""
        found: Any = faiss.IndexFlatIP(manifest.dimension)
        if manifest.kind == "hnsw":
            found = faiss.IndexHNSWFlat(manifest.dimension, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
            found.hnsw.efConstruction = HNSW_BUILD
        nothing = np.zeros(0, np.int64)
        return cls(("", 0), nothing, nothing, nothing, found)

    @classmethod
    def _saved(cls, manifest: Manifest, file: Path) -> Vectors:
        """The vectors of the saved graph; none without one."""
        none = cls._none(manifest)
        with suppress(OSError, ValueError):  # missing, or damaged
            content = read_sealed(file)
            n = int(np.frombuffer(content, np.int64, 1)[0])
            found = faiss.deserialize_index(np.frombuffer(content, np.uint8, -1, 8 * (1 + n)))
            return replace(none, owner=np.frombuffer(content, np.int64, n, 8).copy(), found=found, n_saved=n)
        return none

    def _save(self, file: Path) -> Vectors:
        """The same; the graph, which takes long to build, is saved in place of others if the folder can be written."""
        owner = np.concatenate([[len(self.owner)], self.owner]).astype(np.int64)
        with suppress(OSError):
            write_sealed(file, owner.tobytes() + faiss.serialize_index(self.found).tobytes())
            for other in set(file.parent.glob(f"{GRAPH}*")) - {file}:
                other.unlink(missing_ok=True)
        return replace(self, n_saved=len(self.owner))

    def best(self, query: np.ndarray, k: int, allowed: np.ndarray | None) -> dict[int, float]:
        """Passage number -> best score: the k best passages of different texts, and their equals in score.

        allowed: numbers of passages; those are compared exactly.
        """
        if allowed is not None:
            at = np.flatnonzero(np.isin(self.owner, allowed))
            ranked = self._ranked(self.found.reconstruct_batch(at) @ query, at)
            return self._distinct(ranked, k)[0]
        fetch = 2 * k + 8
        while True:
            best, is_whole = self._distinct(self._nearest(query, fetch), k)
            if fetch >= len(self.owner) or is_whole:
                return best
            fetch *= 4

    @staticmethod
    def _distinct(ranked: Ranked, k: int) -> tuple[dict[int, float], bool]:
        """The k best passages of different texts, and their equals in score; whether there are others behind them."""
        best, texts, last = dict[int, float](), dict[int, float](), 0.0
        for score, number, text in ranked:
            last = best.setdefault(number, round(score, SCORE_DIGITS))
            texts.setdefault(text, last)
        least = [*texts.values(), 0.0][min(k, len(texts)) - 1]
        is_whole = len(texts) > k and least > last
        return {number: score for number, score in best.items() if score >= least}, is_whole

    def scores(self, query: np.ndarray, numbers: Sequence[int]) -> dict[int, float]:
        """The scores of these passages."""
        found = dict[int, float]()
        for number in numbers:
            start = int(np.searchsorted(self.owner, number, "left"))
            end = int(np.searchsorted(self.owner, number, "right"))
            found[number] = round(
                float((self.found.reconstruct_n(start, end - start) @ query).max()), SCORE_DIGITS
            )
        return found

    def _nearest(self, query: np.ndarray, fetch: int) -> Ranked:
        """About the `fetch` nearest vectors; of all, compared exactly."""
        if fetch >= len(self.owner):
            return self._ranked(self.found.reconstruct_n(0, len(self.owner)) @ query)
        options: Any = None
        if isinstance(self.found, faiss.IndexHNSWFlat):
            options = faiss.SearchParametersHNSW(efSearch=max(HNSW_SEARCH, fetch))  # type: ignore[attr-defined]  # not in its stubs
        found = self.found.search(query[None], fetch, params=options)
        scores, at = (row[0][found[1][0] >= 0] for row in found)  # HNSW may reach fewer
        return self._ranked(scores, at)

    def _ranked(self, scores: np.ndarray, at: np.ndarray | None = None) -> Ranked:
        """Vectors with their scores, the best first. at: which vectors; default: all."""
        order = np.argsort(-scores, kind="stable")
        scores, owner = scores[order], self.owner[order if at is None else at[order]]
        at = np.minimum(np.searchsorted(self.numbers, owner), len(self.numbers) - 1)
        is_left = self.numbers[at] == owner
        return zip(
            scores[is_left].tolist(), owner[is_left].tolist(), self.texts[at][is_left].tolist(), strict=True
        )
