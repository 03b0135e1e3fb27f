"""A store kind as it would be added: this file, and one line in the registry. It ends with the process."""

from __future__ import annotations

from pathlib import Path

from blendserve.config import PlaceConfig
from blendserve.store import MemoryStore
from blendserve.store.policies import Policies
from blendserve.store.wrapped import WrappedStore


class ToyStore(WrappedStore):
    """Chunks in memory."""

    persistent = needs_folder = False

    @classmethod
    def from_config(
        cls, config: PlaceConfig, path: Path | None, read_only: bool, policies: Policies
    ) -> ToyStore:
        return cls(MemoryStore(config.cap_bytes, *policies))
