"""Documents change together with their KV; several indexes serve as collections.

KV is deleted before the documents that explain it, so a kill in between leaves no KV without a document. For one thread:
an index may not change while it is searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blendserve.blend.precompute import ChunkWriter
from blendserve.core import Passage, Steps
from blendserve.engine.prompt import PromptBuilder, passage_text
from blendserve.errors import ConfigError
from blendserve.paths import index_folder
from blendserve.retrieve import VectorIndex


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of one index."""

    index: VectorIndex
    prompts: PromptBuilder
    writers: Sequence[ChunkWriter]  # one for each namespace that may have their KV
    others: Sequence[VectorIndex] = ()  # indexes that may contain the same texts, whose KV stays

    def commit(self, replaced: Iterable[Passage]) -> Steps[None]:
        """Save the index after documents were added, and delete the KV of replaced passages."""
        yield
        self.index.save()
        now = set(self.index.passages)
        self._delete_kv([p for p in replaced if p not in now])

    def delete(self, *doc_ids: str) -> Steps[tuple[int, list[Passage]]]:
        """Remove documents and save -> number of removed documents, and their passages."""
        yield
        removed = [p for p in self.index.passages if p.doc_id in doc_ids]
        self._delete_kv(removed)
        if deleted := self.index.delete(*doc_ids):
            self.index.save()
        return deleted, removed

    def _delete_kv(self, passages: Sequence[Passage]) -> None:
        """In every namespace, except of texts that other passages share."""
        texts, removed = {passage_text(p): p for p in passages}, set(passages)
        for index in (self.index, *self.others) if passages else ():
            for passage in index.passages:
                if passage not in removed:
                    texts.pop(passage_text(passage), None)
        for passage in texts.values():
            for writer in self.writers:
                writer.delete([self.prompts.chunk(passage).ids])


class Collections:
    """Indexes by name, searched together."""

    def __init__(self, collections: Mapping[str, VectorIndex]) -> None:
        self.collections = dict(collections)

    @classmethod
    def open(cls, first: VectorIndex, indexes: Sequence[str]) -> Collections:
        """An open index, which is the first of `indexes`, and the others, built with the same model and embedder.

        Raises IndexMissing, IndexMismatch, and ConfigError for two of one name.
        """
        names = [Path(index).name for index in indexes]
        found = {names[0]: first}
        for name, index in zip(names[1:], indexes[1:], strict=True):
            if name in found:
                raise ConfigError(f"two indexes are called {name!r}: rename a folder")
            found[name] = VectorIndex.open(index_folder(index), first.embedder, first.tokens)
        return cls(found)

    def search(self, names: Iterable[str], question: str, top_k: int) -> list[Passage]:
        """The passages nearest to the question over several collections, best first."""
        filled = [self.collections[name] for name in names if len(self.collections[name])]
        found = [p for index in filled for p in index.search(question, top_k)]
        return sorted(found, key=lambda p: (-(p.score or 0.0), p.id))[:top_k]
