"""A FAISS index of passages: search, add, delete. A change is on disk before it is searched.

A passage has one vector for each of its windows; its score is that of its best window.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from blendserve.core import Document, Passage, Steps, run
from blendserve.errors import CorpusError, IndexChanged, IndexMissing, InputError, VectorIndexError
from blendserve.retrieve import manifest as disk
from blendserve.retrieve.chunker import TokenCounter, split
from blendserve.retrieve.contents import NO_VECTORS, Change, Contents
from blendserve.retrieve.documents import as_documents, content_digest, document_id
from blendserve.retrieve.embedder import Embedder, Progress
from blendserve.retrieve.encoder import Window
from blendserve.retrieve.manifest import Manifest

BUILDING = "building"  # folder inside an index: the batches that a long build has saved
BATCH_WINDOWS = 2000  # embedded between two saves, half a minute
BATCH_SHARE = 0.25  # of the windows in the index, if that is more: saving a large index takes longer
REPEATS = 5  # of a change whose save another process has overtaken


class Added(NamedTuple):
    """What adding documents has changed."""

    documents: int  # new ones
    passages: list[Passage]  # that were not in the index
    replaced: list[Passage]  # that are not in it any more


class Cut(NamedTuple):
    """A new document, cut into passages, and these into windows."""

    id: str
    document: Document
    passages: list[Passage]
    windows: list[list[Window]]  # of each passage

    @property
    def n_windows(self) -> int:
        """The number of texts to embed."""
        return sum(map(len, self.windows))


class VectorIndex:
    """Passages in the order they were added, with their vectors. Make one with `create`, `build` or `open`.

    Thread-safe. A change is saved first and searched then; one that cannot be saved leaves the index as it was. An HNSW
    graph cannot delete a node, so deleting and replacing build the graph again (seconds for ten thousand vectors): give
    `delete` all ids at once.
    """

    def __init__(
        self, path: Path, embedder: Embedder, tokens: TokenCounter, contents: Contents, base: str | None
    ) -> None:
        """base: digest of the manifest on disk that the contents come from."""
        self.path, self.embedder, self.tokens = path, embedder, tokens
        self._contents, self._base = contents, base
        self._saving = threading.Lock()

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
        """An empty index in memory; the first change writes it to `path`, in place of any index there."""
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
        base = disk.manifest_digest(Path(path))
        return cls(Path(path), embedder, tokens, Contents.empty(manifest), base)

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
        batch. Raises as `add`, and IndexChanged if another process writes an index to `path` meanwhile.
        """
        path, given = Path(path), list(as_documents(documents))
        base = disk.manifest_digest(path)
        index = cls.create(path / BUILDING, embedder, tokens, **settings)
        with suppress(VectorIndexError):  # the batches that a killed build with the same settings has saved
            manifest, files, saved = disk.read(index.path)
            if manifest.settings == index._contents.settings.settings:
                index._contents, index._base = Contents.read(manifest, files), saved
        ids = {document_id(document) for document in given}
        index._contents = index._contents.apply(Change(index._contents.digests.keys() - ids))
        batches = index._batches(run(index._cut(given))) or [[]]
        total, done = sum(cut.n_windows for batch in batches for cut in batch), 0
        for batch in batches:
            change = run(index._embed(batch, progress, done, total))
            done += len(change.vectors)
            if batch is batches[-1]:
                index.path, index._base = path, base
            index._save(index._contents.apply(change))
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
        return cls(path, embedder, tokens, Contents.read(manifest, files), seal)

    @property
    def passages(self) -> list[Passage]:
        """All passages, in the order they were added."""
        return list(self._contents.passages)

    def __len__(self) -> int:
        return len(self._contents.passages)

    def __contains__(self, doc_id: str) -> bool:
        return doc_id in self._contents.digests

    @property
    def manifest(self) -> Manifest:
        """Models and settings of the index, and its present contents."""
        return self._contents.manifest

    def search(self, question: str, top_k: int) -> list[Passage]:
        """The `top_k` passages nearest to the question (all, if fewer), best first, with `score` set.

        Of passages with the same title and text, one is found. Equal scores are put in order of passage id. Raises
        InputError for a blank question or top_k < 1, IndexMissing when nothing has been added yet.
        """
        if not question.strip():
            raise InputError("the question is empty: ask something", setting="question")
        if top_k < 1:
            raise InputError(f"top_k={top_k} asks for no passage: give 1 or more", setting="top_k")
        contents = self._contents
        if not contents.passages:
            raise IndexMissing(
                f"index {self.path} is empty: add documents with `blendserve index add`", path=self.path
            )
        best = contents.best(self.embedder.embed_question(question), min(top_k, len(contents.passages)))
        found = [replace(contents.passages[n], score=score) for n, score in best.items()]
        return nearest_distinct(found, top_k)

    def add(
        self, documents: Iterable[Document | str | Mapping[str, Any]], progress: Progress | None = None
    ) -> Added:
        """Add new documents and save -> what has changed.

        A known id with the same content is skipped, with other content it replaces the old document. Raises
        CorpusError (also for an id given twice with different contents) or ConfigError before anything changes, and as
        `commit`. `progress` counts windows embedded. A long run saves after each batch, so after a kill the same call
        continues there.
        """
        batches = self._batches(run(self._cut(as_documents(documents))))
        total, done = sum(cut.n_windows for batch in batches for cut in batch), 0
        added = Added(0, [], [])
        for batch in batches:
            change = run(self._embed(batch, progress, done, total))
            done += len(change.vectors)
            more = self.commit(change)
            added = Added(
                added.documents + more.documents,
                added.passages + more.passages,
                added.replaced + more.replaced,
            )
        return added

    def embed_steps(self, documents: Iterable[Document]) -> Steps[Change]:
        """The change that adds the new ones of these documents, for `commit`. Raises CorpusError, ConfigError."""
        cuts = yield from self._cut(documents)
        return (yield from self._embed(cuts, None, 0, 0))

    def fills_batch(self, changes: Sequence[Change]) -> bool:
        """Whether so much was embedded that it should be saved."""
        return sum(len(change.vectors) for change in changes) >= _batch_size(len(self._contents.owner))

    def delete(self, *doc_ids: str) -> int:
        """Remove documents with their passages and vectors, and save -> number of removed documents."""
        gone = {doc_id for doc_id in doc_ids if doc_id in self}
        if gone:
            self.commit(Change(gone))
        return len(gone)

    def commit(self, *changes: Change) -> Added:
        """Make these changes, one after the other, and save them -> what they have changed together.

        A process killed at any moment leaves the old or the new index on disk. What another process has saved meanwhile
        is read first. Raises VectorIndexError when that cannot be read or the path not be written; nothing changes then.
        """
        with self._saving:
            for n in range(1 + REPEATS):
                before = after = self._contents
                for change in changes:
                    after = after.apply(change)
                try:
                    self._save(after)
                    break
                except IndexChanged:
                    if n == REPEATS:
                        raise
                    self._reopen()
        touched = {doc_id for change in changes for doc_id in (*change.gone, *change.digests)}
        old, new = ([p for p in c.passages if p.doc_id in touched] for c in (before, after))
        kept = {*old} & {*new}
        n_new = len({d for change in changes for d in change.digests})
        return Added(n_new, *([p for p in some if p not in kept] for some in (new, old)))

    def _save(self, contents: Contents) -> None:
        """Write contents to disk, then search in them. Raises VectorIndexError, IndexChanged."""
        about = replace(contents.manifest, format=disk.FORMAT)
        self._base = disk.write(self.path, about, contents.files(), self._base)
        self._contents = contents

    def _reopen(self) -> None:
        """Read what another process has saved. Raises as `open`."""
        anew = VectorIndex.open(self.path, self.embedder, self.tokens)
        self._contents, self._base = anew._contents, anew._base

    def _cut(self, documents: Iterable[Document]) -> Steps[list[Cut]]:
        """The documents with new content, cut. Raises CorpusError, ConfigError."""
        cuts = list[Cut]()
        for doc_id, document in self._new(documents).items():
            passages = list[Passage]()
            for passage in split(document, self._contents.settings.chunk_tokens, self.tokens.count):
                passages.append(passage)
                yield
            cuts.append(Cut(doc_id, document, passages, []))
        windows = iter((yield from self.embedder.cut([p for cut in cuts for p in cut.passages])))
        return [cut._replace(windows=[next(windows) for _ in cut.passages]) for cut in cuts]

    def _new(self, documents: Iterable[Document]) -> dict[str, Document]:
        """The documents with new content, by id."""
        given: dict[str, Document] = {}
        for document in documents:
            doc_id = document_id(document)
            if content_digest(given.setdefault(doc_id, document)) != content_digest(document):
                raise CorpusError(
                    f"two different documents have the id {doc_id!r}: give each its own", setting="id"
                )
        known = self._contents.digests
        return {d: document for d, document in given.items() if known.get(d) != content_digest(document)}

    def _batches(self, cuts: Iterable[Cut]) -> list[list[Cut]]:
        """The documents in order; a batch grows with the index."""
        batches, size, n_saved = list[list[Cut]](), 0, len(self._contents.owner)
        for cut in cuts:
            if not batches or size >= _batch_size(n_saved):
                n_saved += size
                size = 0
                batches.append([])
            batches[-1].append(cut)
            size += cut.n_windows
        return batches

    def _embed(self, cuts: Sequence[Cut], progress: Progress | None, done: int, total: int) -> Steps[Change]:
        """The change that adds these documents. done: windows embedded before, of `total`."""
        windows = [window for cut in cuts for of_passage in cut.windows for window in of_passage]
        report = (lambda n, _: progress(done + n, total)) if progress else None
        vectors = (yield from self.embedder.encode(windows, report)) if windows else NO_VECTORS
        return Change(
            gone={cut.id for cut in cuts},
            digests={cut.id: content_digest(cut.document) for cut in cuts},
            passages=[p for cut in cuts for p in cut.passages],
            windows=[len(of_passage) for cut in cuts for of_passage in cut.windows],
            vectors=vectors,
            dtype=self.embedder.dtype,
        )


def _batch_size(n_windows: int) -> float:
    """Number of windows that are embedded between two saves of an index with this many."""
    return max(BATCH_WINDOWS, BATCH_SHARE * n_windows)


def nearest_distinct(passages: Iterable[Passage], top_k: int) -> list[Passage]:
    """The `top_k` passages with the highest scores, then the least ids; of those with the same title and text, one."""
    found: dict[tuple[str, str], Passage] = {}
    for passage in sorted(passages, key=lambda p: (-(p.score or 0.0), p.id)):
        found.setdefault((passage.title, passage.text), passage)
    return list(found.values())[:top_k]
