"""What an index holds at one moment: passages, their vectors, the digests of their documents. Never changed in place.

A change makes new contents of old ones, so threads search the old contents until the new ones are saved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import faiss
import numpy as np
import xxhash

from blendserve.core import Passage
from blendserve.retrieve.manifest import Manifest

PASSAGES, VECTORS = "passages.jsonl", "vectors.faiss"

HNSW_LINKS = 32  # per node, the default of FAISS
HNSW_BUILD, HNSW_SEARCH = 200, 64  # candidates while building, minimum of candidates while searching
NO_VECTORS = np.zeros((0, 0), np.float32)
SCORE_DIGITS = 6  # the rest depends on the order of float32 sums: such scores are equal


@dataclass(frozen=True, slots=True)
class Change:
    """Documents that leave an index, and documents that come, embedded."""

    gone: Set[str]  # ids of deleted and replaced documents
    digests: Mapping[str, str] = field(default_factory=dict)  # id of a new document -> digest of its content
    passages: Sequence[Passage] = ()  # of the new documents
    windows: Sequence[int] = ()  # vectors of each passage
    vectors: np.ndarray = field(default_factory=lambda: NO_VECTORS)  # [sum of windows, dimension] float32
    dtype: str = ""  # number format of the embedder


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of an index, and the search in them."""

    settings: Manifest  # models and settings; its numbers are not kept up to date
    passages: tuple[Passage, ...]
    owner: np.ndarray  # vector -> number of its passage
    vectors: Any  # a FAISS index by inner product, which is the cosine for unit vectors
    digests: Mapping[str, str]  # document id -> digest of its content

    @classmethod
    def empty(cls, settings: Manifest) -> Contents:
        """Contents without documents."""
        return cls(settings, (), np.zeros(0, np.int64), _new_vectors(settings), {})

    @classmethod
    def read(cls, settings: Manifest, files: Mapping[str, bytes]) -> Contents:
        """Contents of the files that `files` wrote."""
        windows, passages, digests = list[int](), list[Passage](), dict[str, str]()
        for line in files[PASSAGES].decode().split("\n")[:-1]:  # splitlines would also cut inside texts
            values = json.loads(line)
            windows.append(values.pop("windows"))
            digests[values["doc_id"]] = values.pop("content")
            passages.append(Passage(**values))
        owner = np.repeat(np.arange(len(windows)), windows)
        vectors = faiss.deserialize_index(np.frombuffer(files[VECTORS], np.uint8))
        return cls(settings, tuple(passages), owner, vectors, digests)

    def files(self) -> dict[str, bytes]:
        """The files of an index, by name."""
        windows = np.bincount(self.owner, minlength=len(self.passages)).tolist()
        lines = [
            {**asdict(p), "windows": n, "content": self.digests[p.doc_id]}
            for p, n in zip(self.passages, windows, strict=True)
        ]
        return {
            PASSAGES: "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode(),
            VECTORS: faiss.serialize_index(self.vectors).tobytes(),
        }

    @property
    def manifest(self) -> Manifest:
        """Models and settings of the index, and its present contents."""
        contents = "".join(f"{doc_id}\0{self.digests[doc_id]}\0" for doc_id in sorted(self.digests))
        return replace(
            self.settings,
            corpus=xxhash.xxh3_128_hexdigest(contents.encode()),
            documents=len(self.digests),
            passages=len(self.passages),
            vectors=len(self.owner),
        )

    def apply(self, change: Change) -> Contents:
        """The contents after a change."""
        kept = self._without(change.gone)
        if not change.digests:
            return kept
        numbers = np.arange(len(kept.passages), len(kept.passages) + len(change.passages))
        vectors = kept.vectors
        if len(change.vectors):
            vectors = faiss.clone_index(vectors)
            vectors.add(np.ascontiguousarray(change.vectors, np.float32))
        dtypes = {*self.settings.embedder_dtype.split("+"), change.dtype} - {""}
        return Contents(
            replace(self.settings, embedder_dtype="+".join(sorted(dtypes))),
            (*kept.passages, *change.passages),
            np.concatenate([kept.owner, np.repeat(numbers, change.windows)]),
            vectors,
            {**kept.digests, **change.digests},
        )

    def best(self, query: np.ndarray, k: int) -> dict[int, float]:
        """Passage number -> best score: the k best different passages, their equals in score, perhaps some more."""
        fetch = 2 * k + 8
        while True:
            scores, rows = self._nearest(query, fetch)
            best: dict[int, float] = {}
            texts: dict[tuple[str, str], float] = {}
            for score, row in zip(scores.tolist(), rows.tolist(), strict=True):  # best first
                number = int(self.owner[row])
                passage = self.passages[number]
                last = best.setdefault(number, round(score, SCORE_DIGITS))
                texts.setdefault((passage.title, passage.text), last)
            complete = len(texts) > k and list(texts.values())[k - 1] > list(best.values())[-1]
            if complete or fetch >= len(self.owner):
                return best
            fetch *= 4

    def _without(self, doc_ids: Set[str]) -> Contents:
        """The contents without these documents. An HNSW graph cannot delete a node: it is built again."""
        gone = doc_ids & self.digests.keys()
        if not gone:
            return self
        keep = np.array([p.doc_id not in gone for p in self.passages], bool)
        windows = np.bincount(self.owner, minlength=len(keep))[keep]
        vectors = _new_vectors(self.settings)
        if len(left := self._all_vectors()[keep[self.owner]]):
            vectors.add(np.ascontiguousarray(left))
        return Contents(
            self.settings,
            tuple(p for p in self.passages if p.doc_id not in gone),
            np.repeat(np.arange(len(windows)), windows),
            vectors,
            {d: digest for d, digest in self.digests.items() if d not in gone},
        )

    def _all_vectors(self) -> np.ndarray:
        """[vectors, dimension]"""
        vectors: np.ndarray = self.vectors.reconstruct_n(0, self.vectors.ntotal)
        return vectors

    def _nearest(self, query: np.ndarray, fetch: int) -> tuple[np.ndarray, np.ndarray]:
        """Falling scores and rows of the `fetch` vectors nearest to the query; of all, compared exactly."""
        if fetch >= len(self.owner):
            scores = self._all_vectors() @ query
            order = np.argsort(-scores, kind="stable")
            return scores[order], order
        options: Any = None
        if self.settings.kind == "hnsw":
            options = faiss.SearchParametersHNSW(efSearch=max(HNSW_SEARCH, fetch))  # type: ignore[attr-defined]  # not in its stubs
        scores, rows = self.vectors.search(query[None], fetch, params=options)
        found = rows[0] >= 0  # HNSW may reach fewer
        return scores[0][found], rows[0][found]


def _new_vectors(settings: Manifest) -> Any:
    made: Any = faiss.IndexFlatIP(settings.dimension)
    if settings.kind == "hnsw":
        made = faiss.IndexHNSWFlat(settings.dimension, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        made.hnsw.efConstruction = HNSW_BUILD
    return made
