"""A FAISS index of passages: search, add, delete, save.

A passage has one vector for each of its windows; its score is that of its best window.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import faiss
import numpy as np
import xxhash

from blendserve.core import Document, Passage, Steps, run
from blendserve.errors import CorpusError, IndexMissing, InputError, VectorIndexError
from blendserve.retrieve import manifest as disk
from blendserve.retrieve.chunker import TokenCounter, split
from blendserve.retrieve.documents import as_documents, content_digest, document_id
from blendserve.retrieve.embedder import Embedder, Progress
from blendserve.retrieve.manifest import Manifest

PASSAGES, VECTORS = "passages.jsonl", "vectors.faiss"
BUILDING = "building"  # folder inside an index: the batches that a long build has saved
BATCH_WINDOWS = 2000  # embedded between two saves, half a minute
BATCH_SHARE = 0.25  # of the windows in the index, if that is more: saving a large index takes longer

HNSW_LINKS = 32  # per node, the default of FAISS
HNSW_BUILD, HNSW_SEARCH = 200, 64  # candidates while building, minimum of candidates while searching
SCORE_DIGITS = 6  # the rest depends on the order of float32 sums: such scores are equal


class Added(NamedTuple):
    """What adding documents has changed."""

    documents: int  # new ones
    passages: list[Passage]  # that were not in the index
    replaced: list[Passage]  # that are not in it any more


class VectorIndex:
    """Passages in the order they were added, with their vectors. Make one with `create`, `build` or `open`.

    `add` and `delete` change it in memory, `save` writes it. An HNSW graph cannot delete a node, so deleting and
    replacing build the graph again (seconds for ten thousand vectors): give `delete` all ids at once.
    """

    def __init__(
        self, path: Path, embedder: Embedder, tokens: TokenCounter, manifest: Manifest, base: str | None
    ) -> None:
        self.path, self.embedder, self.tokens = path, embedder, tokens
        self._made_with = manifest
        self._base = base  # digest of the manifest on disk that the changes start from
        self._digests: dict[str, str] = {}  # document id -> digest of its content
        self._clear()

    @classmethod
    def create(
        cls,
        path: str | Path,
        embedder: Embedder,
        tokens: TokenCounter,
        *,
        chunk_tokens: int,
        kind: Literal["flat", "hnsw"] = "flat",
    ) -> VectorIndex:
        """An empty index; `save` writes it to `path`, replacing any index there."""
        manifest = Manifest(
            format=disk.FORMAT,
            embedder=embedder.name,
            embedder_fingerprint=embedder.fingerprint,
            dimension=embedder.dimension,
            reader=tokens.model,
            reader_fingerprint=tokens.fingerprint,
            chunk_tokens=chunk_tokens,
            kind=kind,
            embedder_dtype="",
        )
        return cls(Path(path), embedder, tokens, manifest, disk.manifest_digest(Path(path)))

    @classmethod
    def build(
        cls,
        path: str | Path,
        embedder: Embedder,
        tokens: TokenCounter,
        documents: Iterable[Document | str | Mapping[str, Any]],
        progress: Progress | None = None,
        **settings: Any,
    ) -> VectorIndex:
        """Build and save an index of these documents, replacing any index at `path`. settings: as for `create`.

        A long build saves batches in a folder of its own. When it is killed, the same call continues after the last
        batch. Raises as `add` and `save`.
        """
        path, given = Path(path), list(as_documents(documents))
        base = disk.manifest_digest(path)
        index = cls.create(path / BUILDING, embedder, tokens, **settings)
        with suppress(VectorIndexError):  # the batches that a killed build with the same settings has saved
            manifest, files, saved = disk.read(index.path)
            if manifest.settings == index._made_with.settings:
                index._made_with, index._base = manifest, saved
                index._fill(files)
        ids = {document_id(document) for document in given}
        index.delete(*(doc_id for doc_id in index._digests if doc_id not in ids))
        index.add(given, progress)
        index.path, index._base = path, base
        index.save()
        shutil.rmtree(path / BUILDING, ignore_errors=True)
        return index

    @classmethod
    def open(cls, path: str | Path, embedder: Embedder, tokens: TokenCounter) -> VectorIndex:
        """The index as it was last saved.

        Raises IndexMissing, IndexMismatch (another embedder, model, or a newer format) or IndexDamaged.
        """
        path = Path(path)
        manifest, files, seal = disk.read(path)
        manifest.check(path, (embedder.name, embedder.fingerprint), (tokens.model, tokens.fingerprint))
        index = cls(path, embedder, tokens, manifest, seal)
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
        """Models and settings of the index, and its present contents."""
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
        """Add new documents -> number of them. See `add_steps`."""
        return run(self.add_steps(documents, progress)).documents

    def add_steps(
        self, documents: Iterable[Document | str | Mapping[str, Any]], progress: Progress | None = None
    ) -> Steps[Added]:
        """Add new documents. The index may be searched between the steps.

        A known id with the same content is skipped, with other content it replaces the old document. Raises
        CorpusError (also for an id given twice with different contents) or ConfigError before anything changes.
        `progress` counts windows embedded. A long run saves the index after each batch, so after a kill the same call
        continues there; raises VectorIndexError then, as `save`.
        """
        new = self._new(as_documents(documents))
        passages = {d: list[Passage]() for d in new}
        for d, document in new.items():
            for passage in split(document, self._made_with.chunk_tokens, self.tokens.count):
                passages[d].append(passage)
                yield
        flat, before = list(chain(*passages.values())), [p for p in self._passages if p.doc_id in new]
        windows = dict(zip((p.id for p in flat), (yield from self.embedder.cut(flat)), strict=True))
        total, done = sum(map(len, windows.values())), 0
        for batch in self._batches({d: sum(len(windows[p.id]) for p in passages[d]) for d in new}):
            if done:
                self.save()
            of_batch = [p for d in batch for p in passages[d]]
            texts = [w for p in of_batch for w in windows[p.id]]
            report = (lambda n, _, done=done: progress(done + n, total)) if progress else None
            vectors = yield from self.embedder.encode(texts, report)
            self.delete(*(d for d in batch if d in self))
            self._append(of_batch, [len(windows[p.id]) for p in of_batch], vectors)
            self._digests |= {d: content_digest(new[d]) for d in batch}
            dtypes = {*self._made_with.embedder_dtype.split("+"), self.embedder.dtype} - {""}
            self._made_with = replace(self._made_with, embedder_dtype="+".join(sorted(dtypes)))
            done += len(texts)
        kept = {*before} & {*flat}
        return Added(len(new), *([p for p in some if p not in kept] for some in (flat, before)))

    def _batches(self, windows: Mapping[str, int]) -> Iterator[list[str]]:
        """Ids of documents in order, given the windows of each; a batch grows with the index."""
        batch: list[str] = []
        size = 0
        for doc_id, n in windows.items():
            batch.append(doc_id)
            size += n
            if size >= max(BATCH_WINDOWS, BATCH_SHARE * len(self._owner)):
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def delete(self, *doc_ids: str) -> int:
        """Remove documents with their passages and vectors -> number of removed documents."""
        gone = {doc_id for doc_id in doc_ids if doc_id in self}
        if not gone:
            return 0
        keep = np.array([p.doc_id not in gone for p in self._passages])
        windows = np.bincount(self._owner, minlength=len(keep))[keep]
        vectors = self._vectors()[keep[self._owner]]
        passages = [p for p in self._passages if p.doc_id not in gone]
        self._clear()
        self._append(passages, windows.tolist(), vectors)
        self._digests = {d: digest for d, digest in self._digests.items() if d not in gone}
        return len(gone)

    def save(self) -> None:
        """Write the index to its path; a process killed at any moment leaves the old or the new index.

        Raises VectorIndexError when the path cannot be written, or another process has changed the index.
        """
        windows = np.bincount(self._owner, minlength=len(self._passages)).tolist()
        lines = [
            {**asdict(p), "windows": n, "content": self._digests[p.doc_id]}
            for p, n in zip(self._passages, windows, strict=True)
        ]
        files = {
            PASSAGES: "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode(),
            VECTORS: faiss.serialize_index(self._faiss).tobytes(),
        }
        self._base = disk.write(self.path, replace(self.manifest, format=disk.FORMAT), files, self._base)

    def _fill(self, files: Mapping[str, bytes]) -> None:
        """Load what `save` wrote."""
        windows: list[int] = []
        for line in files[PASSAGES].decode().split("\n")[:-1]:  # splitlines would also cut inside texts
            values = json.loads(line)
            windows.append(values.pop("windows"))
            self._digests[values["doc_id"]] = values.pop("content")
            self._passages.append(Passage(**values))
        self._owner = np.repeat(np.arange(len(windows)), windows)
        self._faiss = faiss.deserialize_index(np.frombuffer(files[VECTORS], np.uint8))

    def _new(self, documents: Iterable[Document]) -> dict[str, Document]:
        """The documents with new content, by id."""
        given: dict[str, Document] = {}
        for document in documents:
            doc_id = document_id(document)
            if content_digest(given.setdefault(doc_id, document)) != content_digest(document):
                raise CorpusError(
                    f"two different documents have the id {doc_id!r}: give each its own", setting="id"
                )
        return {
            d: document for d, document in given.items() if self._digests.get(d) != content_digest(document)
        }

    def _clear(self) -> None:
        self._passages: list[Passage] = []
        self._owner = np.zeros(0, np.int64)  # vector -> number of its passage
        dimension = self.embedder.dimension  # by inner product, which is the cosine for unit vectors
        made: Any = faiss.IndexFlatIP(dimension)
        if self._made_with.kind == "hnsw":
            made = faiss.IndexHNSWFlat(dimension, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
            made.hnsw.efConstruction = HNSW_BUILD
        self._faiss = made

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
                best.setdefault(int(self._owner[row]), round(score, SCORE_DIGITS))
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
            options = faiss.SearchParametersHNSW(efSearch=max(HNSW_SEARCH, fetch))  # type: ignore[attr-defined]  # not in its stubs
        scores, rows = self._faiss.search(query[None], fetch, params=options)
        found = rows[0] >= 0  # HNSW may reach fewer
        return scores[0][found], rows[0][found]
