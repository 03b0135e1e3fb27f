"""The tables of an index's file, and what their rows mean. Each function runs in a transaction of database.py."""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from blendserve.core import Passage, PassageFilter
from blendserve.errors import IndexMismatch
from blendserve.retrieve.terms import pack

FORMAT = 7
KEPT_JOBS = 100  # of each namespace
KEPT_CHANGES = 100_000  # documents added or deleted; who was away for more loads the index anew
REBUILD = "build it again with `blendserve index build`"
# tables; those that refer to others first
CONTENTS = (
    "gone",
    "vectors",
    "metadata",
    "passages",
    "documents",
    "manifest",
)
# A number is never used twice: a larger one was added later.
SCHEMA = """
CREATE TABLE IF NOT EXISTS manifest (settings TEXT NOT NULL, stamp TEXT NOT NULL, revision INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS documents (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, title TEXT NOT NULL, digest TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS passages (
    number INTEGER PRIMARY KEY AUTOINCREMENT, document INTEGER NOT NULL REFERENCES documents ON DELETE CASCADE,
    place INTEGER NOT NULL, title TEXT NOT NULL, text TEXT NOT NULL, hash INTEGER NOT NULL, windows INTEGER NOT NULL,
    words BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS passages_of_document ON passages (document);
CREATE INDEX IF NOT EXISTS passages_of_text ON passages (hash);
CREATE TABLE IF NOT EXISTS vectors (
    passage INTEGER PRIMARY KEY REFERENCES passages ON DELETE CASCADE, content BLOB NOT NULL, hash INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS metadata (
    name TEXT NOT NULL, value TEXT NOT NULL, document INTEGER NOT NULL REFERENCES documents ON DELETE CASCADE,
    PRIMARY KEY (name, value, document)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS metadata_of_document ON metadata (document);
CREATE TABLE IF NOT EXISTS gone (
    revision INTEGER NOT NULL, passage INTEGER NOT NULL, PRIMARY KEY (revision, passage)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, namespace TEXT NOT NULL, state TEXT NOT NULL
)
"""

Rows = sqlite3.Connection  # in a transaction


@dataclass(frozen=True, slots=True)
class Manifest:
    """Models and settings of an index, and what it contains."""

    format: int
    embedder: str
    embedder_fingerprint: str
    dimension: int
    reader: str  # whose tokens limit the chunks
    reader_fingerprint: str
    chunk_tokens: int
    corpus: str = ""  # digest of all document ids and contents, in any order
    documents: int = 0
    passages: int = 0
    vectors: int = 0

    def check(self, folder: Path, embedder: tuple[str, str], model: tuple[str, str]) -> None:
        """Raises IndexMismatch unless the index was built with this embedder and reader (name, fingerprint)."""
        for part, name, digest, (given_name, given) in (
            ("embedder", self.embedder, self.embedder_fingerprint, embedder),
            ("model", self.reader, self.reader_fingerprint, model),
        ):
            if digest != given:
                why = ", whose weights or quantisation differ" if given_name == name else ""
                raise IndexMismatch(
                    f"index {folder} was built with {part} {name!r} ({digest[:8]}), not with {given_name!r} "
                    f"({given[:8]}){why}: open it with the {part} it was built with, or {REBUILD}",
                    setting=part,
                    path=folder,
                )


class EmbeddedDocument(NamedTuple):
    """A document as an index has it: cut into passages, each with the vectors of its windows."""

    id: str
    title: str
    digest: str  # of title and text
    texts: Sequence[tuple[str, str]]  # title and text of its passages
    vectors: Sequence[np.ndarray]  # of each passage: [windows, dimension] float32
    metadata: Mapping[str, Any]

    @property
    def passages(self) -> list[Passage]:
        """The passages in order."""
        return [_passage(self.id, n, title, text) for n, (title, text) in enumerate(self.texts)]


def begin(rows: Rows, manifest: Manifest) -> None:
    """Delete all documents, and write this manifest."""
    for table in CONTENTS:
        rows.execute(f"DELETE FROM {table}")
    settings = json.dumps(asdict(replace(manifest, corpus="", documents=0, passages=0, vectors=0)))
    rows.execute("INSERT INTO manifest VALUES (?, ?, 0)", (settings, secrets.token_hex(8)))


def state(rows: Rows) -> tuple[str, int]:
    """Return the index's random stamp, drawn when it was begun, and the number of changes since then."""
    stamp, revision = rows.execute("SELECT stamp, revision FROM manifest").fetchone()
    return stamp, revision


def with_counts(rows: Rows, manifest: Manifest) -> Manifest:
    """The manifest with the digest and the numbers of the present contents."""
    digests = rows.execute("SELECT id, digest FROM documents ORDER BY id").fetchall()
    corpus = xxhash.xxh3_128_hexdigest(
        "".join(f"{doc_id}\0{digest}\0" for doc_id, digest in digests).encode()
    )
    passages, vectors = rows.execute("SELECT count(*), coalesce(sum(windows), 0) FROM passages").fetchone()
    return replace(manifest, corpus=corpus, documents=len(digests), passages=passages, vectors=vectors)


def digest_of(rows: Rows, doc_id: str) -> str | None:
    """The digest of a document's content; None for one that is not in the index."""
    row = rows.execute("SELECT digest FROM documents WHERE id = ?", (doc_id,)).fetchone()
    return row[0] if row else None


def document_ids(rows: Rows) -> set[str]:
    """The ids of all documents."""
    return {doc_id for (doc_id,) in rows.execute("SELECT id FROM documents")}


def insert(rows: Rows, document: EmbeddedDocument) -> None:
    """Add a document whose id is new."""
    rows.execute("UPDATE manifest SET revision = revision + 1")
    values = document.id, document.title, document.digest
    number = rows.execute("INSERT INTO documents (id, title, digest) VALUES (?, ?, ?)", values).lastrowid
    for name, value in document.metadata.items():
        for each in value if isinstance(value, list) else [value]:
            rows.execute("INSERT OR IGNORE INTO metadata VALUES (?, ?, ?)", (name, _json(each), number))
    for n, (passage, vectors) in enumerate(zip(document.passages, document.vectors, strict=True)):
        row = (
            number,
            n,
            passage.title,
            passage.text,
            text_hash(passage),
            len(vectors),
            pack(passage.chunk_text),
        )
        added = rows.execute(
            "INSERT INTO passages (document, place, title, text, hash, windows, words) VALUES (?, ?, ?, ?, ?, ?, ?)",
            row,
        ).lastrowid
        content = np.ascontiguousarray(vectors, "<f4").tobytes()
        rows.execute("INSERT INTO vectors VALUES (?, ?, ?)", (added, content, _hash(content)))


def remove(rows: Rows, doc_id: str) -> list[Passage]:
    """Delete a document -> its passages."""
    passages = select_passages(rows, "d.id = ?", doc_id)
    rows.execute("UPDATE manifest SET revision = revision + 1")
    _, revision = state(rows)
    rows.execute(
        "INSERT INTO gone SELECT ?, p.number FROM passages p JOIN documents d ON d.number = p.document WHERE d.id = ?",
        (revision, doc_id),
    )
    rows.execute("DELETE FROM gone WHERE revision <= ?", (revision - KEPT_CHANGES,))
    rows.execute("DELETE FROM documents WHERE id = ?", (doc_id,))
    return passages


def select_passages(rows: Rows, condition: str = "1", *values: Any) -> list[Passage]:
    """The passages p of documents d that fulfil the condition, in the order they were added."""
    query = (
        "SELECT d.id, p.place, p.title, p.text, p.hash FROM passages p JOIN documents d ON d.number = p.document "
        f"WHERE {condition} ORDER BY p.number"
    )
    found = list[Passage]()
    for doc_id, place, title, text, hash in rows.execute(query, values):
        passage = _passage(doc_id, place, title, text)
        if text_hash(passage) != hash:
            raise sqlite3.DatabaseError(f"passage {passage.id!r} does not match its hash")
        found.append(passage)
    return found


def gone_since(rows: Rows, before: tuple[str, int]) -> np.ndarray | None:
    """Numbers of the passages that were deleted after a state; None if that is not known any more."""
    stamp, revision = state(rows)
    if stamp != before[0] or revision - before[1] > KEPT_CHANGES:
        return None
    found = rows.execute("SELECT passage FROM gone WHERE revision > ?", (before[1],)).fetchall()
    return np.array(found, np.int64).reshape(-1)


def read_numbers(rows: Rows, after: int) -> np.ndarray:
    """[3, n] int64 of passages with larger numbers, ascending: their numbers, hashes of texts, numbers of documents."""
    query = "SELECT number, hash, document FROM passages WHERE number > ? ORDER BY number"
    found: np.ndarray = np.array(rows.execute(query, (after,)).fetchall(), np.int64).reshape(-1, 3).T
    return found


def read_vectors(rows: Rows, after: int, dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """The vectors of passages with larger numbers: [n] int64 numbers of passages, [n, dimension] float32."""
    (n,) = rows.execute(
        "SELECT coalesce(sum(windows), 0) FROM passages WHERE number > ?", (after,)
    ).fetchone()
    owner = np.empty(n, np.int64)
    vectors = np.empty((n, dimension), np.float32)
    at = 0
    query = "SELECT passage, content, hash FROM vectors WHERE passage > ? ORDER BY passage"
    for number, content, hash in rows.execute(query, (after,)):
        if _hash(content) != hash:
            raise sqlite3.DatabaseError(f"the vectors of passage {number} do not match their hash")
        some = np.frombuffer(content, "<f4").reshape(-1, dimension)
        owner[at : at + len(some)] = number
        vectors[at : at + len(some)] = some
        at += len(some)
    return owner, vectors


def read_words(rows: Rows, after: int) -> Iterator[tuple[int, bytes]]:
    """Number and packed words of each passage with a larger number, in order."""
    return rows.execute("SELECT number, words FROM passages WHERE number > ? ORDER BY number", (after,))


def selected(selection: PassageFilter, document: str) -> tuple[str, list[str]]:
    """Return an SQL condition on a column of document numbers, and its values. Without metadata it is always true."""
    terms = ["1"]
    values: list[str] = []
    for name, wanted in selection.conditions:
        marks = ", ".join("?" * len(wanted))
        terms.append(f"{document} IN (SELECT document FROM metadata WHERE name = ? AND value IN ({marks}))")
        values += [name, *map(_json, wanted)]
    return " AND ".join(terms), values


def selected_documents(rows: Rows, selection: PassageFilter) -> np.ndarray | None:
    """The numbers of the documents that have the metadata; None if all have."""
    if not selection.conditions:
        return None
    condition, values = selected(selection, "number")
    found = rows.execute(f"SELECT number FROM documents WHERE {condition}", values)
    return np.fromiter((number for (number,) in found), np.int64)


def all_metadata(rows: Rows) -> dict[str, dict[str, list[Any]]]:
    """The metadata of documents that have some, by id: the values of each field."""
    found = dict[str, dict[str, list[Any]]]()
    query = "SELECT d.id, m.name, m.value FROM metadata m JOIN documents d ON d.number = m.document"
    for doc_id, name, value in rows.execute(f"{query} ORDER BY d.number, m.name, m.value"):
        found.setdefault(doc_id, {}).setdefault(name, []).append(json.loads(value))
    return found


def documents_with_vectors(rows: Rows) -> Iterator[tuple[tuple[str, str, str], list[tuple[str, str, bytes]]]]:
    """Id, title and digest of each document in the order they were added; title, text and vectors of its passages."""
    query = (
        "SELECT d.id, d.title, d.digest, p.title, p.text, v.content FROM documents d "
        "JOIN passages p ON p.document = d.number JOIN vectors v ON v.passage = p.number ORDER BY p.number"
    )
    for document, passages in groupby(rows.execute(query), lambda row: row[:3]):
        yield document, [row[3:] for row in passages]


def list_documents(rows: Rows, selection: PassageFilter) -> list[tuple[str, str, int]]:
    """Id, title and number of passages of each selected document, in the order they were added."""
    condition, values = selected(selection, "d.number")
    query = (
        "SELECT d.id, d.title, count(p.number) FROM documents d LEFT JOIN passages p ON p.document = d.number "
        f"WHERE {condition} GROUP BY d.number ORDER BY d.number"
    )
    return list(rows.execute(query, values))


def save_job(rows: Rows, job: Mapping[str, Any]) -> None:
    """Save the state of a job, and delete the oldest ones of its namespace."""
    rows.execute(
        "INSERT INTO jobs (id, namespace, state) VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET state = excluded.state",
        (job["id"], job["namespace"], json.dumps(job)),
    )
    rows.execute(
        "DELETE FROM jobs WHERE number IN "
        "(SELECT number FROM jobs WHERE namespace = ? ORDER BY number DESC LIMIT -1 OFFSET ?)",
        (job["namespace"], KEPT_JOBS),
    )


def read_jobs(rows: Rows) -> list[dict[str, Any]]:
    """The jobs, the oldest first."""
    return [json.loads(job) for (job,) in rows.execute("SELECT state FROM jobs ORDER BY number")]


def text_hash(passage: Passage) -> int:
    """Return a number that is equal for passages that make the same chunk."""
    return _hash(passage.chunk_text.encode())


def _passage(doc_id: str, place: int, title: str, text: str) -> Passage:
    """The passage at a place of its document, as chunker.py makes it."""
    return Passage(text=text, title=title, id=f"{doc_id}:{place}", doc_id=doc_id)


def _json(value: Any) -> str:
    """Return a text that is equal for equal values, as for 1 and 1.0."""
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value, sort_keys=True, default=str)


def _hash(content: bytes) -> int:
    return int.from_bytes(xxhash.xxh3_64_digest(content), "big", signed=True)
