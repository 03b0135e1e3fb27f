"""How chunk KV reaches a prompt: copies in memory, the local store, another machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from blendserve.config import StoreConfig
from blendserve.errors import ConfigError
from blendserve.fetch.copies import open_copies
from blendserve.fetch.fetcher import KVFetcher
from blendserve.fetch.tiered import TieredStore
from blendserve.machine import fit
from blendserve.registry import STORES
from blendserve.store import KVStore, MemoryStore, StoreKind

__all__ = ["KVFetcher", "TieredStore", "open_storage", "open_store"]


def open_storage(
    config: StoreConfig, default_path: Path | None, device: torch.device
) -> tuple[KVStore, KVFetcher]:
    """The store that the settings ask for, and what brings its chunks to a model on this device.

    default_path: see open_store. Raises StoreUnavailable, StoreVersion; ConfigError for caches that would do nothing on
    the device.
    """
    copies = open_copies(config, device)
    with ExitStack() as opened:
        store = opened.enter_context(open_store(config, default_path))
        fetcher = KVFetcher(store, copies=copies, prefetch_bytes=fit(config.prefetch_bytes))
        opened.pop_all()
    return store, fetcher


def open_store(
    config: StoreConfig,
    default_path: Path | None,
    read_only: bool = False,
    persistent: bool = False,
) -> KVStore:
    """The store that the settings ask for; if its kind cannot serve, the first registered kind that can.

    default_path: the folder if the settings name none; None = there is none, which rules out kinds that need one.
    persistent: only kinds that outlive the process. read_only: a remote store is left out. Raises StoreUnavailable,
    StoreVersion.
    """
    path = config.path or default_path
    remote = None if read_only else config.remote
    kinds: Iterator[StoreKind] = map(STORES.load, (config.kind, *STORES.names))
    kind = next(k for k in kinds if (path or not k.needs_folder) and (k.persistent or not persistent))
    far: StoreKind | None = STORES.load(remote.kind) if remote else None
    if remote and far and far.needs_folder and not remote.path:
        raise ConfigError(
            "setting 'store.remote.location' is missing: name a server, a collection, or a folder that machines share",
            setting="store.remote.location",
        )
    opened = kind.from_config(config, path, read_only)
    if not isinstance(opened, KVStore):
        if remote:
            raise ConfigError(
                f"nothing can be stored in the collection {config.location}, so 'store.remote' has no effect with it: "
                "give it as store.remote.location, and leave store.location out or set it to a folder",
                setting="store.remote",
            )
        return TieredStore(MemoryStore(0), opened)
    if not remote or not far:
        return opened
    try:
        return TieredStore(opened, far.from_config(remote, remote.path, False))
    except BaseException:
        opened.close()
        raise
