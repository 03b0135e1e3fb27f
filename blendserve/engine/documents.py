"""Documents change together with their KV; several indexes serve as collections.

KV is deleted before the documents that explain it, so a kill in between leaves no KV without a document; and once more
behind them, as a request may have stored it again meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendserve.blend.precompute import ChunkWriter
from blendserve.core import Passage, PassageFilter
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import ConfigError
from blendserve.paths import index_folder
from blendserve.retrieve import TokenCounter, VectorIndex
from blendserve.retrieve.index import ANY, Added, fuse
from blendserve.retrieve.tables import EmbeddedDocument


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of one index."""

    index: VectorIndex
    prompts: PromptBuilder
    writers: Sequence[ChunkWriter]  # one for each namespace that may have their KV
    others: Sequence[VectorIndex] = ()  # indexes that may contain the same texts, whose KV stays

    def commit(self, documents: Sequence[EmbeddedDocument], job: Mapping[str, Any] | None = None) -> Added:
        """Add or replace documents, and delete the KV of replaced passages. job: its new state, saved with them.

        Raises VectorIndexError, StoreError.
        """
        added = self.index.commit(documents, job)
        self.delete_kv(added.replaced)
        return added

    def delete(self, *doc_ids: str) -> tuple[int, list[Passage]]:
        """Remove documents and save -> number of removed documents, and their passages. Raises as `commit`."""
        removed = self.index.passages_of(doc_ids)
        self.delete_kv(removed)
        deleted = self.index.delete(*doc_ids)
        self.delete_kv(removed)
        return deleted, removed

    def delete_kv(self, passages: Collection[Passage]) -> None:
        """Delete KV in every namespace, except of texts that other passages share: one call of the store a namespace."""
        removed = set(passages)

        def is_shared(passage: Passage) -> bool:
            indexes = self.index, *self.others
            return any(other not in removed for index in indexes for other in index.passages_like(passage))

        texts = {passage.chunk_text: passage for passage in passages}
        chunks = [self.prompts.chunk(passage).ids for passage in texts.values() if not is_shared(passage)]
        for writer in self.writers if chunks else ():
            writer.delete(chunks)


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

    def search(
        self, names: Iterable[str], question: str, top_k: int, selection: PassageFilter = ANY
    ) -> list[Passage]:
        """The passages nearest to the question over several collections, best first."""
        filled = [self.collections[name] for name in names if len(self.collections[name])]
        return fuse([index.candidates(question, top_k, selection) for index in filled], top_k)


def token_counter(name: str, dtype: str, fingerprint: str, prompts: PromptBuilder) -> TokenCounter:
    """Count tokens for an index whose passages are chunks in the prompts of this model."""
    model = f"{name} ({dtype.removeprefix('torch.')})"
    return TokenCounter(model, fingerprint, lambda passage: len(prompts.chunk(passage)))
