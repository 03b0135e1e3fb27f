"""The vectors of an index in memory, and the search in them.

They are a copy of rows of the index's file. After a change, vectors of new passages are added, and those of deleted
passages are skipped. A search compares all vectors of a small index. In a large one it compares those of the clusters
whose centres are nearest to the question (FAISS's inverted file), which finds most of the nearest vectors
(`python -m benchmarks index_size` measures how many).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import faiss
import numpy as np

from blendserve.retrieve.tables import Rows, gone_since, read_numbers, read_vectors, state

CLUSTERED = 20_000  # vectors from which on an index has clusters
PER_CLUSTER = 32  # vectors from which its centre is computed
ITERATIONS = 5  # of k-means
PROBED = 0.3  # share of the clusters that a search compares
GROWTH = 4  # clusters are made again when the vectors have become this many times as many
GONE_SHARE = 0.25  # of vectors whose passages are deleted; above it, all vectors are loaded again
SCORE_DIGITS = 6  # the rest depends on the order of float32 sums: such scores are equal

Ranked = Iterable[tuple[float, int, int]]
"""Score, passage number and text hash of vectors, the best first."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of all passages of an index in one state.

    Later states share its FAISS index and add to it; earlier states skip what was added.
    """

    state: tuple[str, int]  # stamp of the index and its revision
    numbers: np.ndarray  # [passages] int64, ascending
    texts: np.ndarray  # [passages] int64: hashes of their texts
    documents: np.ndarray  # [passages] int64: numbers of their documents
    owner: np.ndarray  # [vectors] int64, ascending: number of the passage
    is_present: np.ndarray  # [vectors] bool: False once the passage is deleted
    faiss_index: Any  # by inner product, which is the cosine, as vectors have length 1
    capacity: int  # vectors up to which the FAISS index is used
    lock: threading.Lock  # of the FAISS index, which changes in place

    @classmethod
    def load(cls, rows: Rows, dimension: int, before: Vectors | None) -> Vectors:
        """Return the vectors in the state of this transaction. before: those of an earlier state."""
        known = before or cls._empty()
        gone = gone_since(rows, known.state)
        known = cls._empty() if gone is None else known._without(gone)
        owner, new = read_vectors(rows, known.last, dimension)
        if len(known.owner) + len(new) > known.capacity:
            if len(known.owner):
                known = cls._empty()
                owner, new = read_vectors(rows, 0, dimension)
            known = replace(known, faiss_index=_new_index(new), capacity=_capacity(len(new)))
        numbers, texts, documents = read_numbers(rows, known.last)
        with known.lock:
            known.faiss_index.add(new)
        return replace(
            known,
            state=state(rows),
            numbers=np.concatenate([known.numbers, numbers]),
            texts=np.concatenate([known.texts, texts]),
            documents=np.concatenate([known.documents, documents]),
            owner=np.concatenate([known.owner, owner]),
            is_present=np.concatenate([known.is_present, np.ones(len(owner), np.bool_)]),
        )

    @classmethod
    def _empty(cls) -> Vectors:
        nothing = np.zeros(0, np.int64)
        is_present = nothing.astype(np.bool_)
        return cls(("", 0), nothing, nothing, nothing, nothing, is_present, None, -1, threading.Lock())

    @property
    def last(self) -> int:
        """Return the largest number of a passage that was loaded."""
        return int(self.owner[-1]) if len(self.owner) else 0

    def _without(self, gone: np.ndarray) -> Vectors:
        """Return the vectors without these passages; none at all if they are many, or an earlier load was interrupted."""
        is_present = self.is_present & ~np.isin(self.owner, gone)
        is_whole = self.faiss_index.ntotal == len(self.owner)
        if not is_whole or is_present.sum() < (1 - GONE_SHARE) * len(is_present):
            return self._empty()
        kept = ~np.isin(self.numbers, gone)
        passages = {name: getattr(self, name)[kept] for name in ("numbers", "texts", "documents")}
        return replace(self, **passages, is_present=is_present)

    def of_documents(self, documents: np.ndarray) -> np.ndarray:
        """Return [passages] bool: whether each passage is of these documents."""
        is_wanted = np.zeros(1 + int(max(self.documents.max(initial=0), documents.max(initial=0))), np.bool_)
        is_wanted[documents] = True
        found: np.ndarray = is_wanted[self.documents]
        return found

    def best(self, query: np.ndarray, k: int, allowed: np.ndarray | None) -> dict[int, float]:
        """Return the k best passages of different texts, and those with equal scores: passage number -> score.

        allowed: [passages] bool.
        """
        mask = self.is_present
        if allowed is not None:
            by_number = np.zeros(self.last + 1, np.bool_)
            by_number[self.numbers] = allowed
            mask = by_number[self.owner]
        n = int(mask.sum())
        fetch = 2 * k + 8
        share = PROBED * len(mask) / max(1, n)
        while n > fetch:
            best, is_whole = self._distinct(self._nearest(query, fetch, mask, share), k)
            if is_whole:
                return best
            fetch *= 4
            share *= 4
        return self._distinct(self._nearest(query, n, mask, 1.0), k)[0] if n else {}

    @staticmethod
    def _distinct(ranked: Ranked, k: int) -> tuple[dict[int, float], bool]:
        """Return the k best passages of different texts, with those of equal scores; and whether they are complete."""
        best: dict[int, float] = {}
        texts: dict[int, float] = {}
        last = 0.0
        for score, number, text in ranked:
            last = best.setdefault(number, round(score, SCORE_DIGITS))
            texts.setdefault(text, last)
        least = [*texts.values(), 0.0][min(k, len(texts)) - 1]
        is_whole = len(texts) > k and least > last
        return {number: score for number, score in best.items() if score >= least}, is_whole

    def scores(self, query: np.ndarray, numbers: Sequence[int]) -> dict[int, float]:
        """Return the scores of these passages."""
        if not numbers:
            return {}
        starts, ends = (np.searchsorted(self.owner, numbers, side) for side in ("left", "right"))
        at = np.concatenate([np.arange(*pair) for pair in zip(starts, ends, strict=True)])
        with self.lock:
            vectors = self.faiss_index.reconstruct_batch(at)
        sizes = ends - starts
        best = np.maximum.reduceat(vectors @ query, np.cumsum(sizes) - sizes)
        return dict(zip(numbers, np.round(best.astype(float), SCORE_DIGITS).tolist(), strict=True))

    def _nearest(self, query: np.ndarray, fetch: int, mask: np.ndarray, share: float) -> Ranked:
        """Return the `fetch` nearest vectors of the mask in this share of the clusters, the best first."""
        bits = np.packbits(mask, bitorder="little")
        selector: Any = faiss.IDSelectorBitmap
        parameters: Any = faiss.SearchParameters
        options = {"sel": selector(bits)}
        if isinstance(self.faiss_index, faiss.IndexIVF):
            parameters = faiss.SearchParametersIVF
            options["nprobe"] = math.ceil(min(1.0, share) * self.faiss_index.nlist)
        with self.lock:
            scores, at = self.faiss_index.search(query[None], fetch, params=parameters(**options))
        at = at[0][at[0] >= 0]  # the clusters may have fewer
        places = np.searchsorted(self.numbers, self.owner[at])
        return zip(
            scores[0][: len(at)].tolist(),
            self.owner[at].tolist(),
            self.texts[places].tolist(),
            strict=True,
        )


def _new_index(vectors: np.ndarray) -> Any:
    """Return an empty FAISS index whose clusters fit these vectors."""
    n, dimension = vectors.shape
    if n < CLUSTERED:
        return faiss.IndexFlatIP(dimension)
    n_clusters = math.isqrt(n)
    found: Any = faiss.index_factory(dimension, f"IVF{n_clusters},Flat", faiss.METRIC_INNER_PRODUCT)
    found.cp.niter = ITERATIONS
    found.cp.max_points_per_centroid = PER_CLUSTER
    found.cp.min_points_per_centroid = 1  # of which it would warn
    found.train(vectors)
    found.make_direct_map()
    return found


def _capacity(n: int) -> int:
    """Return the number of vectors up to which an index that was made for n is used."""
    return CLUSTERED - 1 if n < CLUSTERED else GROWTH * n
