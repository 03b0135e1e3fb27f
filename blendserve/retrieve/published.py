"""An index as files: what is published of it, and a folder made of published files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, TypeAdapter

from blendserve.retrieve.database import Database
from blendserve.retrieve.index import VectorIndex
from blendserve.retrieve.tables import FORMAT, EmbeddedDocument, Manifest, begin, insert, read_documents

MANIFEST, DOCUMENTS, VECTORS = "manifest.json", "documents.jsonl", "vectors.f32"
FILES = {MANIFEST, DOCUMENTS, VECTORS}

Contents = tuple[Manifest, Sequence[EmbeddedDocument]]


@dataclass(frozen=True, slots=True)
class Line:
    """A document in DOCUMENTS."""

    id: str
    title: str
    digest: str
    texts: list[str]  # of its passages
    windows: list[Annotated[int, Field(ge=1)]]  # number of vectors of each passage


def to_files(index: VectorIndex) -> dict[str, bytes]:
    """The files of an index, by name; the same for the same contents."""
    manifest = index.manifest
    with index.database.read() as rows:
        documents = list(read_documents(rows, manifest.dimension))
    lines = [
        asdict(Line(d.id, d.title, d.digest, [*d.texts], [len(v) for v in d.vectors])) for d in documents
    ]
    vectors = [vectors for document in documents for vectors in document.vectors]
    return {
        MANIFEST: manifest_file(manifest),
        DOCUMENTS: "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode(),
        VECTORS: b"".join(np.ascontiguousarray(v, "<f4").tobytes() for v in vectors),
    }


def manifest_file(manifest: Manifest) -> bytes:
    """The content of MANIFEST: changes whenever the index does."""
    return json.dumps(asdict(manifest), indent=2).encode()


def parse_files(files: Mapping[str, bytes]) -> Contents:
    """The contents of files that anybody may have made. Raises ValueError for what `to_files` never makes."""
    manifest = TypeAdapter(Manifest).validate_json(files[MANIFEST])
    parse = TypeAdapter(Line).validate_json
    lines = [parse(line) for line in files[DOCUMENTS].split(b"\n")[:-1]]
    windows = [n for line in lines for n in line.windows]
    counted = manifest.counted({line.id: line.digest for line in lines}.items(), len(windows), sum(windows))
    if manifest.format != FORMAT or manifest.dimension < 1:
        raise ValueError("another format")
    vectors = np.frombuffer(files[VECTORS], "<f4").reshape(sum(windows), manifest.dimension)
    if counted != manifest or manifest.documents != len(lines):
        raise ValueError("other contents than it says")
    if not np.isfinite(vectors).all():
        raise ValueError("vectors that are no numbers")
    pieces = iter(np.split(vectors, np.cumsum(windows)[:-1]))
    documents = [
        EmbeddedDocument(n.id, n.title, n.digest, n.texts, [next(pieces) for _ in n.windows]) for n in lines
    ]
    if any(len(document.texts) != len(document.vectors) for document in documents):
        raise ValueError("passages without vectors")
    return manifest, documents


def write_index(folder: Path, contents: Contents) -> None:
    """Make the index in a folder the same as these contents. Raises VectorIndexError."""
    manifest, documents = contents
    database = Database(folder)
    database.make()
    with database.write() as rows:
        begin(rows, manifest)
        for document in documents:
            insert(rows, document)
    database.close()
