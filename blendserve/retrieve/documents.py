"""Makes documents of Python objects; ids and digests of documents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from blendserve.core import Document
from blendserve.errors import CorpusError
from blendserve.readers.base import Unreadable
from blendserve.readers.records import record


def as_documents(objects: Iterable[Document | str | Mapping[str, Any]]) -> Iterator[Document]:
    """Yield documents from documents, texts, or mappings with `text` and optionally `title`, `id` and `metadata`.

    Raises CorpusError with the position of an invalid object.
    """
    if isinstance(objects, str | Mapping | Document):
        objects = [objects]
    if not isinstance(objects, Iterable):
        raise CorpusError(f"documents cannot be {repr(objects)[:40]}: give a list of documents or texts")
    for n, item in enumerate(objects, 1):
        if isinstance(item, Document):
            item = {"text": item.text, "title": item.title, "id": item.id, "metadata": item.metadata}
        try:
            content = record({"text": item} if isinstance(item, str) else item, n)
        except Unreadable as error:
            message = f"documents[{n - 1}]: {error.reason}"
            raise CorpusError(message, setting=error.setting, line=n) from None
        yield Document(content.text, content.title or "", content.id or "", content.metadata or {})


def document_id(document: Document) -> str:
    """Return the document's own id, else a digest of its title and text."""
    return document.id or _digest(document.title, document.text)[:16]


def content_digest(document: Document) -> str:
    """Return 32 hex digits that change when the title, the text or the metadata changes."""
    metadata = json.dumps(document.metadata, sort_keys=True, default=str) if document.metadata else ""
    return _digest(document.title, document.text, *filter(None, [metadata]))


def _digest(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in map(str.encode, parts):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
