"""Chunk KV, kept: one contract (base.py), in an LMDB file (lmdb.py) or in memory (memory.py),
before a store that other machines use, too (layered.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from blendserve.config import RemoteConfig, StoreConfig
from blendserve.errors import ConfigError
from blendserve.registry import ADMISSIONS, EVICTIONS, STORES
from blendserve.store.ahead import ReadAhead
from blendserve.store.base import (
    ChunkInfo,
    KVStore,
    Miss,
    RemoteStats,
    Snapshot,
    StoreKind,
    StoreStats,
    TierStats,
    VerifyReport,
    read_record,
)
from blendserve.store.key import ChunkKey, chunk_key, share_of
from blendserve.store.layered import LayeredStore
from blendserve.store.lmdb import LMDBStore
from blendserve.store.memory import MemoryStore
from blendserve.store.policies import Policies
from blendserve.store.record import ChunkRecord
from blendserve.store.request_reads import Reads
from blendserve.store.view import ChunkView, TensorView, open_view

__all__ = [
    "ChunkInfo",
    "ChunkKey",
    "ChunkRecord",
    "ChunkView",
    "KVStore",
    "LMDBStore",
    "LayeredStore",
    "MemoryStore",
    "Miss",
    "ReadAhead",
    "Reads",
    "RemoteStats",
    "Snapshot",
    "StoreKind",
    "StoreStats",
    "TensorView",
    "TierStats",
    "VerifyReport",
    "chunk_key",
    "open_store",
    "open_view",
    "read_record",
    "share_of",
]


def open_store(
    config: StoreConfig,
    default_path: Path | None,
    read_only: bool = False,
    persistent: bool = False,
) -> KVStore:
    """The store that the settings ask for; where its kind cannot serve, the first registered kind that can.

    default_path: the folder where the settings name none; None = there is none, which rules out kinds that need one.
    persistent: only what outlives the process will do. read_only: a remote store is left out. Raises StoreUnavailable,
    StoreVersion.
    """
    path = config.path or default_path
    kinds: Iterator[StoreKind] = map(STORES.load, (config.kind, *STORES.names))
    kind = next(k for k in kinds if (path or not k.needs_folder) and (k.persistent or not persistent))
    policies = Policies(EVICTIONS.load(config.eviction)(), ADMISSIONS.load(config.admission)())
    store = kind.from_config(config, path, read_only, policies)
    if config.remote and not read_only:
        far = _remote(config.remote, store)
        store = LayeredStore(store, far, config.remote_write, config.prefetch_bytes)
    elif store.far and not read_only and config.prefetch_bytes:
        store = ReadAhead(store, config.prefetch_bytes)
    return store


def _remote(config: RemoteConfig, near: KVStore) -> KVStore:
    """The store that is shared with other machines; the near one is closed if it cannot be opened."""
    kind: StoreKind = STORES.load(config.kind)
    policies = Policies(EVICTIONS.load(config.eviction)(), ADMISSIONS.load(config.admission)())
    try:
        if kind.needs_folder and not config.path:
            raise ConfigError(
                "setting 'store.remote.location' is missing: name a server, a collection, or a folder that the machines "
                "share",
                setting="store.remote.location",
            )
        return kind.from_config(config, config.path, False, policies)
    except BaseException:
        near.close()
        raise
