"""Writes an index as files for publishing, and makes an index of published files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter

from blendserve.retrieve import tables
from blendserve.retrieve.database import Database
from blendserve.retrieve.index import VectorIndex
from blendserve.retrieve.tables import EmbeddedDocument, Manifest

MANIFEST, DOCUMENTS, VECTORS = "manifest.json", "documents.jsonl", "vectors.f32"
FILES = {MANIFEST, DOCUMENTS, VECTORS}

Contents = tuple[Manifest, Sequence[EmbeddedDocument]]


@dataclass(frozen=True, slots=True)
class Line:
    """A document in DOCUMENTS."""

    id: str
    title: str
    digest: str
    texts: list[tuple[str, str]]  # title and text of its passages
    windows: list[Annotated[int, Field(ge=1)]]  # number of vectors of each passage
    metadata: dict[str, list[Any]]


def to_files(index: VectorIndex) -> dict[str, bytes]:
    """Return the files of an index, by name; equal contents give equal files."""
    manifest = index.manifest
    lines: list[str] = []
    vectors: list[bytes] = []
    with index.database.read() as rows:
        metadata = tables.all_metadata(rows)
        for document, passages in tables.documents_with_vectors(rows):
            windows = [len(content) // (4 * manifest.dimension) for *_, content in passages]
            texts = [(title, text) for title, text, _ in passages]
            line = Line(*document, texts, windows, metadata.get(document[0], {}))
            lines.append(json.dumps(asdict(line), ensure_ascii=False) + "\n")
            vectors += [content for *_, content in passages]
    return {
        MANIFEST: manifest_file(manifest),
        DOCUMENTS: "".join(lines).encode(),
        VECTORS: b"".join(vectors),
    }


def manifest_file(manifest: Manifest) -> bytes:
    """The content of MANIFEST: changes whenever the index does."""
    return json.dumps(asdict(manifest), indent=2).encode()


def parse_files(files: Mapping[str, bytes]) -> Contents:
    """Parse files from an untrusted source. Raises ValueError for what `to_files` never makes."""
    manifest = TypeAdapter(Manifest).validate_json(files[MANIFEST])
    parse = TypeAdapter(Line).validate_json
    lines = [parse(line) for line in files[DOCUMENTS].split(b"\n")[:-1]]
    windows = [n for line in lines for n in line.windows]
    made = len({line.id for line in lines}), len(windows), sum(windows)
    if made != (manifest.documents, manifest.passages, manifest.vectors) or made[0] != len(lines):
        raise ValueError("other contents than it says")
    if any(len(line.texts) != len(line.windows) for line in lines):
        raise ValueError("passages without vectors")
    if manifest.format != tables.FORMAT or manifest.dimension < 1:
        raise ValueError("another format")
    vectors = np.frombuffer(files[VECTORS], "<f4").reshape(sum(windows), manifest.dimension)
    if not np.isfinite(vectors).all():
        raise ValueError("vectors that are no numbers")
    of_passages = iter(np.split(vectors, np.cumsum(windows, dtype=int)[:-1]))
    return manifest, [
        EmbeddedDocument(
            *(line.id, line.title, line.digest, line.texts),
            *([next(of_passages) for _ in line.texts], line.metadata),
        )
        for line in lines
    ]


def write_index(folder: Path, contents: Contents) -> None:
    """Make the index in a folder the same as these contents. Raises VectorIndexError."""
    manifest, documents = contents
    database = Database(folder)
    database.make()
    with database.write() as rows:
        tables.begin(rows, manifest)
        for document in documents:
            tables.insert(rows, document)
    database.close()
