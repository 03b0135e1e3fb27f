"""Stores of chunk KV: one contract (base.py); an LMDB file (lmdb.py), memory (memory.py), a server (valkey.py)."""

from __future__ import annotations

from blendserve.store.base import KVStore, Miss, Snapshot, StoreKind, StoreStats, VerifyReport, read_record
from blendserve.store.key import ChunkKey, chunk_key, share_of
from blendserve.store.lmdb import LMDBStore
from blendserve.store.memory import MemoryStore
from blendserve.store.record import ChunkRecord
from blendserve.store.view import ChunkView, TensorView, open_view

__all__ = [
    "ChunkKey",
    "ChunkRecord",
    "ChunkView",
    "KVStore",
    "LMDBStore",
    "MemoryStore",
    "Miss",
    "Snapshot",
    "StoreKind",
    "StoreStats",
    "TensorView",
    "VerifyReport",
    "chunk_key",
    "open_view",
    "read_record",
    "share_of",
]
