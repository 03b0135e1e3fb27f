"""Chunk KV, kept: one contract (base.py), in an LMDB file (lmdb/) or in memory (memory.py), behind tiers (tiers.py)."""

from __future__ import annotations

from pathlib import Path

import torch

from blendserve.config import StoreConfig
from blendserve.store.base import ChunkView, KVStore, Snapshot, StoreStats, TierStats, VerifyReport
from blendserve.store.key import ChunkKey, chunk_key, share_of
from blendserve.store.lmdb.store import LMDBStore
from blendserve.store.memory import MemoryStore
from blendserve.store.policies import ADMISSIONS, EVICTIONS
from blendserve.store.tiers import TieredStore, tiers_for

__all__ = [
    "ChunkKey",
    "ChunkView",
    "KVStore",
    "LMDBStore",
    "MemoryStore",
    "Snapshot",
    "StoreStats",
    "TierStats",
    "TieredStore",
    "VerifyReport",
    "chunk_key",
    "open_store",
    "share_of",
]


def open_store(
    config: StoreConfig, default_path: Path, read_only: bool = False, device: torch.device | None = None
) -> KVStore:
    """The store that the settings ask for; `default_path` is used where they name no folder.

    device: where its reader computes; None = it has none, and so no tiers.
    Raises StoreUnavailable, StoreVersion; ConfigError for tiers that would do nothing on the device.
    """
    cap_bytes = round(config.cap_gb * 1e9)
    eviction, admission = EVICTIONS[config.eviction](), ADMISSIONS[config.admission]()
    tiers = tiers_for(config.tiers, admission, device) if device else []
    store: KVStore
    if config.kind == "memory":
        store = MemoryStore(cap_bytes, eviction, admission)
    else:
        path = config.path or default_path
        store = LMDBStore(path, cap_bytes, read_only, eviction=eviction, admission=admission)
    return TieredStore(store, tiers) if tiers else store
