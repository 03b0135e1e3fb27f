"""Retrieval: corpus.py -> Document, chunker.py -> Passage, embedder.py -> vectors, index.py -> nearest passages."""

from blendserve.retrieve.chunker import TokenCounter, split
from blendserve.retrieve.corpus import ReadReport, read_documents, read_files
from blendserve.retrieve.database import read_manifest
from blendserve.retrieve.demo_corpus import language_reference
from blendserve.retrieve.documents import as_documents, document_id
from blendserve.retrieve.embedder import Embedder
from blendserve.retrieve.index import VectorIndex
from blendserve.retrieve.tables import Manifest

__all__ = [
    "Embedder",
    "Manifest",
    "ReadReport",
    "TokenCounter",
    "VectorIndex",
    "as_documents",
    "document_id",
    "language_reference",
    "read_documents",
    "read_files",
    "read_manifest",
    "split",
]
