"""Documents, in one index or in several collections: searched, added, replaced, deleted.

The one place where documents and their KV are deleted or replaced. What is deleted loses its KV first, so that a kill in
between leaves nothing behind that no document explains. For one thread: an index may not change while it is searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendserve.blend.blender import Blender
from blendserve.core import Document, Passage
from blendserve.engine.prompt import PromptBuilder, shown
from blendserve.errors import ConfigError
from blendserve.paths import index_folder
from blendserve.retrieve import VectorIndex, as_documents, document_id

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of one index.

    blenders: one for each namespace in which their KV may lie.
    others: indexes whose passages may have texts in common with these; the KV of such a text stays.
    """

    index: VectorIndex
    prompts: PromptBuilder
    blenders: Sequence[Blender]
    others: Sequence[VectorIndex] = ()

    def add(
        self, documents: Iterable[Document | str | Mapping[str, Any]], progress: Progress | None = None
    ) -> tuple[int, list[Passage]]:
        """Add or replace documents and save -> how many were new, and their passages. Raises CorpusError."""
        added, new, gone = self.put(documents, progress)
        self.settle(gone)
        return added, new

    def put(
        self, documents: Iterable[Document | str | Mapping[str, Any]], progress: Progress | None = None
    ) -> tuple[int, list[Passage], list[Passage]]:
        """Add or replace documents -> how many were new, their passages, and those that are gone, for `settle`."""
        found = list(as_documents(documents))
        before = self._of(found)
        added = self.index.add(found, progress)
        now = self._of(found)
        return added, [p for p in now if p not in before], [p for p in before if p not in now]

    def settle(self, gone: Iterable[Passage]) -> None:
        """Save what was put, and delete the KV of what it replaced."""
        self.index.save()
        now = set(self.index.passages)
        self._forget([p for p in gone if p not in now])

    def delete(self, *doc_ids: str) -> tuple[int, list[Passage]]:
        """Remove documents and save -> how many were there, and the passages that they had."""
        gone = [p for p in self.index.passages if p.doc_id in doc_ids]
        self._forget(gone)
        if deleted := self.index.delete(*doc_ids):
            self.index.save()
        return deleted, gone

    def _of(self, documents: Iterable[Document]) -> dict[Passage, None]:
        """The passages of these documents, in order."""
        ids = {document_id(document) for document in documents}
        return {p: None for p in self.index.passages if p.doc_id in ids}

    def _forget(self, gone: Sequence[Passage]) -> None:
        """Delete the KV of passages from every namespace, except of texts that other passages share."""
        texts, left = {shown(p): p for p in gone}, set(gone)
        for index in (self.index, *self.others) if gone else ():
            for passage in index.passages:
                if passage not in left:
                    texts.pop(shown(passage), None)
        for passage in texts.values():
            ids = self.prompts.chunk(passage).ids
            for blender in self.blenders:
                blender.forget([ids], ())


class Library:
    """Collections: indexes by name, searched together."""

    def __init__(self, collections: Mapping[str, VectorIndex]) -> None:
        self.collections = dict(collections)

    @classmethod
    def open(cls, first: VectorIndex, indexes: Sequence[str], prompts: PromptBuilder) -> Library:
        """An open index, which is the first of `indexes`, and the others, built with the same reader and embedder.

        Raises IndexMissing, IndexMismatch, and ConfigError for two of one name.
        """
        made, names = (
            first.manifest,
            [Path(index).name for index in indexes],
        )  # a folder's name is its index's
        found = {names[0]: first}
        for name, index in zip(names[1:], indexes[1:], strict=True):
            if name in found:
                raise ConfigError(f"two indexes are called {name!r}: rename a folder")
            found[name] = VectorIndex.open(
                index_folder(index),
                first.embedder,
                reader=made.reader,
                reader_fingerprint=made.reader_fingerprint,
                count=lambda passage: len(prompts.chunk(passage)),
            )
        return cls(found)

    def search(self, names: Iterable[str], question: str, top_k: int) -> list[Passage]:
        """The passages nearest to the question over several collections, best first."""
        filled = [self.collections[name] for name in names if len(self.collections[name])]
        found = [p for index in filled for p in index.search(question, top_k)]
        return sorted(found, key=lambda p: (-(p.score or 0.0), p.id))[:top_k]
