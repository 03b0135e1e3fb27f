"""How chunk KV reaches a prompt: copies in memory, the local store, another machine."""

from __future__ import annotations

from pathlib import Path

import torch

from blendserve.config import StoreConfig
from blendserve.fetch.copies import open_copies
from blendserve.fetch.fetcher import KVFetcher
from blendserve.store import KVStore, open_store

__all__ = ["KVFetcher", "open_storage"]


def open_storage(
    config: StoreConfig, default_path: Path | None, device: torch.device
) -> tuple[KVStore, KVFetcher]:
    """The store that the settings ask for, and what brings its chunks to a model on this device.

    default_path: see open_store. Raises StoreUnavailable, StoreVersion; ConfigError for caches that would do nothing on
    the device.
    """
    copies = open_copies(config, device)
    store = open_store(config, default_path)
    return store, KVFetcher(store, copies=copies)
