"""Collections: indexes by name, searched together. Used by one thread: an index may not change while it is searched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from blendserve.core import Document, Passage
from blendserve.engine.engine import Engine
from blendserve.errors import ConfigError, InputError, NotFound
from blendserve.paths import index_folder
from blendserve.retrieve import VectorIndex
from blendserve.serve.keys import Tenant


class Library:
    """The indexes that this server has open."""

    def __init__(self, collections: Mapping[str, VectorIndex]) -> None:
        self.collections = dict(collections)

    @classmethod
    def open(cls, engine: Engine, indexes: Sequence[str]) -> Library:
        """The engine's index, which is the first, and others that were built with the same reader and embedder.

        Raises IndexMissing, IndexMismatch, and ConfigError for two of one name.
        """
        first = engine.index
        assert first is not None
        made, found = first.manifest, {name_of(indexes[0]): first}
        for index in indexes[1:]:
            if name_of(index) in found:
                raise ConfigError(f"two indexes are called {name_of(index)!r}: rename a folder")
            found[name_of(index)] = VectorIndex.open(
                index_folder(index),
                first.embedder,
                reader=made.reader,
                reader_fingerprint=made.reader_fingerprint,
                count=lambda passage: len(engine.prompts.chunk(passage)),
            )
        return cls(found)

    def visible(self, tenant: Tenant) -> list[str]:
        """The collections that a tenant may use."""
        return [name for name in self.collections if tenant.may_use(name)]

    def one(self, tenant: Tenant, name: str | None) -> tuple[str, VectorIndex]:
        """A collection by name, or the tenant's only one. Raises NotFound, also for one that is not his; InputError."""
        mine = self.visible(tenant)
        if name is None and len(mine) != 1:
            raise InputError(f"name a collection: {', '.join(mine) or 'this API key has none'}")
        name = mine[0] if name is None else name
        if name not in mine:
            raise NotFound(f"there is no collection {name!r}: this API key has {', '.join(mine) or 'none'}")
        return name, self.collections[name]

    def search(self, tenant: Tenant, question: str, names: Iterable[str] | None, top_k: int) -> list[Passage]:
        """The passages nearest to the question over several collections, default: all of the tenant's."""
        chosen = [
            self.one(tenant, name)[1]
            for name in (self.visible(tenant) if names is None else dict.fromkeys(names))
        ]
        filled = [index for index in chosen if len(index)]
        found = [p for index in filled for p in index.search(question, top_k)]
        return sorted(found, key=lambda p: (-(p.score or 0.0), p.id))[:top_k]

    def add(self, index: VectorIndex, document: Document) -> tuple[list[Passage], list[Passage]]:
        """Add or replace a document and save -> its passages, and those that it replaced."""
        before = index.passages
        index.add([document])
        index.save()
        now, known = set(index.passages), set(before)
        return [p for p in index.passages if p not in known], [p for p in before if p not in now]

    def delete(self, index: VectorIndex, doc_id: str) -> list[Passage]:
        """Remove a document and save -> the passages that it had. Raises NotFound."""
        gone = [p for p in index.passages if p.doc_id == doc_id]
        if not index.delete(doc_id):
            raise NotFound(f"there is no document {doc_id!r} in this collection")
        index.save()
        return gone


def name_of(index: str) -> str:
    """What clients call an index: its folder's name."""
    return Path(index).name
