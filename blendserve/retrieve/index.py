"""Passages and their vectors: search, grow, shrink, save. FAISS holds the vectors, manifest.py the files.

A passage has one vector for each of its windows and is scored by its best one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import faiss
import numpy as np
import xxhash

from blendserve.core import Document, Passage
from blendserve.errors import CorpusError, IndexMissing, InputError
from blendserve.retrieve import manifest as disk
from blendserve.retrieve.chunker import Count, split
from blendserve.retrieve.documents import as_documents, content_digest, document_id
from blendserve.retrieve.embedder import Embedder, Progress
from blendserve.retrieve.kept import forget
from blendserve.retrieve.manifest import Manifest

PASSAGES, VECTORS = "passages.jsonl", "vectors.faiss"
EMBEDDING = "embedding.part"  # vectors of documents that are being added, until they are saved

_HNSW_LINKS = 32  # per node, FAISS's usual
_HNSW_BUILD, _HNSW_SEARCH = 200, 64  # candidates kept while building and at least while searching
_SCORE_DIGITS = 6  # float32 sums differ behind that, by the order of adding: ties are ties


class VectorIndex:
    """Passages in the order they were added, and where they lie in the embedder's space.

    Make one with `create` or `open`. `add` and `delete` change it in memory, `save` on disk. An HNSW graph
    cannot forget a node, so there deleting and replacing build it anew (seconds for ten thousand vectors):
    give `delete` all the ids at once.
    """

    def __init__(
        self, path: Path, embedder: Embedder, count: Count, manifest: Manifest, base: str | None
    ) -> None:
        self.path, self.embedder = path, embedder
        self._count = count
        self._made_with = manifest
        self._base = base  # digest of the manifest on disk that this began from
        self._passages: list[Passage] = []
        self._digests: dict[str, str] = {}  # document id -> digest of its content
        self._owner = np.zeros(0, np.int64)  # vector -> number of its passage
        self._faiss = _new_faiss(manifest.kind, embedder.dimension)

    @classmethod
    def create(
        cls,
        path: str | Path,
        embedder: Embedder,
        *,
        reader: str,
        reader_fingerprint: str,
        chunk_tokens: int,
        count: Count,
        kind: Literal["flat", "hnsw"] = "flat",
    ) -> VectorIndex:
        """An empty index; `save` writes it to `path`, in the place of any that is there."""
        manifest = Manifest(
            format=disk.FORMAT,
            embedder=embedder.name,
            embedder_fingerprint=embedder.fingerprint,
            dimension=embedder.dimension,
            reader=reader,
            reader_fingerprint=reader_fingerprint,
            chunk_tokens=chunk_tokens,
            kind=kind,
            corpus="",
            documents=0,
            passages=0,
            vectors=0,
            files={},
            embedder_dtype="",
        )
        return cls(Path(path), embedder, count, manifest, disk.manifest_digest(Path(path)))

    @classmethod
    def open(
        cls, path: str | Path, embedder: Embedder, *, reader: str, reader_fingerprint: str, count: Count
    ) -> VectorIndex:
        """The index as it was last saved.

        Raises IndexMissing, IndexMismatch (another embedder, reader, or a newer format) or IndexDamaged.
        """
        path = Path(path)
        manifest, files, seal = disk.read(path)
        manifest.check(path, (embedder.name, embedder.fingerprint), (reader, reader_fingerprint))
        index = cls(path, embedder, count, manifest, seal)
        index._fill(files)
        return index

    @property
    def passages(self) -> list[Passage]:
        """All passages, in the order they were added."""
        return list(self._passages)

    def __len__(self) -> int:
        return len(self._passages)

    def __contains__(self, doc_id: str) -> bool:
        return doc_id in self._digests

    @property
    def manifest(self) -> Manifest:
        """What the index was built with, and what it holds now."""
        contents = "".join(f"{doc_id}\0{self._digests[doc_id]}\0" for doc_id in sorted(self._digests))
        return replace(
            self._made_with,
            corpus=xxhash.xxh3_128_hexdigest(contents.encode()),
            documents=len(self._digests),
            passages=len(self._passages),
            vectors=len(self._owner),
        )

    def search(self, question: str, top_k: int) -> list[Passage]:
        """The `top_k` passages nearest to the question (all, if fewer), best first, with `score` set.

        Equal scores are put in order of passage id. Raises InputError for a blank question or top_k < 1,
        IndexMissing when nothing has been added yet.
        """
        if not question.strip():
            raise InputError("the question is empty: ask something", setting="question")
        if top_k < 1:
            raise InputError(f"top_k={top_k} asks for no passage: give 1 or more", setting="top_k")
        if not self._passages:
            raise IndexMissing(
                f"index {self.path} is empty: add documents with `blendserve index add`", path=self.path
            )
        best = self._best(self.embedder.embed_question(question), min(top_k, len(self._passages)))
        found = [replace(self._passages[n], score=score) for n, score in best.items()]
        return sorted(found, key=lambda p: (-(p.score or 0.0), p.id))[:top_k]

    def add(
        self, documents: Iterable[Document | str | Mapping[str, Any]], progress: Progress | None = None
    ) -> int:
        """Add what is not there yet and return how many documents that were.

        The same id with the same content adds nothing, with other content it replaces the old one. Raises
        CorpusError (also for an id given twice with different contents) or ConfigError, changing nothing.
        `progress` counts windows embedded; of many, what was embedded is kept beside the index until `save`, so that the
        same call goes on where it was killed.
        """
        new = self._new(as_documents(documents))
        if not new:
            return 0
        passages = [p for d in new.values() for p in split(d, self._made_with.chunk_tokens, self._count)]
        vectors, windows = self.embedder.embed_passages(passages, progress, self.path / EMBEDDING)
        self.delete(*(doc_id for doc_id in new if doc_id in self))
        self._append(passages, windows, vectors)
        dtypes = {*self._made_with.embedder_dtype.split("+"), self.embedder.dtype} - {""}
        self._made_with = replace(self._made_with, embedder_dtype="+".join(sorted(dtypes)))
        self._digests |= {doc_id: content_digest(document) for doc_id, document in new.items()}
        return len(new)

    def delete(self, *doc_ids: str) -> int:
        """Remove documents with their passages and vectors; returns how many of them were there."""
        gone = {doc_id for doc_id in doc_ids if doc_id in self}
        if not gone:
            return 0
        keep = np.array([p.doc_id not in gone for p in self._passages])
        windows = np.bincount(self._owner, minlength=len(keep))[keep]
        vectors = self._vectors()[keep[self._owner]]
        passages = [p for p in self._passages if p.doc_id not in gone]
        self._passages, self._owner = [], np.zeros(0, np.int64)
        self._faiss = _new_faiss(self._made_with.kind, self.embedder.dimension)
        self._append(passages, windows.tolist(), vectors)
        for doc_id in gone:
            del self._digests[doc_id]
        return len(gone)

    def save(self) -> None:
        """Write the index to its path; a kill at any moment leaves the old or the new one there.

        Raises VectorIndexError when the path cannot be written, or holds another index than the one opened.
        """
        windows = Counter(self._owner.tolist())
        lines = [
            {**asdict(p), "windows": windows[n], "content": self._digests[p.doc_id]}
            for n, p in enumerate(self._passages)
        ]
        files = {
            PASSAGES: "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode(),
            VECTORS: faiss.serialize_index(self._faiss).tobytes(),
        }
        self._base = disk.write(self.path, self.manifest, files, self._base)
        forget(self.path / EMBEDDING)

    def _fill(self, files: Mapping[str, bytes]) -> None:
        """Take over what `save` wrote."""
        windows: list[int] = []
        for line in files[PASSAGES].decode().split("\n")[:-1]:  # splitlines would also cut inside texts
            values = json.loads(line)
            windows.append(values.pop("windows"))
            self._digests[values["doc_id"]] = values.pop("content")
            self._passages.append(Passage(**values))
        self._owner = np.repeat(np.arange(len(windows)), windows)
        self._faiss = faiss.deserialize_index(np.frombuffer(files[VECTORS], np.uint8))

    def _new(self, documents: Iterable[Document]) -> dict[str, Document]:
        """By id, those whose content the index does not hold."""
        new: dict[str, Document] = {}
        seen: dict[str, str] = {}
        for document in documents:
            doc_id, digest = document_id(document), content_digest(document)
            if seen.setdefault(doc_id, digest) != digest:
                raise CorpusError(
                    f"two different documents have the id {doc_id!r}: give each its own", setting="id"
                )
            if self._digests.get(doc_id) != digest:
                new[doc_id] = document
        return new

    def _append(self, passages: list[Passage], windows: list[int], vectors: np.ndarray) -> None:
        """`vectors` [sum of windows, dimension]: the passages' vectors in their order."""
        numbers = np.arange(len(self._passages), len(self._passages) + len(passages))
        self._passages += passages
        self._owner = np.concatenate([self._owner, np.repeat(numbers, windows)])
        if len(vectors):
            self._faiss.add(np.ascontiguousarray(vectors, np.float32))

    def _vectors(self) -> np.ndarray:
        """[vectors, dimension]"""
        vectors: np.ndarray = self._faiss.reconstruct_n(0, self._faiss.ntotal)
        return vectors

    def _best(self, query: np.ndarray, k: int) -> dict[int, float]:
        """Passage number -> best score: the k best passages, their equals in score, perhaps some more."""
        fetch = 2 * k + 8
        while True:
            scores, rows = self._nearest(query, fetch)
            best: dict[int, float] = {}
            for score, row in zip(scores.tolist(), rows.tolist(), strict=True):  # best first
                best.setdefault(int(self._owner[row]), round(score, _SCORE_DIGITS))
            complete = len(best) > k and list(best.values())[k - 1] > list(best.values())[-1]
            if complete or fetch >= len(self._owner):
                return best
            fetch *= 4

    def _nearest(self, query: np.ndarray, fetch: int) -> tuple[np.ndarray, np.ndarray]:
        """Falling scores and rows of the `fetch` vectors nearest to the query; of all, compared exactly."""
        if fetch >= len(self._owner):
            scores = self._vectors() @ query
            order = np.argsort(-scores, kind="stable")
            return scores[order], order
        options: Any = None
        if self._made_with.kind == "hnsw":
            options = faiss.SearchParametersHNSW(efSearch=max(_HNSW_SEARCH, fetch))  # type: ignore[attr-defined]  # not in its stubs
        scores, rows = self._faiss.search(query[None], fetch, params=options)
        found = rows[0] >= 0  # HNSW may reach fewer
        return scores[0][found], rows[0][found]


def _new_faiss(kind: Literal["flat", "hnsw"], dimension: int) -> Any:
    """An empty FAISS index by inner product, which is the cosine for unit vectors."""
    if kind == "flat":
        return faiss.IndexFlatIP(dimension)
    index = faiss.IndexHNSWFlat(dimension, _HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = _HNSW_BUILD
    return index
