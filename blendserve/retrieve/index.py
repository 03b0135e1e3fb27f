"""An index of passages: search, add, delete. A change is on disk before it is searched.

A passage has one vector for each of its windows; its score is that of its best window.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blendserve.core import Document, Passage, PassageFilter, Steps, run
from blendserve.errors import CorpusError, IndexMismatch, IndexMissing, InputError
from blendserve.retrieve import languages, tables
from blendserve.retrieve.chunker import TokenCounter, split
from blendserve.retrieve.database import Database
from blendserve.retrieve.documents import as_documents, content_digest, document_id
from blendserve.retrieve.embedder import BUNDLED, Embedder, Progress
from blendserve.retrieve.tables import FORMAT, EmbeddedDocument, Manifest, Rows
from blendserve.retrieve.vectors import Vectors
from blendserve.retrieve.words import Words

BUILDING = "building"  # folder inside an index: what a long build has saved
DEPTH = 50  # passages of each ranking that are fused
RANK_OFFSET = 5  # the larger, the less the first ranks count; chosen on halves of five sets of questions
ANY = PassageFilter()
BATCH = 1_000_000  # characters that are cut, embedded and saved at once, half a minute

log = logging.getLogger(__name__)


class Added(NamedTuple):
    """The changes by which documents were added."""

    documents: int  # new ones
    passages: list[Passage]  # that were not in the index
    replaced: list[Passage]  # that are not in it any more


class Candidates(NamedTuple):
    """What an index has found for a question."""

    near: list[Passage]  # by vectors
    by_words: list[tuple[float, Passage]]  # with the score by words


class VectorIndex:
    """Passages in the order they were added, with their vectors. Make one with `create`, `build` or `open`.

    Thread-safe, and safe with other processes: a search sees all changes that any process has saved before.
    """

    def __init__(self, path: Path, embedder: Embedder, tokens: TokenCounter) -> None:
        self.path = path
        self.embedder = embedder
        self.tokens = tokens
        self.database = Database(path)
        self._loaded: tuple[Vectors, Words] | None = None
        self._loading = threading.Lock()

    @classmethod
    def create(
        cls, path: str | Path, embedder: Embedder, tokens: TokenCounter, *, chunk_tokens: int
    ) -> VectorIndex:
        """An empty index, in place of any index at `path`. Raises VectorIndexError."""
        index = cls(Path(path), embedder, tokens)
        index._begin(chunk_tokens)
        return index

    @classmethod
    def build(
        cls,
        path: str | Path,
        embedder: Embedder,
        tokens: TokenCounter,
        documents: Iterable[Document | str | Mapping[str, Any]],
        progress: Progress | None = None,
        *,
        chunk_tokens: int,
    ) -> VectorIndex:
        """Build an index of these documents, and put it in place of any index at `path`.

        A long build saves batches in a folder of its own. When it is killed, the same call continues after the last
        batch. Raises as `add`.
        """
        path = Path(path)
        given = list(as_documents(documents))
        index = cls(path / BUILDING, embedder, tokens)
        index.database.is_exclusive = True
        with closing(index):
            index._begin(chunk_tokens, keep=True)
            with index.database.read() as rows:
                known = tables.document_ids(rows)
            index.delete(*(known - {document_id(document) for document in given}))
            index.add(given, progress)
            index.database.copy_into(Database(path))
        shutil.rmtree(path / BUILDING, ignore_errors=True)
        return cls.open(path, embedder, tokens)

    @classmethod
    def open(cls, path: str | Path, embedder: Embedder, tokens: TokenCounter) -> VectorIndex:
        """The index at `path`.

        Raises IndexMissing, IndexMismatch (another embedder, model or format) or IndexDamaged.
        """
        index = cls(Path(path), embedder, tokens)
        with index._reading():
            return index

    @property
    def passages(self) -> list[Passage]:
        """All passages, in the order they were added."""
        with self.database.read() as rows:
            return tables.select_passages(rows)

    def scan(self, n: int, selection: PassageFilter = ANY) -> Iterator[list[Passage]]:
        """Yield all passages, at most n at a time, without those deleted meanwhile. selection: by metadata."""
        condition, values = tables.selected(selection, "p.document")
        with self._reading() as (_, vectors, _):
            numbers = vectors.numbers.tolist()
        for at in range(0, len(numbers), n):
            some = numbers[at : at + n]
            with self.database.read() as rows:
                within = f"p.number BETWEEN ? AND ? AND {condition}"
                passages = tables.select_passages(rows, within, some[0], some[-1], *values)
            yield passages

    def passages_of(self, doc_ids: Iterable[str]) -> list[Passage]:
        """The passages of these documents."""
        with self.database.read() as rows:
            return [p for doc_id in doc_ids for p in tables.select_passages(rows, "d.id = ?", doc_id)]

    def passages_like(self, passage: Passage) -> list[Passage]:
        """Return the passages that make the same chunk as this one."""
        with self.database.read() as rows:
            return tables.select_passages(rows, "p.hash = ?", tables.text_hash(passage))

    def documents(self, selection: PassageFilter = ANY) -> list[tuple[str, str, int]]:
        """Id, title and number of passages of each document, in the order they were added. selection: by metadata."""
        with self.database.read() as rows:
            return tables.list_documents(rows, selection)

    def __len__(self) -> int:
        with self._reading() as (_, vectors, _):
            return len(vectors.numbers)

    def __contains__(self, doc_id: str) -> bool:
        with self.database.read() as rows:
            return tables.digest_of(rows, doc_id) is not None

    @property
    def manifest(self) -> Manifest:
        """Models and settings of the index, and its present contents."""
        with self.database.read() as rows:
            return tables.with_counts(rows, self.database.manifest(rows))

    def search(self, question: str, top_k: int, selection: PassageFilter = ANY) -> list[Passage]:
        """The `top_k` passages that fit the question best (all, if fewer), best first, with `score` set.

        Ranks by vectors and by words are fused (`fuse`). Of passages with the same title and text, only one is returned.
        Raises InputError for a blank question or top_k < 1, IndexMissing for an empty index.
        """
        return fuse([self.candidates(question, top_k, selection)], top_k)

    def candidates(self, question: str, top_k: int, selection: PassageFilter = ANY) -> Candidates:
        """The passages that `search` ranks. Raises as `search`."""
        if not question.strip():
            raise InputError("the question is empty: ask something", setting="question")
        if top_k < 1:
            raise InputError(f"top_k={top_k} asks for no passage: give 1 or more", setting="top_k")
        query = self.embedder.embed_question(question)
        with self._reading() as (rows, vectors, words):
            if not len(vectors.numbers):
                raise IndexMissing(
                    f"index {self.path} is empty: add documents with `blendserve index add`", path=self.path
                )
            depth = max(DEPTH, top_k)
            documents = tables.selected_documents(rows, selection)
            allowed = None if documents is None else vectors.of_documents(documents)
            near = vectors.best(query, min(depth, len(vectors.numbers)), allowed)
            by_words = words.best(question, depth, vectors.texts, allowed)
            scores = near | vectors.scores(query, [n for n in by_words if n not in near])
            numbers = sorted(n for n, score in scores.items() if score >= selection.min_score)
            passages = tables.select_passages(rows, f"p.number IN ({', '.join(map(str, numbers))})")
        found = {n: replace(p, score=scores[n]) for n, p in zip(numbers, passages, strict=True)}
        return Candidates(
            [found[n] for n in near if n in found],
            [(score, found[n]) for n, score in by_words.items() if n in found],
        )

    def add(
        self, documents: Iterable[Document | str | Mapping[str, Any]], progress: Progress | None = None
    ) -> tuple[int, list[Passage]]:
        """Add new documents and save -> how many, and the passages that are not in the index any more.

        A known id with the same content is skipped, with other content it replaces the old document. Raises
        CorpusError (also for an id given twice with different contents) before anything changes, ConfigError, and as
        `commit`. Documents are cut, embedded and saved in batches: after a kill the same call continues with the next
        one. `progress` counts characters.
        """
        new = self._new(as_documents(documents))
        n_new = 0
        replaced: list[Passage] = []
        warning = languages.warning((document.text for document in new), self.embedder.name)
        if warning and self.embedder.name in BUNDLED:
            log.warning("%s", warning)
        done = 0
        total = sum(len(document.text) for document in new)
        for batch in _batches(new):
            size = sum(len(document.text) for document in batch)
            added = self.commit(run(self._embed(batch, _part(progress, done, size, total))))
            done += size
            n_new += added.documents
            replaced += added.replaced
        return n_new, replaced

    def embed_steps(self, documents: Iterable[Document]) -> Steps[list[EmbeddedDocument]]:
        """Cut and embed the documents that are new, for `commit`. Raises CorpusError, ConfigError."""
        return (yield from self._embed(self._new(documents)))

    def commit(self, documents: Sequence[EmbeddedDocument], job: Mapping[str, Any] | None = None) -> Added:
        """Add or replace these documents in one transaction -> what has changed.

        job: its new state, saved with them. Raises VectorIndexError when the file cannot be written; nothing changes
        then.
        """
        added = Added(0, [], [])
        with self.database.write() as rows:
            new = [d for d in documents if tables.digest_of(rows, d.id) != d.digest]
            for document in new:
                old = tables.remove(rows, document.id)
                passages = document.passages
                kept = {*old} & {*passages}
                tables.insert(rows, document)
                added.passages.extend(p for p in passages if p not in kept)
                added.replaced.extend(p for p in old if p not in kept)
            if job is not None:
                tables.save_job(rows, job)
        return added._replace(documents=len(new))

    def delete(self, *doc_ids: str) -> int:
        """Remove documents with their passages and vectors -> number of removed documents. Raises as `commit`."""
        with self.database.write() as rows:
            gone = {doc_id for doc_id in doc_ids if tables.digest_of(rows, doc_id)}
            for doc_id in gone:
                tables.remove(rows, doc_id)
        return len(gone)

    def save_job(self, job: Mapping[str, Any]) -> None:
        """Save the state of a job (serve/jobs.py). Raises as `commit`."""
        with self.database.write() as rows:
            tables.save_job(rows, job)

    def saved_jobs(self) -> list[dict[str, Any]]:
        """The last saved states of jobs, the oldest job first."""
        with self.database.read() as rows:
            return tables.read_jobs(rows)

    def close(self) -> None:
        """Close the file; it is opened again when it is needed."""
        self.database.close()

    def _begin(self, chunk_tokens: int, keep: bool = False) -> None:
        """Make the index empty. keep: unless it has the same settings."""
        manifest = Manifest(
            format=FORMAT,
            embedder=self.embedder.name,
            embedder_fingerprint=self.embedder.fingerprint,
            dimension=self.embedder.dimension,
            reader=self.tokens.model,
            reader_fingerprint=self.tokens.fingerprint,
            chunk_tokens=chunk_tokens,
        )
        self.database.make()
        with self.database.write() as rows:
            try:
                is_kept = keep and self.database.manifest(rows) == manifest
            except (IndexMissing, IndexMismatch):
                is_kept = False
            if not is_kept:
                tables.begin(rows, manifest)

    @contextmanager
    def _reading(self) -> Iterator[tuple[Rows, Vectors, Words]]:
        """Open one state of the index: its rows, vectors and words. The latter two are loaded if they have changed."""
        with self.database.read() as rows:
            with self._loading:  # the state is read within: no thread has a later one
                vectors, words = self._load(rows)
            yield rows, vectors, words

    def _load(self, rows: Rows) -> tuple[Vectors, Words]:
        """Vectors and words in the state of this transaction. Raises IndexMissing, IndexMismatch, IndexDamaged."""
        if self._loaded is not None and self._loaded[0].state == tables.state(rows):
            return self._loaded
        manifest = self.database.manifest(rows)
        manifest.check(
            self.path,
            (self.embedder.name, self.embedder.fingerprint),
            (self.tokens.model, self.tokens.fingerprint),
        )
        before, words = self._loaded or (None, None)
        vectors = Vectors.load(rows, manifest.dimension, before)
        if before is not None and vectors.faiss_index is not before.faiss_index:
            words = None  # all is loaded anew, without the words of passages that are gone
        self._loaded = vectors, Words.load(rows, vectors.numbers, words)
        return self._loaded

    def _new(self, documents: Iterable[Document]) -> list[Document]:
        """Return the documents whose content the index does not have, each with its id. Raises CorpusError."""
        given: dict[str, Document] = {}
        for document in documents:
            doc_id = document_id(document)
            if content_digest(given.setdefault(doc_id, document)) != content_digest(document):
                raise CorpusError(
                    f"two different documents have the id {doc_id!r}: give each its own", setting="id"
                )
        with self.database.read() as rows:
            return [
                replace(document, id=doc_id)
                for doc_id, document in given.items()
                if tables.digest_of(rows, doc_id) != content_digest(document)
            ]

    def _embed(
        self, documents: Sequence[Document], progress: Progress | None = None
    ) -> Steps[list[EmbeddedDocument]]:
        """Cut the documents into passages, and embed these. Raises ConfigError."""
        with self.database.read() as rows:
            chunk_tokens = self.database.manifest(rows).chunk_tokens
        made: list[EmbeddedDocument] = []
        passages: list[Passage] = []
        for document in documents:
            texts = list[tuple[str, str]]()
            for passage in split(document, chunk_tokens, self.tokens.count):
                passages.append(passage)
                texts.append((passage.title, passage.text))
                yield
            digest = content_digest(document)
            made.append(EmbeddedDocument(document.id, document.title, digest, texts, (), document.metadata))
        if not passages:
            return made
        cut = yield from self.embedder.cut(passages)
        vectors = yield from self.embedder.encode([window for of in cut for window in of], progress)
        of_passages = iter(np.split(vectors, np.cumsum([len(of) for of in cut])[:-1]))
        return [each._replace(vectors=[next(of_passages) for _ in each.texts]) for each in made]


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """The documents in order, in batches of BATCH characters or more."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _part(progress: Progress | None, done: int, size: int, total: int) -> Progress | None:
    """Return the progress of a batch as a part of all characters. done: before the batch. size: of the batch."""
    return (lambda n, of: progress(done + size * n // of, total)) if progress else None


def fuse(candidates: Sequence[Candidates], top_k: int) -> list[Passage]:
    """The `top_k` best passages of one or several indexes, by reciprocal rank fusion (Cormack et al., SIGIR 2009).

    A passage's ranks by vectors and by words count alike. Passages of equal score are in order of their ids; of those
    with the same title and text, only the first is returned.
    """
    depth = max(DEPTH, top_k)
    near = [(passage.score or 0.0, passage) for found in candidates for passage in found.near]
    by_words = [each for found in candidates for each in found.by_words]
    passages: dict[tuple[str, str], Passage] = {}
    values = defaultdict[tuple[str, str], float](float)
    for ranking in (near, by_words):
        ranked = dict.fromkeys(
            (passage.title, passage.text)
            for _, passage in sorted(ranking, key=lambda each: (-each[0], each[1].id))
        )
        for rank, key in enumerate(list(ranked)[:depth], 1):
            values[key] += 1 / (RANK_OFFSET + rank)
    for _, passage in sorted((*near, *by_words), key=lambda each: each[1].id):
        passages.setdefault((passage.title, passage.text), passage)
    best = sorted(values, key=lambda key: (-round(values[key], 9), passages[key].id))
    return [passages[key] for key in best[:top_k]]
